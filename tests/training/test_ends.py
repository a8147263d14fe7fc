"""How a run of two ranks ends when it is stopped, damaged, or configured wrongly, and what each rank reports."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from engine.protocol.attempt import read_identity
from tests.training.launching import Launched, launch
from tests.training.tiny import Tiny, write_weights
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

BOTH = (1.0, 1.0)


def under_way(run: Launched) -> None:
    wait_until(lambda: len(run.events(1, "step")) >= 3, 240)


def failure(run: Launched, rank: int) -> tuple[str, str]:
    (event,) = run.events(rank, "failure")
    return event["error_type"], event["message"]


def test_all_ranks_stop_save_and_exit_together(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(iters=100_000), shares=BOTH, spec_fields={"stop_grace_s": 30.0})
    under_way(run)
    run.send(b"stop\n")
    records = run.ended()
    assert [(record.code, record.stopped_by) for record in records] == [(0, "stop"), (0, "stop")]
    ends = [run.events(rank)[-1] for rank in (0, 1)]
    assert [(end["event"], end["completed"], end["stopped"]) for end in ends] == [("end", False, True)] * 2
    assert ends[0]["iteration"] == ends[1]["iteration"] == run.events(0, "step")[-1]["iteration"]
    assert (run.adapters / f"{ends[0]['iteration']:07d}_adapters.safetensors").exists()
    assert (run.adapters / "adapters.safetensors").exists()


@pytest.mark.slow
def test_a_stop_of_one_rank_stops_all(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(iters=100_000), shares=BOTH)
    under_way(run)
    run.send_to(1, b"stop\n")
    assert [(record.code, record.stopped_by) for record in run.ended()] == [(0, None), (0, "stop")]


@pytest.mark.slow
def test_the_survivor_of_a_killed_rank_reports_a_lost_peer(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(iters=100_000), shares=BOTH)
    under_way(run)
    killed = read_identity(run.files.identity(1))
    assert killed is not None
    os.kill(killed.trainer_pid, signal.SIGKILL)
    survivor, victim = run.ended()
    assert (victim.code, victim.signal, victim.stopped_by) == (None, signal.SIGKILL, None)
    assert survivor.code == 5
    assert failure(run, 0)[0] == "PeerLost"
    assert run.events(1, "failure") == []


# test_update.py has it on one rank: all decide by the same sum.
@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_on_every_rank(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(learning_rate=1e30, optimizer="sgd", iters=50), shares=BOTH)
    assert [record.code for record in run.ended()] == [4, 4]
    kind, message = failure(run, 0)
    assert kind == "Diverged"
    assert message.endswith("is not finite at iteration 2") and failure(run, 1) == (kind, message)
    assert not (run.adapters / "adapters.safetensors").exists()


@pytest.mark.slow
def test_ranks_with_different_models_do_not_train(tiny: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    write_weights(other, json.loads((other / "config.json").read_text()), seed=99)
    run = launch(tmp_path / "run", tiny.job(), shares=BOTH, overrides={1: {"model": str(other)}})
    assert [record.code for record in run.ended()] == [3, 3]
    kind, message = failure(run, 0)
    assert kind == "GroupError" and message.startswith("the model or the adapter of rank 1 differs")


def test_a_group_of_another_size_does_not_train(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(), spec_fields={"world_size": 2})
    (record,) = run.ended()
    assert record.code == 3
    assert failure(run, 0)[0] == "GroupError"
    assert run.events(0, "step") == []


@pytest.mark.slow
def test_an_error_that_the_user_can_fix_is_one_line(tiny: Tiny, tmp_path: Path) -> None:
    run = launch(tmp_path, tiny.job(model="/nowhere/model"))
    (record,) = run.ended()
    assert record.code == 1
    kind, message = failure(run, 0)
    assert kind == "JobError" and "the model /nowhere/model is not a directory" in message
    assert run.log().splitlines()[-1] == f"JobError: {message}"
