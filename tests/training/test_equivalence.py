"""Any number of ranks, with any shares, trains as one rank does on the same global batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.launching import Launched, launch
from tests.training.test_update import Trained, train
from tests.training.tiny import UNEQUAL, Tiny, undisturbed_job

pytestmark = pytest.mark.busy

STEPS = 30


def test_two_unequal_ranks_train_as_one_does(tiny: Tiny, tmp_path: Path, undisturbed: Launched) -> None:
    train_alike(train(tiny, tmp_path, **undisturbed_job(tiny)), undisturbed, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [pytest.param((1.0, 1.0), id="equal"), pytest.param(UNEQUAL, id="3:1")])
def test_fifty_steps(tiny: Tiny, tmp_path: Path, shares: tuple[float, ...]) -> None:
    job = undisturbed_job(tiny, iters=50, steps_per_eval=25)
    both = launch(tmp_path / "both", job, shares=shares).succeeded()
    train_alike(train(tiny, tmp_path / "alone", **job), both, 50)


@pytest.mark.slow
@pytest.mark.needs("g++")
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_on_the_cpu_it_is_the_same(tiny: Tiny, tmp_path: Path, ranks: int) -> None:
    """In half a minute of g++ for each rank."""
    job = undisturbed_job(tiny, iters=4, val_batches=0)
    plain = launch(tmp_path / "plain", job, shares=(1.0,) * ranks).succeeded()
    compiled = launch(tmp_path / "compiled", {**job, "compile_on_cpu": True}, shares=(1.0,) * ranks).succeeded()
    assert np.abs(np.array(plain.losses()) - compiled.losses()).max() < 1e-5
    kernels = {path.relative_to(tmp_path).parts[:4] for path in tmp_path.rglob("*.so")}
    assert kernels == {("compiled", "node", "kernels", str(rank)) for rank in range(ranks)}


def train_alike(alone: Trained, both: Launched, steps: int) -> None:
    expected, losses = np.array([event["loss"] for event in alone.of("step")]), np.array(both.losses())
    assert len(losses) == steps
    assert np.abs(losses - expected).max() < 1e-4
    assert expected[-5:].mean() < expected[:5].mean() - 0.5
    assert both.losses(1) == both.losses(0)
    for kind, names in {"step": ["iteration", "tokens"], "report": ["trained_tokens", "learning_rate"]}.items():
        for rank in (0, 1):
            assert [[event[name] for name in names] for event in both.events(rank, kind)] == [
                [event[name] for name in names] for event in alone.of(kind)
            ]
    validations = np.array([event["val_loss"] for event in both.events(1, "validation")])
    assert len(validations) == 3
    assert np.abs(validations - [event["val_loss"] for event in alone.of("validation")]).max() < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_reports_its_events_in_order(undisturbed: Launched, rank: int) -> None:
    events = undisturbed.events(rank)
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert all(event["rank"] == rank and event["attempt"] == 1 for event in events)
    assert events[-1]["event"] == "end"
    assert (events[-1]["completed"], events[-1]["stopped"], events[-1]["iteration"]) == (True, False, STEPS)
    (start,) = undisturbed.events(rank, "start")
    assert start["world_size"] == 2 and start["iterations"] == STEPS
    assert 0 < start["trainable_parameters"] < start["total_parameters"]
    reports = undisturbed.events(rank, "report")
    assert [event["iteration"] for event in reports] == [10, 20, 30]
    assert set(reports[0]) - {"event", "rank", "seq", "t", "at", "attempt"} == {
        "iteration",
        "train_loss",
        "learning_rate",
        "iterations_per_second",
        "tokens_per_second",
        "trained_tokens",
        "peak_memory",
    }
    assert "\x1b" not in undisturbed.log(rank)
