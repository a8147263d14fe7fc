"""Two nodes that are Macs, as far as Linux can show them: known, planned, checked, and a run over their cable."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.checks.runner import CHECKS
from engine.cluster.telemetry import telemetry
from engine.cluster.transport.fleet import Fleet
from engine.config.load import load_config
from tests.cluster.demo_job import flightdeck_toml, install_demo
from tests.cluster.mac.cluster import MacCluster, MacNode
from tests.demo_copies import demo_below
from tests.tui.commands import flightdeck
from tests.waiting import wait_until

pytestmark = pytest.mark.needs("namespaces")
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def macs() -> Iterator[MacCluster]:
    with MacCluster(2, ["m4-max-128", "m3-ultra-512"], "chain") as cluster:
        yield cluster


@pytest.fixture
def studio(macs: MacCluster, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(macs.ssh_config))
    install_demo(macs, demo_below(home))
    (tmp_path / "flightdeck.toml").write_text(flightdeck_toml(macs, iters=1000, save_every=500, max_seq_length=64))
    yield tmp_path
    macs.heal()


def document(home: Path, studio: Path, *words: str, code: int = 0) -> dict[str, Any]:
    done = flightdeck(home, *words, "--json", cwd=studio)
    assert done.code == code, (done.out, done.err)
    found: dict[str, Any] = json.loads(done.out)
    return found


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
    assert [host["ips"] for host in hosts] == [["192.168.0.1"], ["192.168.0.2"]], "each listens on the cable"
    checked = document(home, studio, "preflight")
    assert [check["name"] for check in checked["checks"] if check["status"] == "fail"] == [], checked


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
    async with asyncio.timeout(PATIENCE_S), Fleet((), home) as fleet:
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


@pytest.mark.busy
def test_a_run_starts_on_macs_and_an_abort_proves_that_nothing_is_left(
    macs: MacCluster, home: Path, studio: Path
) -> None:
    # Preflight has checked the same nodes above.
    run = document(home, studio, "launch", *(word for name in CHECKS for word in ("--skip", name)))["id"]
    runs = Engine(home).runs
    wait_until(lambda: (runs.record(run).iteration or 0) >= 1 or runs.record(run).state.ended, PATIENCE_S)
    assert document(home, studio, "show", run)["state"] == "running"
    for node in macs.nodes:
        assert "caffeinate -ims -w" in node.run(["ps", "-axww", "-o", "command="]).stdout
    done = flightdeck(home, "abort", run, cwd=studio)
    assert (done.code, done.out.splitlines()[-1]) == (0, "aborted: no process of 2 ranks is left"), done
    left = [process.command for node in macs.nodes for process in node.processes()]
    assert [command for command in left if "engine.node.keeper" in command or "engine.trainer" in command] == []
