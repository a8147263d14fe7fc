"""Every node's values as they come, its problems among them; and nothing goes on when nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.telemetry import PowerMeter, TelemetryParser, telemetry
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.models import NodeTelemetry, RankUse
from engine.node.processes import start_time
from tests.unit.cluster.fake_agent import FakeFleet
from tests.waiting import wait_until

AT = datetime(2026, 11, 21, tzinfo=UTC)
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cluster.telemetry.RETRY_S", (0.02, 0.02))


def cluster(*nodes: tuple[str, str], ssh: str = "127.0.0.1") -> Config:
    """Nodes (name, python)."""
    made = tuple(NodeConfig(name=name, ssh=ssh, python=python, workdir="/") for name, python in nodes)
    return Config(cluster=ClusterConfig(), nodes=made, job=JobConfig(name="x", command=("true",)))


def agents() -> list[int]:
    """The pids of this test's agents."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    found = []
    for pid in map(int, children):
        with contextlib.suppress(OSError):
            if b"engine.node.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def probes() -> list[int]:
    """The pids of their probes."""
    return [int(child) for pid in agents() for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.asynccontextmanager
async def watching(config: Config, interval_s: float) -> AsyncIterator[AsyncIterator[NodeTelemetry]]:
    async with asyncio.timeout(PATIENCE_S), FakeFleet() as fleet:
        values = telemetry(config, fleet, lambda: AT, interval_s=interval_s)
        try:
            yield values
        finally:
            await values.aclose()  # type: ignore[attr-defined]


@pytest.mark.needs("linux")
async def test_two_nodes_on_this_machine_and_nothing_is_left_at_the_end() -> None:
    config = cluster(("left", sys.executable), ("right", sys.executable))
    async with watching(config, 0.1171) as values:
        seen: dict[str, NodeTelemetry] = {}
        async for value in values:
            seen[value.node] = value
            if len(seen) == 2 and all(value.cpu_use is not None for value in seen.values()):
                break
        # One probe for the host, whatever the number of its nodes.
        (probe,) = probes()
    await asyncio.to_thread(wait_until, lambda: agents() == [] and start_time(probe) is None)
    left = seen["left"]
    assert left == seen["right"].model_copy(update={"node": "left"})
    assert (left.at, left.source, left.problem) == (AT, "/proc", None)
    assert 0 <= (left.cpu_use or 0) <= 1
    assert left.memory_used_bytes and left.memory_used_bytes > 10_000_000
    assert left.gpu_use is None or Path("/usr/bin/nvidia-smi").exists()


@pytest.mark.needs("linux")
async def test_a_probe_or_an_agent_that_is_killed_is_reported_and_started_again() -> None:
    async with watching(cluster(("a", sys.executable)), 0.1172) as values:
        async for value in values:
            if value.problem is None:
                break
        for victims in (probes, agents):
            os.kill(victims()[0], signal.SIGKILL)
            problems = []
            async for value in values:
                if value.problem is not None:
                    problems.append(value.problem)
                elif problems:
                    break
            assert len(problems) == 1 and "ended with -9" in problems[0]


async def test_a_node_without_its_interpreter_is_a_problem_and_the_others_go_on(tmp_path: Path) -> None:
    async with watching(cluster(("a", str(tmp_path / "none"))), 0.1173) as values:
        async for value in values:
            assert value.problem == f"no such interpreter: {tmp_path}/none"
            assert (value.node, value.at, value.memory_used_bytes) == ("a", AT, None)
            break


@pytest.mark.parametrize(
    ("body", "problem"),
    [("echo 'dyld: gone' >&2; exit 134", "dyld: gone"), ("head -c 140000 /dev/zero; sleep 60", "a line of more than")],
)
async def test_whatever_answers_in_its_place_is_a_problem_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, problem: str
) -> None:
    monkeypatch.setattr("engine.cluster.transport.local._LEAVES_S", 0.1)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    async with watching(cluster(("a", str(python))), 0.1174) as values:
        async for value in values:
            assert value.problem is not None and problem in value.problem
            break


def line(**output: object) -> bytes:
    return json.dumps(output).encode()


NVIDIA = ["0, 10, 900, 60, 40, 1000, 81559", "1, 90, 1900, 300, 70, 40960, 81559", "2, 0, 210, 30, 30, 300, 81559"]


@pytest.mark.parametrize(
    ("gpu", "use", "listed"),
    [(None, 1 / 3, [0, 1, 2]), (0, 0.1, [0]), (1, 0.9, [1]), (3, 1 / 3, [0, 1, 2])],
    ids=["all", "first", "second", "not-listed"],
)
def test_the_values_of_one_gpu_of_several(gpu: int | None, use: float, listed: list[int]) -> None:
    """Written from nvidia-smi's documentation: no such machine has been recorded."""
    values = TelemetryParser(gpu).read(line(system="Linux", nvidia=NVIDIA))
    assert values is not None and values["gpu_use"] == pytest.approx(use)
    assert [memory.index for memory in values["gpu_memory"]] == listed


