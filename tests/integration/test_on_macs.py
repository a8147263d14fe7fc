"""Four Macs, as far as Linux can show them: known, planned, checked, fixed, calibrated, trained on and stopped, from
commands and from the console; and a run that outlives a killed rank, sleep of head and node, and a cut node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.cluster.telemetry import telemetry
from engine.cluster.transport.fleet import Fleet
from engine.config.load import load_config
from engine.models import CheckStatus, Reason, RunState
from engine.run.events import AttemptFailed, AttemptResumed
from engine.run.run_plan import read_plan
from tests.cluster.command import command
from tests.cluster.demo_job import flightdeck_toml, install_demo
from tests.cluster.mac.cluster import MacCluster, MacNode
from tests.cluster.mac.commands import DISPLAY
from tests.demo_copies import demo_below
from tests.faults.cluster_runs import ClusterRun
from tests.faults.local_runs import PLANNED
from tests.faults.test_sleep import never_two_attempts
from tests.faults.test_training import await_iteration, trained
from tests.terminal import Terminal
from tests.tui.commands import flightdeck
from tests.tui.conftest import Console
from tui.app import FlightDeckApp
from tui.screens.stopping import Stopping

pytestmark = pytest.mark.needs("namespaces")
PATIENCE_S = 120.0
STATES = """
[checkpoint]
destination = "/Volumes/smb/states"
every = 5
"""
"""On a volume that has no F_FULLFSYNC."""


@pytest.fixture(scope="module")
def macs() -> Iterator[MacCluster]:
    with MacCluster(4, ["m4-max-128", "m3-ultra-512"], "ring") as cluster:
        yield cluster


@pytest.fixture
def studio(macs: MacCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the configuration of two of the Macs."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(macs.ssh_config))
    monkeypatch.setenv("FLIGHTDECK_BONJOUR", "off")
    install_demo(macs, demo_below(home))
    write_config(macs, tmp_path, "ana", "bea")
    yield tmp_path
    while PLANNED:
        PLANNED.pop().clear_away()
    macs.heal()


def write_config(macs: MacCluster, folder: Path, *names: str, more: str = "", **job: Any) -> None:
    keys = {"iters": 1000, "save_every": 500, "val_batches": 0, "max_seq_length": 64, **job}
    (folder / "flightdeck.toml").write_text(flightdeck_toml(macs, names, **keys) + more)


def document(home: Path, studio: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = flightdeck(home, *words, "--json", cwd=studio)
    assert done.code == code, (done.out, done.err)
    found: dict[str, Any] = json.loads(done.out)
    return found


def mac(macs: MacCluster, name: str) -> MacNode:
    node = macs[name]
    assert isinstance(node, MacNode)
    return node


def all_but(*names: str) -> list[str]:
    """The checks that are skipped where only these are wanted."""
    return sorted(CHECKS.keys() - {"ssh_connectivity", *names})


def launched(macs: MacCluster, home: Path, studio: Path, *skipped: str) -> ClusterRun:
    """A run of the configuration in `studio`, started by `flightdeck launch`."""
    words = [word for name in skipped for word in ("--skip", name)]
    directory = Engine(home).runs.find(document(home, studio, "launch", *words)["id"])
    nodes = [macs[node.name] for node in load_config(studio / "flightdeck.toml").nodes]
    run = ClusterRun(directory, read_plan(directory.plan), Path("~"), nodes=nodes)
    PLANNED.append(run)
    return run


def test_init_finds_four_macs_and_their_pythons(macs: MacCluster, home: Path, studio: Path) -> None:
    (studio / "flightdeck.toml").unlink()
    found = document(home, studio, "init", *(node.name for node in macs.nodes))
    assert [node["problem"] for node in found["nodes"]] == [None] * 4
    for node in load_config(studio / "flightdeck.toml").nodes:
        assert node.ssh == node.name and Path(node.python).parent == Path(macs[node.name].python).parent


def test_macs_are_known_planned_and_checked(macs: MacCluster, home: Path, studio: Path) -> None:
    reported = document(home, studio, "nodes")
    ana, bea = reported["nodes"]
    assert [(node["problem"], node["unknown"]) for node in (ana, bea)] == [(None, {})] * 2
    assert [node["memory_total_bytes"] for node in (ana, bea)] == [137_438_953_472, 549_755_813_888]
    assert (ana["model"], ana["os"], ana["home"], ana["rdma_enabled"]) == (
        "Mac16,9",
        "macOS 26.4.1 (25E253)",
        "/Users/ana",
        True,
    )
    plan = document(home, studio, "plan")
    hosts = plan["distributed_config"]["hostfile"]["document"]["hosts"]
    assert [host["ips"] for host in hosts] == [["192.168.0.5"], ["192.168.0.6"]], "each listens on the cable"
    mac(macs, "ana").set_fault("defaults", output="{\n    AutomaticallyInstallMacOSUpdates = 1;\n}\n")
    checked = {check["name"]: check for check in document(home, studio, "preflight")["checks"]}
    mac(macs, "ana").mend_commands()
    assert [name for name, check in checked.items() if check["status"] == "fail"] == [], checked
    assert "macOS installs its updates by itself" in checked["health_check"]["summary"]
    assert list(checked["health_check"]["fixes"]) == ["ana"]


@pytest.mark.parametrize(
    "command",
    ["ifconfig", *(pytest.param(each, marks=pytest.mark.slow) for each in ("system_profiler", "ibv_devinfo"))],
)
def test_a_command_that_hangs_costs_its_own_facts_and_nothing_is_claimed(
    macs: MacCluster, home: Path, studio: Path, command: str
) -> None:
    node = macs.nodes[0]
    assert isinstance(node, MacNode)
    node.set_fault(command, late_s=30)
    # Without the addresses of a node there is no network to plan.
    ana, bea = document(home, studio, "nodes", code=int(command == "ifconfig"))["nodes"]
    assert (ana["problem"], bea["unknown"]) == (None, {})
    assert ana["chip"] == "Apple M4 Max" and ana["unknown"]
    assert all(why["after_s"] == 4.0 and why["command"].startswith(command) for why in ana["unknown"].values())


async def test_telemetry_comes_with_macmon_and_without(macs: MacCluster, home: Path, studio: Path) -> None:
    wanted, sources = {"ana": "macmon", "bea": "vm_stat, sysctl, ioreg"}, dict[str, str]()
    async with asyncio.timeout(PATIENCE_S), Fleet(home) as fleet:
        values = telemetry(load_config(studio / "flightdeck.toml"), fleet, interval_s=0.5)
        assert isinstance(values, AsyncGenerator)
        async with contextlib.aclosing(values):
            async for value in values:
                if value.source and value.memory_used_bytes and value.gpu_use is not None:
                    sources[value.node] = value.source
                # Until macmon has printed its first line, the other tools stand in for it.
                if sources == wanted:
                    break
    assert sources == wanted


@pytest.mark.slow
async def test_a_fix_that_asks_for_a_password_is_run_in_the_terminal_and_then_the_check_is_green(
    macs: MacCluster, home: Path, studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(*macs["ana"].inside(), "/usr/bin/pmset", "-a", "lowpowermode", "1")
    write_config(macs, studio, "ana", "bea", more=f"[preflight]\nskip = {json.dumps(all_but('health_check'))}\n")
    async with console_on(home, studio) as console:
        console.app.suspend = contextlib.nullcontext  # type: ignore[assignment]
        monkeypatch.setattr("tui.app.subprocess.call", answered)
        await console.check()
        await console.shows("Low Power Mode is on")
        while (check := console.app.state.selected_check) is None or check.name != "health_check":
            await console.press("j")
        await console.press("x")
        await console.shows("the password of sudo, in this terminal")
        await console.press("right", "enter")
        await console.shows("succeeded")
        await console.until(lambda: getattr(console.app.focused, "id", None) == "again", "the button")
        await console.press("enter")
        await console.until(lambda: status(console, "health_check") is CheckStatus.PASS, "a green check")


@contextlib.asynccontextmanager
async def console_on(home: Path, studio: Path) -> AsyncGenerator[Console]:
    engine, file = Engine(home), studio / "flightdeck.toml"
    engine.nodes.accept(engine.load_config(file).digest)
    app = FlightDeckApp(engine, file)
    async with app.run_test(size=(160, 45)) as pilot:
        console = Console(app, pilot)
        await console.until(lambda: app.state.plan is not None, "the plan")
        yield console


def answered(argv: list[str]) -> int:
    """What a person does in the terminal that the console has handed over."""
    with Terminal(argv) as terminal:
        terminal.read_until(b"Password:")
        terminal.press(b"secret\n")
        terminal.read_until(b"enter returns to Flight Deck")
        terminal.press(b"\n")
        return terminal.wait()


def status(console: Console, name: str) -> CheckStatus | None:
    return next((check.status for check in console.app.state.checks if check.name == name), None)


def test_a_run_saves_on_smb_outlives_a_killed_rank_and_an_abort_proves_that_nothing_is_left(
    macs: MacCluster, home: Path, studio: Path
) -> None:
    write_config(macs, studio, "ana", "bea", more=STATES, display_sleep=True)
    run = launched(macs, home, studio, *all_but("checkpoint_layer"))
    await_iteration(run, 6)
    for node in run.nodes:
        assert "caffeinate -ims -w" in node.run(["ps", "-axww", "-o", "command="]).stdout
    assert "/Volumes/smb/states" in run.dir.log(0).read_text() and "no F_FULLFSYNC" in run.dir.log(0).read_text()
    run.kill(1, run.identity(1).trainer_pid)
    (resumed,) = resumptions(run, 1)
    assert resumed.resumed.source == "emergency" and resumed.repeated is not None and resumed.repeated <= 1
    done = flightdeck(home, "abort", run.dir.id, cwd=studio)
    assert (done.code, done.out.splitlines()[-1]) == (0, "aborted: no process of 2 ranks is left"), done
    states = run.nodes[0].disk.seen_from_head("/Volumes/smb/states") / run.dir.id
    assert [each.name for each in states.glob("step-*")], "where the configuration says"
    displays = ["asleep", "awake"] * 2
    shown = ["cat", str(DISPLAY)]
    run.wait(lambda: all(node.run(shown).stdout.split() == displays for node in run.nodes), after_end=True)
    left = [process.command for node in run.nodes for process in node.processes()]
    assert [text for text in left if "engine.node.keeper" in text or "engine.trainer" in text] == []


def resumptions(run: ClusterRun, count: int) -> list[AttemptResumed]:
    """Awaits so many, and an iteration after the last."""
    run.wait(lambda: len(run.events_of(AttemptResumed)) == count)
    before = trained(run)[-1]
    run.wait(lambda: trained(run)[-1] > before)
    return run.events_of(AttemptResumed)


@pytest.mark.busy
@pytest.mark.slow
async def test_the_console_takes_four_macs_from_their_facts_to_the_proof_of_an_abort(
    macs: MacCluster, home: Path, studio: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.tui.conftest.PATIENCE_S", 5 * PATIENCE_S)
    write_config(macs, studio)
    async with console_on(home, studio) as console:
        app = console.app
        await console.press("1")
        await console.shows("Apple M3 Ultra")
        await console.shows("2/6 cabled")
        await console.shows("│ dov ")
        await console.until(lambda: len(app.state.telemetry) == 4, "telemetry")
        await console.press("escape", "4")
        await console.shows("each rank listens on the Thunderbolt cable from the previous rank")
        await console.press("escape")
        await console.check()
        failed = [check.name for check in app.state.checks if check.status is CheckStatus.FAIL]
        assert len(app.state.checks) == len(CHECKS) and failed == [], console.screen
        await console.press("escape", "3", "C")
        await console.until(lambda: app.state.calibrating is not None, "the calibration's begin")
        await console.until(lambda: app.state.calibrating is None, "the calibration's end")
        assert "calibration: measured" in console.notifications
        await console.press("escape", "n", "right", "enter")
        await console.shows("── train")
        await console.press("ctrl+x", "right", "enter")
        assert isinstance(app.screen, Stopping)
        await console.shows("aborted: no process of the run is left")


TROUBLED = """
[recovery]
lease_s = 6
save_grace_s = 3
stop_grace_s = 1
term_grace_s = 0.5
backoff_s = 0.1
max_restarts = 9
"""


@pytest.mark.busy
@pytest.mark.slow
def test_a_training_on_four_macs_outlives_sleep_and_a_cut_node(macs: MacCluster, home: Path, studio: Path) -> None:
    """Each step is made once in the history that is kept, and no two attempts run at once."""
    write_config(macs, studio, iters=100_000, batch_size=4, more=STATES + TROUBLED)
    run = launched(macs, home, studio, *all_but())
    bea, cyd = macs["bea"], macs["cyd"]
    await_iteration(run, 6)
    bea.sleep()
    run.wait(lambda: time.time() - run.dir.metrics.stat().st_mtime > 1.0)
    bea.wake()
    await_iteration(run, trained(run)[-1] + 3)
    assert len(run.attempts()) == 1, "it slept for less than its lease"

    bea.sleep()
    run.wait(lambda: len(run.events_of(AttemptFailed)) == 1)
    bea.wake()
    resumptions(run, 1)

    os.kill(run.supervisor, signal.SIGSTOP)
    try:
        run.wait(lambda: all(run.files_of(rank, 2).exit(rank).exists() for rank in range(4)))
    finally:
        os.kill(run.supervisor, signal.SIGCONT)
    resumptions(run, 2)

    cyd.cut()
    run.wait(lambda: len(run.events_of(AttemptFailed)) == 3)
    cyd.flush_rules()
    resumptions(run, 3)

    assert run.abort() < PATIENCE_S
    assert run.record.state is RunState.ABORTED and run.record.unconfirmed == []
    never_two_attempts(run)
    found = [(event.verdict.reason, event.verdict.host) for event in run.events_of(AttemptFailed)]
    assert found == [(Reason.NODE_LOST, "bea"), (Reason.HEAD_SLEPT, None), (Reason.NODE_LOST, "cyd")], run.troubles()
    steps = trained(run)
    assert sorted(set(steps)) == list(range(1, max(steps) + 1)), "none was left out"
