"""What a node says of its measurement is anybody's: it is taken in a known form only, and safe to show."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from engine.calibration.calibrate import ring_pairs, whole_job_on_each
from engine.calibration.group import group_measure, nodes_too_small, reports_of
from engine.calibration.throughput import MeasureResult, _measure, _Measurement, step_batch
from engine.checks.gradient import GroupOutcome
from engine.cluster.probe_results import parse_line
from engine.cluster.staging import HostLayout
from engine.config.models import JobConfig
from engine.errors import LaunchError
from engine.measurements import GroupMeasure
from engine.models import NodeFacts, NvidiaGpu
from engine.protocol.measurements import STEP_PARTS, GroupStepReport, MeasureReport
from tests.unit.cluster.macs import NOW
from tests.unit.plan.calibrations import config
from tests.unit.plan.clusters import QWEN3_32B, inputs, ultra_and_max


def output(document: Mapping[str, Any]) -> MeasureResult | None:
    return parse_line(json.dumps({"phase": "measured", **document}).encode(), MeasureResult)


def test_what_the_worker_writes_is_what_the_head_reads() -> None:
    probes = [{"batch": 1, "peak_bytes": 5}, {"batch": 2, "peak_bytes": 9}]
    written = MeasureReport(8.5, 0.02, 10, 900.0, 0.4, 4, 0.01, 30, 10.2, 6_000_000, 1_500_000, probes, "not on macOS")
    found = output(asdict(written))
    assert found is not None and found.phase == "loading"
    measure = _measure(config(["a"]).nodes[0], found)
    assert (measure.examples_per_s, measure.overhead_s, measure.steps, measure.state_bytes) == (
        8.5,
        0.01,
        30,
        6_000_000,
    )
    assert [(probe.batch, probe.peak_bytes) for probe in measure.probes] == [(1, 5), (2, 9)]


@pytest.mark.parametrize(
    "figures",
    [
        {"examples_per_s": -1},
        {"examples_per_s": float("inf")},
        {"examples_per_s": float("nan")},
        {"batch": 0},
        {"state_bytes": "much"},
        {"probes": [{"batch": 1, "peak_bytes": 2}] * 11},
        {"probes": [{"batch": 0, "peak_bytes": 2}]},
    ],
)
def test_a_figure_that_cannot_be_is_no_answer(figures: dict[str, Any]) -> None:
    assert output(figures) is None
    assert parse_line(b"{}", MeasureResult) is None


def test_messages_are_made_harmless_and_short() -> None:
    found = output({"problem": "\x1b[31mred\x1b]0;title\x07" + "x" * 1000})
    assert found is not None and found.problem is not None
    assert "\x1b" not in found.problem and len(found.problem) < 400


@pytest.mark.parametrize(
    ("names", "pairs"),
    [("a", []), ("ab", ["ab"]), ("abc", ["ab", "bc", "ca"]), ("abcd", ["ab", "bc", "cd", "da"])],
)
def test_neighbours_are_the_pairs_of_the_ring_each_once(names: str, pairs: list[str]) -> None:
    assert ["".join(pair) for pair in ring_pairs(tuple(names))] == pairs


@pytest.mark.parametrize(("nodes", "batch", "measured"), [(1, 8, 8), (2, 8, 4), (3, 8, 3), (4, 4, 1)])
def test_a_measured_step_is_an_equal_part_of_the_batch(nodes: int, batch: int, measured: int) -> None:
    deck = config([f"n{number}" for number in range(nodes)], batch=batch)
    assert step_batch(deck) == measured
    by_tokens = {"max_seq_length": 100, "batch_tokens": 100 * batch + 1}
    assert step_batch(deck.model_copy(update={"job": deck.job.model_copy(update={"mlx_lm": by_tokens})})) == measured
    own = deck.model_copy(update={"job": JobConfig(name="own", command=("x",))})
    assert step_batch(own) == 4


class HangingRequest:
    """A measurement on a node that neither reports nor ends."""

    def __init__(self) -> None:
        self.cancelling = asyncio.Event()
        self.closed = False

    async def next_line(self, timeout_s: float) -> bytes:
        await asyncio.sleep(600)
        return b""

    async def cancel(self) -> None:
        self.cancelling.set()
        await asyncio.sleep(600)

    def close(self) -> None:
        self.closed = True


async def test_a_measurement_that_is_cancelled_twice_is_given_up() -> None:
    request = HangingRequest()
    layout = HostLayout("127.0.0.1", (0,), "/home", "/root", "/bundle", "/python")
    agent = Mock(start_command=AsyncMock(return_value=request))
    context = Mock(agent=Mock(return_value=agent), layout_of=AsyncMock(return_value=layout))
    leases = Mock(nonce="nonce", folder=Mock(return_value=PurePosixPath("/lease")))
    measurement = _Measurement(context, config(["a"]), 1.0, lambda progress: None, leases)
    measuring = asyncio.create_task(measurement._measured(0, config(["a"]).nodes[0]))
    await asyncio.sleep(0)
    measuring.cancel()
    async with asyncio.timeout(10):
        await request.cancelling.wait()
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert request.closed


async def test_each_rank_of_a_machine_is_measured_on_its_own_gpu() -> None:
    job = config(["a", "b"])
    nodes = tuple(node.model_copy(update={"ssh": "box"}) for node in job.nodes)
    job = job.model_copy(update={"nodes": nodes})
    gpus = tuple(NvidiaGpu(name=name, uuid=f"GPU-{name}") for name in ("H100", "L4"))
    cuda = {node.name: NodeFacts(node=node.name, host="box", probed_at=NOW, gpu="gpu", gpus=gpus) for node in nodes}
    layout, written = HostLayout("box", (0, 1), "/home/ana", "/node", "/bundle", "/py"), AsyncMock()
    leases = Mock(folder=Mock(return_value=PurePosixPath("/lease")), write=written)
    context = Mock(config=job, facts=AsyncMock(return_value=cuda))
    await _Measurement(context, job, 1.0, lambda progress: None, leases).put(layout)
    assert written.await_args is not None
    specs = [json.loads(text) for text in written.await_args.args[2].values()]
    assert [spec["env"]["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["GPU-H100", "GPU-L4"]


def test_a_node_that_the_whole_job_does_not_fit_is_not_measured_whole() -> None:
    """Two Macs share the state of 32B in full fine-tuning; neither could load all of it."""
    settings = {"fine_tune_type": "full", "batch_size": 2}
    split = inputs(ultra_and_max(), settings=settings, model=QWEN3_32B, strategy="sharded", job={"strategy": "sharded"})
    found = nodes_too_small(whole_job_on_each(split))
    assert found.keys() == {"max"} and "of 96 GB" in found["max"]
    assert nodes_too_small(whole_job_on_each(inputs(ultra_and_max(), settings={"batch_size": 2}))) == {}


def test_a_job_of_strategy_local_or_of_a_command_is_measured() -> None:
    """Their own keys are no obstacle."""
    local = {"strategy": "local", "given": ("local_steps",)}
    for job in (local, {"command": ("python", "train.py")}):
        planned = inputs(ultra_and_max(), settings={"batch_size": 2, "local_steps": 4}, job=job)
        assert nodes_too_small(whole_job_on_each(planned)) == {}


def test_ranks_whose_parts_do_not_fit_are_not_measured_together() -> None:
    """Half of 32B in full fine-tuning on each would bring down the smaller one."""
    settings = {"fine_tune_type": "full", "batch_size": 256, "max_seq_length": 16_384}
    planned = inputs(
        ultra_and_max(), settings=settings, model=QWEN3_32B, strategy="sharded", job={"strategy": "sharded"}
    )
    assert "max" in nodes_too_small(planned)


def step_report(rank: int, step_s: float, communicate_s: float, peak: int) -> GroupStepReport:
    update_s, data_s = 0.02, 0.01
    computed = step_s - communicate_s - update_s - data_s
    return GroupStepReport(rank, 6, step_s, data_s, computed, communicate_s, update_s, 100.0, peak)


def test_an_iteration_of_all_ranks_ends_with_its_slowest() -> None:
    asked = GroupMeasure(strategy="pipeline", batch=8)
    reports = {"a": step_report(0, 0.4, 0.1, 2**30), "b": step_report(1, 0.5, 0.3, 2**29)}
    found = group_measure(asked, reports)
    assert (found.step_s, found.tokens_per_s) == (0.5, 200.0)
    assert found.compute_s == pytest.approx({"a": 0.3, "b": 0.2})
    assert found.waiting == pytest.approx(0.5) and found.problem is None


@pytest.mark.parametrize(
    ("first", "second", "message", "fault"),
    [
        (step_report(0, 0.4, 0.1, 1), GroupStepReport(1, error="no data"), "", "rank 1 on b: no data"),
        (step_report(0, 0.4, 0.1, 1), None, "Killed", "rank 1 on b: Killed"),
        (None, GroupStepReport(1, error="no data"), "", "rank 1 on b: no data"),
        (GroupStepReport(0, error="PeerLost: [ring] gone"), None, "Killed", "rank 1 on b: Killed"),
        (GroupStepReport(0, error="PeerLost: [ring] gone"), step_report(1, 0.4, 0.1, 1), "", "rank 0 on a: PeerLost"),
        (
            step_report(0, 0.4, 0.1, 1),
            GroupStepReport(1, error="RuntimeError: [malloc] Unable to allocate 9 bytes."),
            "",
            "there were too many of them.; use shorter sequences or a smaller batch",
        ),
    ],
)
def test_a_failed_rank_is_named_rather_than_one_that_lost_it(
    first: GroupStepReport | None, second: GroupStepReport | None, message: str, fault: str
) -> None:
    with pytest.raises(LaunchError, match=fault):
        reports_of(config(["a", "b"]), GroupOutcome({0: first, 1: second}, {0: ["loading"], 1: [message]}, {}, ""))


def test_the_parts_of_a_measured_step_add_up_to_it_whatever_a_few_slow_ones_are() -> None:
    names = ("step_s", "tokens", *STEP_PARTS)
    usual = [dict(zip(names, (0.4, 200.0, 0.01, 0.25, 0.1, 0.04), strict=True))] * 6
    slow = dict(zip(names, (9.0, 200.0, 8.0, 0.6, 0.3, 0.1), strict=True))
    report = GroupStepReport(0)
    report.summarise([slow, *usual, slow], 2)
    assert (report.steps, report.step_s, report.tokens) == pytest.approx((16, 0.2, 100.0))
    parts = (report.data_s, report.compute_s, report.communicate_s, report.update_s)
    assert parts == pytest.approx((0.005, 0.125, 0.05, 0.02)) and sum(filter(None, parts)) == pytest.approx(0.2)
