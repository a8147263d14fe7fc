"""Set-up on nodes that have sshd, a python and nothing else: from an empty folder to the first iteration, by keyboard
and by two commands."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine.api import Engine
from engine.cluster.wheels import installed_here
from engine.demo import ensure_made
from tests import IMPORTS
from tests.cluster import system
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import install_demo
from tests.cluster.mac import cluster as mac_cluster
from tests.cluster.mac.cluster import MacCluster, MacNode
from tests.cluster.machine import Machine
from tests.demo_copies import demo_below
from tests.tui import conftest
from tests.tui.commands import flightdeck
from tests.tui.conftest import SMALL, Console
from tests.wheels import write_wheel
from tui.app import FlightDeckApp
from tui.screens.setup import Setup

pytestmark = [pytest.mark.slow, pytest.mark.needs("namespaces")]
MOST_KEYS = 15
PLACE = "/opt/homebrew"
"""Where a bare node has a python of its own."""
MARKERS = {
    "os_name": "posix", "sys_platform": "linux", "platform_machine": platform.machine(), "platform_system": "Linux",
    "implementation_name": "cpython", "platform_python_implementation": "CPython",
    "python_version": "3.11", "python_full_version": "3.11.0",
}  # fmt: skip
MAC_MARKERS = {**MARKERS, "sys_platform": "darwin", "platform_machine": "arm64", "platform_system": "Darwin"}


def make_bare(node: Machine) -> None:
    """Without MLX, and with a python of the system's."""
    venv, place = node.disk.seen_from_head(node.python).parents[1], node.disk.seen_from_head(PLACE)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "packages.pth").unlink()
    if isinstance(node, MacNode):
        line = "import sysconfig; sysconfig.get_platform = lambda: 'macosx-11.0-arm64'"
        (packages / "platform.pth").write_text(line + "\n")
    place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(venv, place, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(venv)


def write_packages(folder: Path, *, mac: bool) -> None:
    """Wheels with the names and versions of this machine's packages, of which mlx's leads to their code: unpacking a
    hundred megabytes on each node shows no more."""
    paths = "".join(f"{path}\n" for path in (system.packages(), *IMPORTS))
    module = Path(mac_cluster.__file__).with_name("darwin.py")
    code = {"packages.pth": paths}
    if mac:
        code |= {
            "darwin.pth": "import flightdeck_darwin\n",
            "flightdeck_darwin.py": module.read_text(),
        }
    for text in {*installed_here(MARKERS), *installed_here(MAC_MARKERS)}:
        wanted = Requirement(text)
        version = next(iter(wanted.specifier)).version
        write_wheel(folder, wanted.name, version, content=code if wanted.name == "mlx" else {})


@pytest.fixture(params=["linux", "mac"])
def bare(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    """Four of them, with keys that nobody has accepted, and the demo's model and data."""
    mac = request.param == "mac"
    with MacCluster(4, ["m4-max-128"], "ring") if mac else Cluster(4) as cluster:
        install_demo(cluster, demo_below(home))
        for node in cluster.nodes:
            make_bare(node)
        write_packages(tmp_path / "wheels", mac=mac)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
        monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
        monkeypatch.setenv("FLIGHTDECK_BONJOUR", "off")
        (tmp_path / "studio").mkdir()
        monkeypatch.chdir(tmp_path / "studio")
        yield cluster


async def test_by_keyboard(bare: Cluster, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare.known_hosts.write_text("")
    monkeypatch.setattr(conftest, "PATIENCE_S", 240.0)
    keys: list[str] = []
    app = FlightDeckApp(Engine(home))
    async with app.run_test(size=SMALL) as pilot:
        console = Console(app, pilot)

        async def press(*pressed: str) -> None:
            keys.extend(pressed)
            await console.press(*pressed)

        async def step(name: str) -> Setup:
            await console.until(lambda: isinstance(app.screen, Setup) and app.screen.step.name == name, name)
            assert isinstance(app.screen, Setup)
            return app.screen

        await console.until(lambda: app.state.ready, "the engine")
        await press("i")
        setup = await step("nodes")
        await console.until(lambda: sum(one.answer is not None for one in setup.candidates.values()) == 5, "the hosts")
        await press("a")
        await press("y")
        await step("python")
        await console.until(lambda: ".flightdeck/environments" in console.screen, "what would be made")
        await press("enter")
        await step("model")
        await console.press(*"~/models/demo")
        await press("enter")
        await step("data")
        await console.press(*"~/data/demo")
        await press("enter")
        await console.shows("enter goes on with them")
        await press("enter")
        await step("method")
        await console.shows("a rank:")
        await press("enter")
        await step("file")
        await press("enter")
        await console.until(lambda: app.state.checks_at is not None and app.state.busy is None, "the preflight")
        assert app.state.failures() == 0, [check for check in app.state.checks if check.status == "fail"]
        await press("n", "right", "enter")
        await console.until(lambda: bool(app.state.snapshot and app.state.snapshot.record.iteration), "an iteration")
        assert app.state.snapshot is not None
        run = app.state.snapshot.record.id
        await Engine(home).runs.abort(run, now=True).__anext__()
        await console.until(lambda: not app.state.active, "its end")
    assert len(keys) <= MOST_KEYS, keys


def test_by_two_commands(bare: Cluster, home: Path) -> None:
    """With data that only this machine has."""
    names = [node.name for node in bare.nodes]
    shutil.copytree(ensure_made(home) / "data", "data")
    words = ("--model", "~/models/demo", "--data", "data", "--method", "full", "--iters", "3")
    done = flightdeck(home, "init", "--yes", *words, *names, cwd=Path.cwd())
    assert done.code == 0, (done.out, done.err)
    launched = flightdeck(home, "launch", "--follow", cwd=Path.cwd())
    assert launched.code == 0, (launched.out, launched.err)
