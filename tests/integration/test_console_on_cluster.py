"""The console on real nodes over ssh: a key accepted, a fix run there, telemetry received, a shell that is theirs."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import Engine
from engine.models import CheckResult, CheckStatus
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import unknown, write_config
from tests.tui.conftest import DASHBOARD, Console
from tui.app import FlightDeckApp

PATIENCE_S = 40.0


@pytest.fixture
def studio(cluster: Cluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of two of the nodes."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    return write_config(cluster, tmp_path / "flightdeck.toml", "ana", "bea")


@pytest.fixture
def stranger(cluster: Cluster) -> Iterator[str]:
    """bea, whose key nobody has accepted."""
    with unknown(cluster, "bea") as node:
        yield node


async def test_a_person_accepts_a_key_fixes_a_node_and_sees_it_live(
    cluster: Cluster, home: Path, studio: Path, stranger: str
) -> None:
    engine = Engine(home)
    engine.nodes.accept(engine.load_config(studio).digest)
    app = FlightDeckApp(engine, studio)
    async with app.run_test(size=DASHBOARD) as pilot:
        console = Console(app, pilot)
        await console.press("1", "j")
        async with asyncio.timeout(PATIENCE_S):
            while app.state.probing or len(app.state.facts) < 2:
                await pilot.pause(0.05)
        await console.shows("? key unknown")
        await console.press("G")
        assert app.state.facts["ana"].user == cluster["ana"].user
        await console.press("x", "right", "enter")
        async with asyncio.timeout(PATIENCE_S):
            while app.state.facts["bea"].problem is not None or set(app.state.telemetry) != {"ana", "bea"}:
                await pilot.pause(0.05)
        known = (home / "known_hosts").read_text()
        assert cluster["bea"].ip in known and cluster["ana"].ip not in known
        async with asyncio.timeout(PATIENCE_S):
            while (telemetry := app.state.telemetry.get("bea")) is None or telemetry.memory_used_bytes is None:
                await pilot.pause(0.05)

        fix = "echo fixed > ~/fixed; cat ~/fixed; id -un"
        failed = CheckResult(name="data_matches", status=CheckStatus.FAIL, fixes={"bea": fix}, fix_command=fix)
        app.store.change(checks=(failed,))
        await console.press("x", "right", "enter")
        await console.shows("succeeded")
        assert "fixed" in console.screen and cluster["bea"].user in console.screen
        await console.press("escape")
    done = await asyncio.to_thread(
        subprocess.run,
        [*engine.nodes.shell_argv(engine.load_config(studio), "bea"), "cat fixed; rm fixed; exit 3"],
        capture_output=True, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.stdout.strip(), done.returncode) == (b"fixed", 3)
