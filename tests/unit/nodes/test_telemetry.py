"""Every node's values as they come, its problems among them; and nothing goes on when nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from engine.config.models import ClusterConfig, FlightConfig, JobConfig, NodeConfig
from engine.models import NodeTelemetry, RankUse
from engine.nodes.telemetry import SCRIPT, Reader, telemetry
from engine.transport.local import LocalTransport

AT = datetime(2026, 11, 21, tzinfo=UTC)
PATIENCE_S = 20.0


class Here:
    """The ways to nodes that are all this machine."""

    def to(self, node: NodeConfig) -> LocalTransport:
        return LocalTransport()


def cluster(*nodes: tuple[str, str], ssh: str = "127.0.0.1") -> FlightConfig:
    """Nodes (name, python)."""
    made = tuple(NodeConfig(name=name, ssh=ssh, python=python, workdir="/") for name, python in nodes)
    return FlightConfig(cluster=ClusterConfig(), nodes=made, job=JobConfig(name="x", command=("true",)))


def scripts(interval: str) -> list[int]:
    """The pids of the scripts of this interval, which a test uses as its mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[-2:] == [interval.encode(), b""] and SCRIPT.read_bytes()[:100] in words[-3]:
                    found.append(int(entry.name))
    return found


@contextlib.asynccontextmanager
async def looking(config: FlightConfig, interval_s: float) -> AsyncIterator[AsyncIterator[NodeTelemetry]]:
    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0.02)

    async with asyncio.timeout(PATIENCE_S):
        values = telemetry(config, Here(), lambda: AT, interval_s=interval_s, pause=at_once)
        try:
            yield values
        finally:
            await values.aclose()  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_two_nodes_on_this_machine_and_nothing_is_left_when_looking_ends() -> None:
    config = cluster(("left", sys.executable), ("right", sys.executable))
    async with looking(config, 0.1171) as values:
        seen: dict[str, NodeTelemetry] = {}
        async for value in values:
            seen[value.node] = value
            if len(seen) == 2 and all(value.cpu_use is not None for value in seen.values()):
                break
        # One program for the host, whatever the number of its nodes.
        assert len(scripts("0.1171")) == 1
    assert scripts("0.1171") == []
    left = seen["left"]
    assert left == seen["right"].model_copy(update={"node": "left"})
    assert (left.at, left.slow_at, left.source, left.problem) == (AT, AT, "/proc", None)
    assert 0 <= (left.cpu_use or 0) <= 1
    assert left.memory_used_bytes and left.memory_used_bytes > 10_000_000
    assert left.gpu_use is None or Path("/usr/bin/nvidia-smi").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_program_that_is_killed_is_told_and_begun_anew() -> None:
    async with looking(cluster(("a", sys.executable)), 0.1172) as values:
        async for value in values:
            if value.problem is None:
                break
        os.kill(scripts("0.1172")[0], signal.SIGKILL)
        problems = []
        async for value in values:
            if value.problem is not None:
                problems.append(value.problem)
            elif problems:
                break
        assert len(problems) == 1 and "ended with -9" in problems[0]


async def test_a_node_without_its_interpreter_says_so_and_the_others_go_on(tmp_path: Path) -> None:
    async with looking(cluster(("a", str(tmp_path / "none"))), 0.1173) as values:
        async for value in values:
            assert value.problem == f"no such interpreter: {tmp_path}/none"
            assert (value.node, value.at, value.memory_used_bytes) == ("a", AT, None)
            break


@pytest.mark.parametrize(
    ("body", "problem"),
    [("echo 'dyld: gone' >&2; exit 134", "dyld: gone"), ("head -c 140000 /dev/zero; sleep 60", "a line of more than")],
)
async def test_whatever_answers_in_its_place_is_a_problem_in_one_line(tmp_path: Path, body: str, problem: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    async with looking(cluster(("a", str(python))), 0.1174) as values:
        async for value in values:
            assert value.problem is not None and problem in value.problem
            break


def line(**said: object) -> bytes:
    return json.dumps(said).encode()


def test_slow_readings_stay_with_their_own_age() -> None:
    reader = Reader()
    ranks = [["r-1", 0, 100], ["../x", 1, 5], ["r-1", -1, 5], ["r-1", True, 5], "junk", ["r-1", 2, 2.5]]
    first = reader.read(line(system="Darwin", thermal="com.apple.system.thermalpressurelevel 1", ranks=ranks), AT)
    assert first is not None
    assert first["ranks"] == (RankUse(run_id="r-1", rank=0, rss_bytes=100),)
    later = reader.read(line(system="Darwin", macmon='{"gpu_active_ratio": 0.5}'), AT + timedelta(seconds=2))
    assert later is not None
    assert (later["gpu_use"], later["thermal"], later["slow_at"], later["source"]) == (0.5, "moderate", AT, "macmon")
    assert later["ranks"] == first["ranks"]


def test_a_mac_without_macmon() -> None:
    reader = Reader()
    vm_stat = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages wired down: 2.\nAnonymous pages: 3.\n"
        "Pages occupied by compressor: 1.\nPages purgeable: 1.\n"
    )
    said = {"vm_stat": vm_stat, "swapusage": "used = 1.00M", "ioreg": '"Device Utilization %"=25'}
    reader.read(line(system="Darwin", ticks=[10, 10, 80, 0]), AT)
    values = reader.read(line(system="Darwin", ticks=[20, 20, 160, 0], **said), AT)
    assert values == {
        "cpu_use": 0.2,
        "gpu_use": 0.25,
        "memory_used_bytes": 5 * 16384,
        "swap_used_bytes": 2**20,
        "source": "vm_stat, sysctl, ioreg",
    }


@pytest.mark.parametrize(
    "junk", [b"", b"Welcome to ultra", b"[1]", b"{}", line(system="Plan9"), b"[" * 100_000, b"9" * 5000, b"\xff\x00"]
)
def test_lines_that_are_not_the_programs_are_passed_over(junk: bytes) -> None:
    assert Reader().read(junk, AT) is None


def test_values_of_the_wrong_kind_are_not_measured() -> None:
    said = line(system="Linux", cpu=5, meminfo=["x"], cpu_temperature_c="hot", nvidia=[1, None], ranks={"a": 1})
    values = Reader().read(said, AT)
    assert values is not None
    assert NodeTelemetry(node="a", at=AT, **values).memory_used_bytes is None
