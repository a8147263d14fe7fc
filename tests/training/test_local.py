"""Strategy "local", with real ranks started one by one: averaged weights, lost and late ranks, and its resume."""

from __future__ import annotations

import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.protocol.attempt import STOP, read_identity
from engine.protocol.exit_codes import TrainerExit
from tests.training.launching import LIMIT_S, Launched, launch
from tests.training.test_replicas import CORRUPTING
from tests.training.test_update import train
from tests.training.tiny import UNEQUAL, Tiny, undisturbed_job
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

EXACT = {"local_steps": 1, "wire": "float32", "outer_learning_rate": 1.0, "outer_momentum": 0.0}
"""Averages each update's weights."""


def local_job(tiny: Tiny, **keys: Any) -> dict[str, Any]:
    return undisturbed_job(tiny, **{"strategy": "local", "local_steps": 4, **keys})


def states(run: Launched, *ranks: int) -> list[dict[str, np.ndarray]]:
    """The averaged weights and their momentum, as the ranks saved them when they were stopped."""
    found = []
    for rank in ranks:
        (path,) = run.home.glob(f"emergency/*/rank{rank}/*/averaging.safetensors")
        arrays = mx.load(str(path))
        assert isinstance(arrays, dict)
        found.append({name: np.asarray(value) for name, value in arrays.items() if name != ":tokens"})
    return found


def agree(run: Launched, *ranks: int) -> bool:
    first, *others = states(run, *ranks)
    return all(other.keys() == first.keys() for other in others) and all(
        np.array_equal(value, other[name]) for name, value in first.items() for other in others
    )


def steps(run: Launched, rank: int) -> list[int]:
    return [event["iteration"] for event in run.events(rank, "step")]


def await_joined(run: Launched, rank: int) -> None:
    """Until it has joined again, and made more steps than from one averaging to the next."""
    wait_until(lambda: f"rank {rank} has joined again" in run.log(0), LIMIT_S)
    joined = steps(run, 0)[-1]
    wait_until(lambda: steps(run, rank)[-1] > joined + 8, LIMIT_S)


@pytest.mark.slow
def test_averaged_updates_of_plain_descent_are_those_of_one_rank(tiny: Tiny, tmp_path: Path) -> None:
    """Such an update is linear in the gradient: the mean of the weights is the step of the mean."""
    keys = {"optimizer": "sgd", "iters": 12, "learning_rate": 0.5, "lr_schedule": None}
    alone = train(tiny, tmp_path / "alone", **undisturbed_job(tiny, **keys))
    both = launch(tmp_path / "both", local_job(tiny, **keys, **EXACT), shares=UNEQUAL).succeeded()
    expected = [event["loss"] for event in alone.of("step")]
    assert expected[-1] < expected[0] - 0.3
    assert np.abs(np.array(both.losses()) - expected).max() < 1e-4
    assert both.losses(1) == both.losses(0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "kahan", "stochastic"])
def test_a_stopped_training_goes_on_bit_for_bit(tiny: Tiny, tmp_path: Path, precision: str) -> None:
    job = local_job(tiny, optimizer_precision=precision, iters=24, steps_per_eval=9)
    whole = launch(tmp_path / "whole", job, shares=UNEQUAL).succeeded()
    first = launch(tmp_path / "parts", job, shares=UNEQUAL, spec_fields={"checkpoint_every": 1000})
    wait_until(lambda: len(steps(first, 0)) > 5, LIMIT_S)
    first.send(STOP)
    first.succeeded()
    stopped = steps(first, 1)[-1]
    assert stopped < 24
    fields = {"resume": True, "needs_state": "it has saved one"}
    rest = launch(tmp_path / "parts", job, shares=UNEQUAL, attempt=2, spec_fields=fields).succeeded()
    (resumed,) = rest.events(1, "resumed")
    assert (resumed["iteration"], resumed["from_rank"]) == (stopped, None)
    assert first.losses(1)[:stopped] + rest.losses(1) == whole.losses(1)
    expected, found = whole.weights(), rest.weights()
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_rank_that_stands_still_is_left_out_and_joins_again(tiny: Tiny, tmp_path: Path) -> None:
    # It joins where the others have just saved, and validate next.
    run = launch(tmp_path, local_job(tiny, iters=4000, save_every=4, steps_per_eval=5), shares=(1.0, 1.0, 1.0))
    try:
        wait_until(lambda: len(steps(run, 0)) > 5, LIMIT_S)
        run.freeze(2)
        wait_until(lambda: "rank 2 is left out" in run.log(0), LIMIT_S)
        at = steps(run, 0)[-1]
        wait_until(lambda: steps(run, 1)[-1] > at + 8, LIMIT_S)
        identity = read_identity(run.files.identity(2))
        assert identity is not None
        os.kill(identity.trainer_pid, signal.SIGCONT)
        await_joined(run, 2)
    finally:
        run.send(STOP)
    run.succeeded()
    iterations = steps(run, 2)
    assert iterations[-1] == steps(run, 0)[-1]
    (gap,) = [after for before, after in pairwise(iterations) if after != before + 1]
    # After an averaging: of every fourth step, and before a validation.
    assert gap % 4 == 1 or gap % 5 == 0
    assert agree(run, 0, 1, 2)


