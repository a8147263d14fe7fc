"""Any number of ranks, with any shares, trains as one rank does on the same global batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.training.launching import Launched, launch
from tests.training.tiny import Tiny

pytestmark = pytest.mark.busy

STEPS = 50


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launch(tmp_path_factory.mktemp("alone"), job(tiny)).succeeded()


def job(tiny: Tiny) -> dict[str, object]:
    return tiny.job(iters=STEPS, steps_per_report=10, val_batches=-1, steps_per_eval=25)


@pytest.mark.parametrize(
    "shares", [pytest.param((1.0, 1.0), id="equal", marks=pytest.mark.slow), pytest.param((3.0, 1.0), id="3:1")]
)
def test_two_ranks_train_as_one_does(tiny: Tiny, tmp_path: Path, alone: Launched, shares: tuple[float, ...]) -> None:
    both = launch(tmp_path, job(tiny), shares=shares).succeeded()

    expected, losses = np.array(alone.losses()), np.array(both.losses())
    assert len(losses) == STEPS
    assert np.abs(losses - expected).max() < 1e-4
    assert expected[-5:].mean() < expected[:5].mean() - 0.5
    assert both.losses(1) == both.losses(0)
    for kind, names in {"step": ["iteration", "tokens"], "report": ["trained_tokens", "learning_rate"]}.items():
        for rank in (0, 1):
            assert [[event[name] for name in names] for event in both.events(rank, kind)] == [
                [event[name] for name in names] for event in alone.events(0, kind)
            ]
    validations = np.array([event["val_loss"] for event in both.events(1, "validation")])
    assert len(validations) == 3
    assert np.abs(validations - [event["val_loss"] for event in alone.events(0, "validation")]).max() < 1e-4


def test_every_rank_reports_its_events_in_order(alone: Launched) -> None:
    events = alone.events()
    assert [event["seq"] for event in events] == list(range(len(events)))
    assert all(event["rank"] == 0 and event["attempt"] == 1 for event in events)
    assert events[-1]["event"] == "end"
    assert (events[-1]["completed"], events[-1]["stopped"], events[-1]["iteration"]) == (True, False, STEPS)
    (start,) = alone.events(kind="start")
    assert start["world_size"] == 1 and start["iterations"] == STEPS
    assert 0 < start["trainable_parameters"] < start["total_parameters"]
    assert [event["iteration"] for event in alone.events(kind="report")] == [10, 20, 30, 40, 50]
    report = set(alone.events(kind="report")[0]) - {"event", "rank", "seq", "t", "at", "attempt"}
    assert report == {
        "iteration",
        "train_loss",
        "learning_rate",
        "iterations_per_second",
        "tokens_per_second",
        "trained_tokens",
        "peak_memory",
    }
    assert "\x1b" not in alone.log()