@pytest.mark.needs("linux")
async def test_each_node_of_a_host_is_sent_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    rows = "; ".join(f"echo '{row}'" for row in NVIDIA)
    smi.write_text(f"#!/bin/sh\nwhile {rows}; do sleep 1; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    async with watching(cluster(("left", sys.executable), ("right", sys.executable)), 0.1174) as values:
        seen: dict[str, float | None] = {}
        async for value in values:
            seen[value.node] = value.gpu_use
            if seen.keys() == {"left", "right"} and None not in seen.values():
                break
    assert seen == {"left": 0.1, "right": 0.9}


def test_slow_readings_stay() -> None:
    reader = TelemetryParser()
    ranks = [["r-1", 0, 100], ["../x", 1, 5], ["r-1", -1, 5], ["r-1", True, 5], "junk", ["r-1", 2, 2.5]]
    first = reader.read(line(system="Darwin", thermal="com.apple.system.thermalpressurelevel 1", ranks=ranks))
    assert first is not None
    assert first["ranks"] == (RankUse(run_id="r-1", rank=0, rss_bytes=100),)
    later = reader.read(line(system="Darwin", macmon='{"gpu_active_ratio": 0.5}'))
    assert later is not None
    assert (later["gpu_use"], later["thermal"], later["source"]) == (0.5, "moderate", "macmon")
    assert later["ranks"] == first["ranks"]


def test_a_mac_without_macmon() -> None:
    reader = TelemetryParser()
    vm_stat = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages wired down: 2.\nAnonymous pages: 3.\n"
        "Pages occupied by compressor: 1.\nPages purgeable: 1.\n"
    )
    output = {"vm_stat": vm_stat, "swapusage": "used = 1.00M", "ioreg": '"Device Utilization %"=25}'}
    reader.read(line(system="Darwin", ticks=[10, 10, 80, 0]))
    values = reader.read(line(system="Darwin", ticks=[20, 20, 160, 0], **output))
    assert values == {
        "cpu_use": 0.2,
        "gpu_use": 0.25,
        "memory_used_bytes": 5 * 16384,
        "swap_used_bytes": 2**20,
        "source": "vm_stat, sysctl, ioreg",
    }
    later = reader.read(line(system="Darwin", ticks=[20, 20, 240, 0]))
    assert later == {**values, "cpu_use": 0.0}, "what the tools said last stays until they are asked again"


def test_a_linux_machine_whose_files_are_read_for_some_samples_alone() -> None:
    reader, without = TelemetryParser(), line(system="Linux", ranks=[])
    meminfo = "MemTotal: 16 kB\nMemAvailable: 10 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"
    for ticks, use in (("cpu 10 0 10 80", None), ("cpu 30 0 10 160", 0.2)):
        values = reader.read(line(system="Linux", cpu=ticks, meminfo=meminfo))
        assert values is not None and (values["cpu_use"], values["memory_used_bytes"]) == (use, 6 * 1024)
        assert reader.read(without) == {**values, "ranks": ()}, "what they told last stays until then"


@pytest.mark.parametrize(
    "junk", [b"", b"Welcome to ultra", b"[1]", b"{}", line(system="Plan9"), b"[" * 100_000, b"9" * 5000, b"\xff\x00"]
)
def test_lines_that_are_not_the_programs_are_passed_over(junk: bytes) -> None:
    assert TelemetryParser().read(junk) is None


def test_values_of_the_wrong_kind_are_not_measured() -> None:
    output = line(system="Linux", cpu=5, meminfo=["x"], cpu_temperature_c="hot", nvidia=[1, None], ranks={"a": 1})
    values = TelemetryParser().read(output)
    assert values is not None
    assert NodeTelemetry(node="a", at=AT, **values).memory_used_bytes is None


@given(
    st.lists(st.tuples(st.floats(0.1, 59.0), st.floats(1.0, 1e4)), min_size=1, max_size=20),
    st.lists(st.integers(0, 10_000), max_size=20),
    st.sampled_from(["nvidia", "macmon"]),
)
def test_the_energy_is_the_power_over_the_time_however_the_samples_are_cut(
    samples: list[tuple[float, float]], cuts: list[int], kind: str
) -> None:
    whole, cut, now, joules, seconds, before = PowerMeter(), PowerMeter(), 0.0, 0.0, 0.0, 0.0
    for place, (gap, watts) in enumerate(samples):
        now += gap
        output = {"nvidia": [f"0, 10, 900, {watts}, 40, 1000, 81559"], "macmon": json.dumps({"sys_power": watts})}
        sample = line(system="Linux" if kind == "nvidia" else "Darwin", **{kind: output[kind]}) + b"\n"
        whole.feed(sample, now)
        at = cuts[place % len(cuts)] % len(sample) if cuts else 0
        cut.feed(sample[:at], now)
        cut.feed(sample[at:], now)
        joules, seconds = (joules + (before + watts) / 2 * gap, seconds + gap) if place else (0.0, 0.0)
        before = watts
    assert [*whole.take(), *cut.take()] == pytest.approx([joules, seconds] * 2)
    assert whole.take() == (0.0, 0.0), "what was taken is not counted twice"


def test_what_was_not_measured_is_no_energy() -> None:
    meter = PowerMeter()
    for now, values in enumerate(
        ({}, {"nvidia": ["0, 10, 900, [N/A], 40, 1, 2"]}, {"nvidia": ["0, 1, 9, 1e300, 4, 1, 2"]})
    ):
        meter.feed(line(system="Linux", **values) + b"\n" + b"junk\n" + b"[]\n", float(now))
    assert meter.take() == (0.0, 0.0)
    for place in (10, 20, 100, 110):
        meter.feed(line(system="Linux", nvidia=["0, 10, 900, 50, 40, 1, 2"]) + b"\n", float(place))
    assert meter.take() == (1000.0, 20.0), "a minute without a sample is not filled in"