@pytest.mark.slow
def test_a_rank_whose_loss_is_not_finite_is_left_out_and_joins_again(tiny: Tiny, tmp_path: Path) -> None:
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CORRUPTING), "CORRUPT": "1 6 nan"}
    job = local_job(tiny, iters=4000, val_batches=0, save_every=4000)
    run = launch(tmp_path, job, shares=(1.0, 1.0), spec_fields={"env": environment})
    try:
        wait_until(lambda: len(steps(run, 0)) > 5, LIMIT_S)
        await_joined(run, 1)
    finally:
        run.send(STOP)
    run.succeeded()
    assert "the other ranks go on without this one: its loss is not finite" in run.log(1)
    assert agree(run, 0, 1)


@pytest.mark.slow
def test_without_rank_0_the_others_save_and_any_one_of_them_is_enough(tiny: Tiny, tmp_path: Path) -> None:
    job = local_job(tiny, iters=4000, val_batches=0, save_every=4000)
    run = launch(tmp_path, job, shares=(1.0, 1.0, 1.0))
    wait_until(lambda: len(steps(run, 0)) > 5, LIMIT_S)
    run.kill(0)
    records = run.ended()
    assert [record.code for record in records[1:]] == [TrainerExit.PEER_LOST] * 2, run.log(1)
    reached = min(steps(run, 1)[-1], steps(run, 2)[-1])
    rest = launch(
        tmp_path, job, shares=(1.0, 1.0), attempt=2, spec_fields={"resume": True, "needs_state": "it has saved one"}
    )
    try:
        wait_until(lambda: len(steps(rest, 0)) > 8, LIMIT_S)
    finally:
        rest.send(STOP)
    rest.succeeded()
    (resumed,) = rest.events(0, "resumed")
    assert resumed["source"] == "emergency"
    assert resumed["iteration"] >= reached - 1
    assert steps(rest, 0)[0] == resumed["iteration"] + 1


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_its_keeper_and_joins(tiny: Tiny, tmp_path: Path) -> None:
    job = local_job(tiny, iters=4000, val_batches=0, save_every=4000)
    run = launch(tmp_path, job, shares=(1.0, 1.0), overrides={rank: {"restarts": rank} for rank in range(2)})
    try:
        wait_until(lambda: len(steps(run, 0)) > 5, LIMIT_S)
        run.kill(1)
        await_joined(run, 1)
    finally:
        run.send(STOP)
    run.succeeded()
    (start, again) = run.events(1, "start")
    assert start["parameter_checksum"] == again["parameter_checksum"]
    assert agree(run, 0, 1)


@pytest.mark.slow
def test_one_rank_that_is_left_goes_on_alone(tiny: Tiny, tmp_path: Path) -> None:
    """As after a restart without the other node."""
    job = local_job(tiny, iters=14)
    launch(tmp_path, job, shares=(1.0, 1.0), spec_fields={"checkpoint_every": 10}).succeeded()
    rest = launch(tmp_path, job, attempt=2, spec_fields={"resume": True, "needs_state": "it has saved one"}).succeeded()
    assert [event["iteration"] for event in rest.events(0, "resumed")] == [10]
    assert steps(rest, 0) == [11, 12, 13, 14]
