"""A killed training resumes as if it had never stopped: bit for bit on as many ranks, to 1e-4 on others."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol.attempt import EMERGENCY_CHECKPOINT, STOP
from engine.protocol.exit_codes import TrainerExit
from engine.training.checkpoint_files import MANIFEST_NAME
from tests.training.launching import Launched, launch
from tests.training.test_update import train
from tests.training.tiny import SCHEDULE, UNEQUAL, Tiny, undisturbed_job
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

ITERS = 30
LONGER = 100
"""Steps of some 15 ms: time enough for a checkpoint on a disk that others use as well."""
BOTH = (1.0, 1.0)
DROPOUT: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.3},
}


@pytest.fixture(scope="module")
def plain(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The undisturbed run of two ranks."""
    return run_training(tmp_path_factory.mktemp("plain"), job(tiny), every=0).succeeded()


@pytest.fixture(scope="module")
def dropping(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The same with dropout, of adapters."""
    return run_training(tmp_path_factory.mktemp("dropping"), longer(tiny), every=0).succeeded()


def longer(tiny: Tiny) -> dict[str, Any]:
    """So long that a rank which is killed in the middle is dead before the end: adapters' steps take milliseconds."""
    return job(tiny, iters=4 * ITERS, **DROPOUT)


def job(tiny: Tiny, **keys: Any) -> dict[str, Any]:
    return tiny.job(**{"iters": ITERS, "lr_schedule": SCHEDULE, "save_every": 1000, **keys})


def run_training(
    home: Path, what: dict[str, Any], shares: Sequence[float] = BOTH, *, attempt: int = 1, every: int = 5, **fields: Any
) -> Launched:
    """An attempt of one run: the first begins, later ones go on."""
    settings = {"checkpoint_every": every, "resume": attempt > 1, "replica_check_every": 10, **fields}
    return launch(home, what, shares=tuple(shares), spec_fields=settings, attempt=attempt)


def same_weights(one: Launched, other: Launched) -> bool:
    mine, theirs = one.weights(), other.weights()
    return mine.keys() == theirs.keys() and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def resumed(run: Launched, rank: int = 0) -> dict[str, Any]:
    (event,) = run.events(rank, "resumed")
    return event


def by_iteration(run: Launched, rank: int = 0) -> dict[int, float]:
    return {event["iteration"]: event["loss"] for event in run.events(rank, "step")}


def kill_all_at(run: Launched, ranks: int, iteration: int, *, parts: int = 1) -> None:
    """kill -9 of these ranks at that step, once there is a checkpoint (of so many ranks' parts) to go on from."""

    def whole() -> bool:
        if parts == 1:
            return any((run.home / "checkpoints").glob("step-*"))
        reported = [run.events(rank, "checkpoint") for rank in range(parts)]
        return all(any(event["phase"] == "committed" for event in events) for events in reported)

    wait_until(lambda: any(event["iteration"] >= iteration for event in run.events(0, "step")), 60)
    if ranks > parts:
        # The first, which alone writes, waits for this one: its few short steps are not over before the disk has it.
        run.freeze(ranks - 1)
    wait_until(whole, 60)
    run.kill(*range(ranks))
    assert [record.signal for record in run.ended()] == [signal.SIGKILL] * ranks


def kill_and_go_on(
    home: Path, what: dict[str, Any], whole: Launched, at: Sequence[int], shares: Sequence[float] = BOTH
) -> None:
    """kill -9 of both ranks at these steps, one after the other; losses and weights are the undisturbed run's."""
    losses = by_iteration(whole)
    seen: dict[int, float] = {}
    for attempt, iteration in enumerate(at, start=1):
        run = run_training(home, what, shares, attempt=attempt, every=3)
        kill_all_at(run, 2, iteration)
        seen |= by_iteration(run)
    last = run_training(home, what, shares, attempt=len(at) + 1, every=3).succeeded()
    first = resumed(last)
    assert first["source"] == "checkpoint" and first["iteration"] > 0 and first["refused"] == 0
    steps = by_iteration(last)
    assert min(steps) == first["iteration"] + 1
    # What was trained twice was the same twice.
    assert all(seen[iteration] == loss for iteration, loss in steps.items() if iteration in seen)
    assert seen | steps == losses
    assert same_weights(last, whole)
    reports = {event["iteration"]: event["train_loss"] for event in last.events(0, "report")}
    expected = {event["iteration"]: event["train_loss"] for event in whole.events(0, "report")}
    assert reports and all(expected[iteration] == loss for iteration, loss in reports.items())
    assert last.events(0, "report")[-1]["trained_tokens"] == whole.events(0, "report")[-1]["trained_tokens"]


@pytest.mark.slow
def test_killed_at_a_random_step_it_goes_on_bit_by_bit(tiny: Tiny, tmp_path: Path, undisturbed: Launched) -> None:
    kill_and_go_on(tmp_path, undisturbed_job(tiny), undisturbed, [random.Random(1).randint(6, 20)], UNEQUAL)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_at_many_random_steps_it_goes_on_bit_by_bit(tiny: Tiny, tmp_path: Path, seed: int) -> None:
    kinds = [DROPOUT, {"optimizer": "adafactor"}, {"optimizer": "muon", "moments": "8bit"}, {"moments": "bfloat16"}, {}]
    what = job(tiny, **kinds[seed % len(kinds)], grad_accumulation_steps=1 + seed % 3)
    dice = random.Random(seed)
    whole = run_training(tmp_path / "whole", what, every=0).succeeded()
    kill_and_go_on(tmp_path / "killed", what, whole, [dice.randint(11, 15), dice.randint(18, 24)])


@pytest.mark.slow
def test_one_killed_rank_costs_at_most_one_step_and_no_bit(tiny: Tiny, tmp_path: Path, dropping: Launched) -> None:
    """Without any periodic checkpoint, and with dropout: the survivor's state is all there is."""
    lose_one(tmp_path, longer(tiny), dropping, victim=0, at=random.Random(2).randint(2, 20))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_one_rank_killed_many_times(tiny: Tiny, tmp_path: Path, dropping: Launched, seed: int) -> None:
    lose_one(tmp_path, longer(tiny), dropping, victim=seed % 2, at=random.Random(seed).randint(2, 24))


def lose_one(home: Path, what: dict[str, Any], whole: Launched, *, victim: int, at: int) -> None:
    """kill -9 of one rank at that step, then an attempt that goes on: as the undisturbed run."""
    run = run_training(home, what, every=0)
    wait_until(lambda: any(event["iteration"] >= at for event in run.events(victim, "step")), 60)
    run.kill(victim)
    codes = {record.rank: (record.code, record.signal) for record in run.ended()}
    assert codes == {victim: (None, signal.SIGKILL), 1 - victim: (5, None)}
    saved = run.events(1 - victim, "emergency_checkpoint")
    assert [event["phase"] for event in saved] == ["begin", "committed"]
    kept = saved[-1]["iteration"]
    assert kept == run.events(1 - victim, "step")[-1]["iteration"]
    again = run_training(home, what, every=0, attempt=2).succeeded()
    for rank in (0, 1):
        found = resumed(again, rank)
        assert (found["source"], found["iteration"], found["from_rank"]) == ("emergency", kept, 0)
    # One step at most is trained again.
    assert kept >= max(by_iteration(run, victim), default=0)
    seen = by_iteration(run, 1 - victim) | by_iteration(again)
    assert seen == by_iteration(whole)
    assert same_weights(again, whole)
    # A complete run removes it.
    assert not (again.home / "emergency").exists()


@pytest.mark.slow
def test_a_survivor_that_hangs_in_a_sum_saves_its_state_on_the_heads_command(tiny: Tiny, tmp_path: Path) -> None:
    """A stopped peer breaks no connection: nobody would ever notice."""
    what = job(tiny, iters=100_000)
    run = run_training(tmp_path, what, every=0)
    wait_until(lambda: len(run.events(1, "step")) >= 5, 60)
    run.freeze(1)
    run.send_to(0, EMERGENCY_CHECKPOINT)
    wait_until(lambda: run.exit(0) is not None, 30)
    assert [event["phase"] for event in run.events(0, "emergency_checkpoint")] == ["begin", "committed"]
    run.kill(1)
    survivor, _ = run.ended()
    assert (survivor.code, survivor.stopped_by) == (5, None)
    kept = run.events(0, "emergency_checkpoint")[-1]["iteration"]
    # The command may come between an update and its report.
    assert kept - run.events(0, "step")[-1]["iteration"] in (0, 1)
    # Two more steps on one rank: the state is good to go on from.
    again = run_training(tmp_path, what, (1.0,), every=0, attempt=2)
    wait_until(lambda: len(again.events(0, "step")) >= 2, 60)
    again.kill(0)
    again.ended()
    assert resumed(again)["source"] == "emergency" and again.events(0, "step")[0]["iteration"] == kept + 1


@pytest.mark.slow
def test_asked_in_the_middle_of_its_steps_a_rank_writes_a_whole_state(
    tiny: Tiny, tmp_path: Path, plain: Launched
) -> None:
    """The word comes at any moment, also while an update changes everything."""
    what = job(tiny)
    run = run_training(tmp_path, what, every=0)
    wait_until(lambda: len(run.events(0, "step")) >= 8, 60)
    run.send(EMERGENCY_CHECKPOINT)
    assert {record.code for record in run.ended()} == {5}
    again = run_training(tmp_path, what, every=0, attempt=2).succeeded()
    start = resumed(again)["iteration"]
    assert start == max(event["iteration"] for rank in (0, 1) for event in run.events(rank, "emergency_checkpoint"))
    assert by_iteration(again) == {k: loss for k, loss in by_iteration(plain).items() if k > start}
    assert same_weights(again, plain)


@pytest.mark.parametrize(
    ("before", "after"),
    [(2, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
@pytest.mark.slow
def test_on_another_number_of_ranks_it_goes_on_to_1e_4(
    tiny: Tiny, tmp_path: Path, plain: Launched, before: int, after: int
) -> None:
    what = job(tiny)
    run = run_training(tmp_path, what, [1.0] * before)
    kill_all_at(run, before, 12)
    last = run_training(tmp_path, what, [1.0] * after, attempt=2).succeeded()
    assert resumed(last)["iteration"] >= 5
    losses = by_iteration(plain)
    assert max(abs(losses[iteration] - loss) for iteration, loss in by_iteration(last).items()) < 1e-4
    assert max(by_iteration(last)) == ITERS


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "after"), [("sharded", 2), ("sharded", 3), ("pipeline", 2)])
def test_a_state_in_parts_is_put_together_again(tiny: Tiny, tmp_path: Path, strategy: str, after: int) -> None:
    what = job(tiny, strategy=strategy, iters=LONGER)
    whole = run_training(tmp_path / "whole", what, every=0).succeeded()
    run = run_training(tmp_path / "killed", what, every=3)
    kill_all_at(run, 2, 14, parts=2)
    last = run_training(tmp_path / "killed", what, [1.0] * after, attempt=2, every=3).succeeded()
    found = resumed(last)
    assert found["source"] == "checkpoint" and found["iteration"] >= 3
    assert found["from_rank"] is (None if after == 2 else 0)
    losses, steps = by_iteration(whole), by_iteration(last)
    assert max(abs(losses[iteration] - loss) for iteration, loss in steps.items()) < 1e-4
    if after == 2:
        assert by_iteration(run) | steps == losses


@pytest.mark.slow
def test_every_refused_checkpoint_is_told_and_the_one_before_is_used(tiny: Tiny, tmp_path: Path) -> None:
    what = job(tiny, iters=100_000)
    run = run_training(tmp_path, what, (1.0,), checkpoint_keep=5)
    folder = run.home / "checkpoints"
    # As many as the disk takes: one that is due while another is being written is left out.
    wait_until(lambda: len(list(folder.glob("step-*"))) >= 3, 60)
    run.kill(0)
    run.ended()
    flipped, torn, *rest = sorted(folder.glob("step-*"), reverse=True)
    assert len(rest) >= 1
    data = bytearray((flipped / "optimizer.safetensors").read_bytes())
    data[-5] ^= 4
    (flipped / "optimizer.safetensors").write_bytes(data)
    (torn / MANIFEST_NAME).unlink()
    again = run_training(tmp_path, what, (1.0,), attempt=2)
    wait_until(lambda: bool(again.events(0, "step")), 60)
    again.kill(0)
    again.ended()
    found = resumed(again)
    assert (found["source"], found["refused"]) == ("checkpoint", 2)
    assert found["update"] == int(rest[0].name.removeprefix("step-"))
    warnings = [event["message"] for event in again.events(0, "warning")]
    assert any(flipped.name in warning and "its hash is not the manifest's" in warning for warning in warnings)
    assert any(torn.name in warning and "it was never finished" in warning for warning in warnings)


@pytest.mark.slow
def test_when_none_is_left_it_says_so(tiny: Tiny, tmp_path: Path) -> None:
    what = job(tiny, iters=12)
    run = run_training(tmp_path, what, (1.0,), every=4)
    run.succeeded()
    for checkpoint in (run.home / "checkpoints").glob("step-*"):
        (checkpoint / MANIFEST_NAME).write_text("{}")
    again = run_training(tmp_path, what, (1.0,), attempt=2).succeeded()
    found = resumed(again)
    assert (found["source"], found["iteration"]) == ("none", 0) and found["refused"] >= 2
    output = f"no state to resume from ({found['refused']} were refused): the training starts at iteration 1"
    assert output in [event["message"] for event in again.events(0, "warning")]
    assert f"warning: {output}" in again.log()
    assert min(by_iteration(again)) == 1


@pytest.mark.slow
def test_a_stop_leaves_a_state_to_go_on_from_bit_by_bit(tiny: Tiny, tmp_path: Path, plain: Launched) -> None:
    what = job(tiny)
    run = run_training(tmp_path, what, every=1000, stop_grace_s=30.0)
    wait_until(lambda: len(run.events(1, "step")) >= 6, 60)
    run.send(b"stop\n")
    run.succeeded()
    at = run.events(0, "end")[-1]["iteration"]
    last = run_training(tmp_path, what, attempt=2, every=1000).succeeded()
    assert (resumed(last)["source"], resumed(last)["iteration"]) == ("checkpoint", at)
    assert by_iteration(run) | by_iteration(last) == by_iteration(plain)
    assert same_weights(last, plain)


def test_from_a_plain_adapter_file_the_weights_go_on(tiny: Tiny, tmp_path: Path) -> None:
    before = train(tiny, tmp_path / "before", **job(tiny, **DROPOUT))
    file = str(before.job.adapter_path / "adapters.safetensors")
    run = launch(
        tmp_path / "after",
        job(tiny, iters=4, resume_adapter_file=file, **DROPOUT),
        spec_fields={"resume": True},
        overrides={0: {"resume_adapter_file": file}},
    ).succeeded()
    assert resumed(run)["source"] == "adapter"
    assert "with the weights of resume_adapter_file" in run.log()
    assert run.losses()[0] < before.of("step")[0]["loss"] - 0.05


@pytest.mark.slow
def test_a_run_goes_on_with_other_data_only_when_told(tiny: Tiny, tmp_path: Path) -> None:
    data = shutil.copytree(tiny.text, tmp_path / "data")
    what = job(tiny, iters=100_000, data=str(data))
    run = run_training(tmp_path, what, (1.0,), every=0)
    wait_until(lambda: len(run.events(0, "step")) >= 2, 60)
    run.send(STOP)
    assert [record.code for record in run.ended()] == [0]
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(lines[1:]))
    refused = run_training(tmp_path, what, (1.0,), every=0, attempt=2)
    assert [record.code for record in refused.ended()] == [TrainerExit.EXCEPTION]
    assert "train.jsonl changed since the state of iteration" in refused.log()
    accepting = run_training(tmp_path, what, (1.0,), every=0, attempt=3, accept_changed_data=True)
    wait_until(lambda: len(accepting.events(0, "step")) >= 1, 60)
    accepting.kill(0)
    accepting.ended()
    assert resumed(accepting)["iteration"] == run.events(0, "step")[-1]["iteration"]
