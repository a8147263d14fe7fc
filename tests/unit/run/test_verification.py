"""A launch is verified line by line, and what is not known is not reported as good."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import Config, ConsistencyConfig
from engine.measurements import Division
from engine.run.metrics import MetricsSeries
from engine.run.run_plan import RunPlan
from engine.run.verification import gpu_line, verify
from engine.snapshots import RankReport, Verification
from tests.unit.run.run_maker import START, make_run_config, report

STARTED = RankReport(
    backend="ring", world_size=2, device="Device(gpu, 0)", compared_at=50, replicas_agree=True, saved_bytes=1200
)
FALLING = [(10 * at, 4.0 - at / 10) for at in range(1, 20)]
CONFIG = make_run_config()


def lines(
    *ranks: RankReport,
    losses: Sequence[tuple[int, float]] = FALLING,
    predicted: float | None = None,
    checkpoint: int | None = 100,
    config: Config = CONFIG,
) -> dict[str, Verification]:
    division = Division(source="calibrated", reason="", parts={}, tokens_per_s=predicted)
    plan = RunPlan(nonce="n", run_id="r", created_at=START, config=config, division=division)
    series = MetricsSeries(Path("metrics.jsonl"))
    for iteration, loss in losses:
        series.add(report(iteration, loss, tokens_per_second=1840.0))
    return {line.name: line for line in verify(plan, "ring", ranks or (STARTED, STARTED), series, checkpoint)}


def test_a_good_run_is_verified_and_what_is_not_measured_is_not_known() -> None:
    found = lines()
    assert {name: line.good for name, line in found.items()} == {
        "backend": True,
        "throughput": None,
        "GPU use": None,
        "loss": True,
        "replicas": True,
        "checkpoint": True,
        "saving": None,
    }
    assert "nothing predicted" in found["throughput"].text


def test_at_the_beginning_nothing_is_known() -> None:
    found = lines(RankReport(), RankReport(), losses=[], checkpoint=None)
    assert {line.good for line in found.values()} == {None}
    assert found["backend"].text == "0 of 2 ranks reported theirs"
    assert lines(losses=[(1, 4.0)])["loss"].good is None, "one report has no trend"


@pytest.mark.parametrize("wrong", [{"world_size": 1}, {"backend": "mpi"}])
def test_a_rank_that_trains_alone_or_elsewhere_is_named(wrong: dict[str, Any]) -> None:
    line = lines(STARTED, replace(STARTED, **wrong))["backend"]
    assert line.good is False and line.text.startswith("rank 1 is in a group of")


def test_one_rank_without_a_reported_backend_leaves_it_unknown() -> None:
    assert lines(STARTED, replace(STARTED, backend=None))["backend"].good is None


@pytest.mark.parametrize(("predicted", "good"), [(2000.0, True), (2300.0, True), (2301.0, False)])
def test_throughput_is_held_against_the_prediction(predicted: float, good: bool) -> None:
    line = lines(predicted=predicted)["throughput"]
    assert line.good is good and f"of {predicted:,.0f} predicted" in line.text


def test_a_loss_that_does_not_fall_is_reported() -> None:
    assert lines(losses=[(1, 2.0), (2, 2.0)])["loss"].good is False
    assert lines(losses=[(at, -loss) for at, loss in FALLING])["loss"].text.startswith("finite and not falling")


def test_replicas_are_equal_only_by_the_newest_comparison() -> None:
    differ = replace(STARTED, compared_at=100, replicas_agree=False)
    assert lines(STARTED, differ)["replicas"] == Verification("replicas", False, "NOT equal at iteration 100")
    sharded = CONFIG.model_copy(update={"job": CONFIG.job.model_copy(update={"strategy": "sharded"})})
    assert "the state is partitioned" in lines(config=sharded)["replicas"].text
    alone = CONFIG.model_copy(update={"consistency": ConsistencyConfig(enabled=False)})
    uncompared = Verification("replicas", None, "not compared: [consistency] enabled = false")
    assert lines(config=alone)["replicas"] == uncompared
    assert lines(STARTED)["replicas"].text == "one rank: nothing to compare"


def test_gpu_use_is_good_only_where_all_are_measured_and_busy() -> None:
    assert gpu_line({"a": 0.95, "b": 0.81}).good is True
    assert gpu_line({"a": 0.95, "b": 0.8}).good is False
    assert gpu_line({"a": 0.95, "b": None}).good is None
    assert gpu_line({"a": None}) == Verification("GPU use", None, "not measured")
    on_cpu = replace(STARTED, device="Device(cpu, 0)")
    assert "CPU" in lines(on_cpu, on_cpu)["GPU use"].text


@pytest.mark.parametrize(
    ("saving_s", "training_s", "good"), [(4.9, 100.0, True), (5.0, 100.0, False), (50.0, 59.0, None), (0.0, None, None)]
)
def test_saving_is_held_against_the_plans_target(saving_s: float, training_s: float | None, *, good: bool) -> None:
    line = lines(replace(STARTED, saving_s=saving_s, training_s=training_s), STARTED)["saving"]
    assert line.good is good
    assert training_s is None or "of less than 5%" in line.text
