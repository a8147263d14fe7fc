"""The best weights are saved, and a training ends early, by its validations; a kill and resume changes neither."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from engine.protocol.job import JobError
from engine.protocol.safetensors import check_header
from engine.trainer.checkpoint.saving import EmergencyCheckpoint, PeriodicCheckpoints
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.loop import Loop
from engine.trainer.replica_check import ReplicaCheck, ReplicaMismatch
from engine.trainer.saver import BEST_FILE, has_better, save_best_adapters
from engine.trainer.weights import WeightStream
from engine.training.reporting import BestValidation, Outcome
from tests.training.launching import Launched, launch
from tests.training.test_resume import BOTH, by_iteration, kill_all_at, resumed, run_training, same_weights
from tests.training.test_update import Trained, train
from tests.training.tiny import Tiny, make_job, sentence, write_split

NAN = float("nan")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float | None]], None]:
    """Gives the validations these losses, and then the last one; None is a validation in which a stop is received."""

    def script(losses: Sequence[float | None]) -> None:
        left = list(losses)

        def evaluate(self: Loop, *_: Any) -> float | None:
            loss = left.pop(0) if len(left) > 1 else left[0]
            self.stopping = loss is None
            return loss

        monkeypatch.setattr(Loop, "evaluate", evaluate)

    return script


def saved(path: Path) -> dict[str, np.ndarray]:
    found = mx.load(str(path))
    assert isinstance(found, dict)
    return {name: np.asarray(value) for name, value in found.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def validated(trained: Trained) -> list[int]:
    return [event["iteration"] for event in trained.of("validation")]


def test_a_loss_that_is_equal_or_not_finite_is_not_better() -> None:
    best = BestValidation()
    assert [best.add(at, loss) for at, loss in enumerate([NAN, 2.0, 2.0, NAN, 1.5, 1.7])] == [
        *(False, True, False, False, True, False),
    ]
    assert (best.loss, best.iteration, best.since) == (1.5, 4, 1)
    assert BestValidation(**json.loads(json.dumps(best.state()))) == best
    unknown = BestValidation()
    unknown.add(0, NAN)
    assert BestValidation(**unknown.state()) == unknown


def test_without_improvement_the_training_is_complete_early(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted([5.0, 4.0, 4.5, 3.0, 3.1, 3.2, 2.0])
    trained = train(tiny, tmp_path, iters=40, steps_per_eval=2, val_batches=1, patience=2)
    why = "stopped early at iteration 9: the validation loss has not improved for 2 validations (best 3.0000 at "
    assert trained.outcome == Outcome(completed=True, stopped=False, iteration=9, early=f"{why}iteration 5)")
    assert validated(trained) == [0, 1, 3, 5, 7, 9]
    assert same(saved(trained.job.adapter_path / "adapters.safetensors"), numpy_weights(trained))


def numpy_weights(trained: Trained) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in trained.weights().items()}


def test_an_accumulation_is_applied_before_an_early_stop(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None]
) -> None:
    """The patience is over after iteration 5; the update of 5 to 8 is made as in a training of 8 iterations."""
    scripted([5.0])
    keys = {"grad_accumulation_steps": 4, "steps_per_eval": 2, "val_batches": 1, "batch_size": 4}
    trained = train(tiny, tmp_path / "early", iters=40, patience=3, **keys)
    assert trained.outcome is not None and (trained.outcome.completed, trained.outcome.iteration) == (True, 8)
    assert validated(trained) == [0, 1, 3, 5]
    whole = train(tiny, tmp_path / "whole", iters=8, **keys)
    assert same(numpy_weights(trained), numpy_weights(whole))


def test_a_stop_in_the_middle_of_an_accumulation_is_one_at_the_last_update(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Iterations whose gradients were never applied, and validations after the update, are not counted: a resumed
    training repeats them."""
    scripted([5.0, 4.0, 3.0, 2.0, None])
    kept: list[Snapshot | None] = []
    monkeypatch.setattr(PeriodicCheckpoints, "finish", lambda _, snapshot: kept.append(snapshot))
    keys = {"grad_accumulation_steps": 4, "steps_per_eval": 2, "val_batches": 1, "batch_size": 4}
    trained = train(tiny, tmp_path, iters=40, **keys)
    assert validated(trained) == [0, 1, 3, 5]
    assert trained.outcome == Outcome(completed=False, stopped=True, iteration=4)
    (last,) = kept
    assert last is not None
    assert (last.iteration, last.best) == (4, {"loss": 3.0, "iteration": 3, "since": 0})


@pytest.mark.parametrize("steps", [2, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (1, 4))])
def test_from_the_state_of_any_update_the_training_ends_as_the_whole_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Validations before, at and within updates; the best is at 5, the patience over at 14."""
    held: list[Snapshot] = []

    def hold(_: EmergencyCheckpoint, snapshot: Snapshot) -> None:
        held.append(snapshot)

    def evaluate(loop: Loop, *_: Any) -> float:
        return 2.0 + abs(loop.point.iteration + len(loop._pending) - 6)

    monkeypatch.setattr(Loop, "evaluate", evaluate)
    monkeypatch.setattr(EmergencyCheckpoint, "hold", hold)
    keys = {"grad_accumulation_steps": steps, "steps_per_eval": 3, "val_batches": 1, "batch_size": 4}
    keys |= {"iters": 40, "patience": 3, "save_best": True}
    home = tmp_path / "run"
    whole = train(tiny, home, **keys)
    assert whole.outcome is not None and whole.outcome.early is not None
    assert whole.outcome.early.endswith("for 3 validations (best 3.0000 at iteration 5)")
    best = (whole.job.adapter_path / BEST_FILE).read_bytes()
    for snapshot in held[:]:
        # In the same run: a file of the best validation is there already.
        resumed = train(tiny, home, None, snapshot, **keys)
        assert resumed.outcome == whole.outcome
        assert same(numpy_weights(resumed), numpy_weights(whole))
        assert (whole.job.adapter_path / BEST_FILE).read_bytes() == best


def test_corrupted_weights_are_not_saved_as_the_best(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted([5.0, 4.0, 3.0])
    wrong = ReplicaMismatch((0,), certain=True)

    def compare(check: ReplicaCheck, iteration: int, _: int) -> bool:
        # Corrupted between two saves.
        check.difference = wrong if iteration == 3 else None
        return True

    monkeypatch.setattr(ReplicaCheck, "compare", compare)
    trained = train(tiny, tmp_path, iters=4, steps_per_eval=2, val_batches=1, save_best=True)
    metadata = check_header(trained.job.adapter_path / BEST_FILE).metadata
    assert (metadata["iteration"], metadata["val_loss"]) == ("1", "4.0")
    assert any(event["message"].startswith("not saved: ") for event in trained.of("warning"))


def test_the_best_weights_are_saved_with_their_validation(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted([5.0, 4.0, 4.5, 3.0, 3.1])
    trained = train(tiny, tmp_path, iters=12, steps_per_eval=2, save_every=1, val_batches=1, save_best=True)
    best = trained.job.adapter_path / BEST_FILE
    assert same(saved(best), saved(trained.job.adapter_path / "0000005_adapters.safetensors"))
    assert not same(saved(best), numpy_weights(trained))
    metadata = check_header(best).metadata
    assert (metadata["iteration"], metadata["val_loss"], metadata["format"]) == ("5", "3.0", "mlx")
    events = [event for event in trained.of("checkpoint") if event["phase"] == "committed" and "val_loss" in event]
    assert [(event["iteration"], event["val_loss"], event["path"]) for event in events] == [
        (1, 4.0, str(best)),
        (5, 3.0, str(best)),
    ]


def test_what_was_never_trained_is_not_saved_as_the_best(
    tiny: Tiny, tmp_path: Path, scripted: Callable[..., None]
) -> None:
    scripted([1.0, 2.0])
    trained = train(tiny, tmp_path, iters=4, steps_per_eval=2, val_batches=1, save_best=True)
    assert not (trained.job.adapter_path / BEST_FILE).exists()


def test_a_worse_validation_of_the_same_run_does_not_replace_the_file(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path / "run", save_best=True)
    job.adapter_path.mkdir(parents=True)
    assert not has_better(job, 2.0, "v")
    save_best_adapters(job, WeightStream.of({"w": mx.zeros(3)}), 9, 2.0, "v")
    assert [has_better(job, loss, "v") for loss in (2.1, 2.0, 1.9)] == [True, False, False]
    other = make_job(tiny, tmp_path / "other", save_best=True, adapter_path=str(job.adapter_path))
    assert not has_better(other, 2.1, "v")
    assert not has_better(job, 2.1, "other validation data")


KEYS: dict[str, Any] = {"val_batches": -1, "steps_per_eval": 3, "save_best": True, "save_every": 1000}
ROUGH: dict[str, Any] = {"learning_rate": 1e-2, "iters": 60, "patience": 3}


def best_file(run: Launched) -> Path:
    return run.adapters / BEST_FILE


@pytest.fixture(scope="module")
def rough_job(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Its eight examples, one batch, are soon known by heart: then the validation loss rises, in whatever order."""
    data = tmp_path_factory.mktemp("few") / "data"
    write_split(data, lambda dice: {"text": sentence(dice)}, {"train": 8, "valid": 13})
    return tiny.job(data=str(data), **KEYS, **ROUGH)


@pytest.fixture(scope="module")
def rough(rough_job: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The undisturbed run of two ranks that ends early."""
    return run_training(tmp_path_factory.mktemp("rough"), rough_job, every=0).succeeded()


@pytest.mark.busy
@pytest.mark.slow
def test_all_ranks_end_early_together(rough: Launched) -> None:
    ends = [rough.events(rank)[-1] for rank in (0, 1)]
    assert {(end["event"], end["completed"], end["stopped"]) for end in ends} == {("end", True, False)}
    assert ends[0]["iteration"] == ends[1]["iteration"] < ROUGH["iters"]
    assert ends[0]["early"] == ends[1]["early"] == rough.log().splitlines()[-1]
    best = min(rough.events(0, "validation"), key=lambda event: event["val_loss"])
    assert check_header(best_file(rough)).metadata["iteration"] == str(best["iteration"])
    assert ends[0]["early"].endswith(f"(best {best['val_loss']:.4f} at iteration {best['iteration']})")


@pytest.mark.busy
@pytest.mark.slow
def test_killed_before_it_ends_early_it_ends_as_if_undisturbed(
    rough_job: dict[str, Any], tmp_path: Path, rough: Launched
) -> None:
    """Killed after the best validation, and gone on from a checkpoint before it or after it: the count of validations
    without improvement is that of the checkpoint."""
    end = rough.events(0)[-1]["iteration"]
    run = run_training(tmp_path, rough_job, every=2)
    kill_all_at(run, 2, random.Random(5).randint(end - 5, end - 2))
    last = run_training(tmp_path, rough_job, attempt=2, every=2).succeeded()
    assert resumed(last)["iteration"] > 0
    assert by_iteration(last).items() <= by_iteration(rough).items()
    assert {key: last.events(0)[-1][key] for key in ("iteration", "early", "completed")} == {
        key: rough.events(0)[-1][key] for key in ("iteration", "early", "completed")
    }
    assert same_weights(last, rough)
    assert best_file(last).read_bytes() == best_file(rough).read_bytes()


@pytest.mark.busy
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "pipeline"])
def test_divided_ranks_save_the_best_whole(tiny: Tiny, tmp_path: Path, strategy: str) -> None:
    keys = {"strategy": strategy, "layer_split": "0-1,1-2"} if strategy == "pipeline" else {"strategy": strategy}
    what = tiny.job(val_batches=-1, steps_per_eval=2, save_every=1, save_best=True, **keys)
    run = launch(tmp_path, what, shares=BOTH).succeeded()
    best = min(run.events(0, "validation"), key=lambda event: event["val_loss"])["iteration"]
    assert best > 0 and check_header(best_file(run)).metadata["iteration"] == str(best)
    assert same(saved(best_file(run)), saved(run.adapters / f"{best:07d}_adapters.safetensors"))


@pytest.mark.busy
def test_epochs_are_counted_in_batches_of_the_data(tiny: Tiny, tmp_path: Path) -> None:
    """61 examples fill 7 batches of 8."""
    job = {key: value for key, value in tiny.job(epochs=1.5).items() if key != "iters"}
    run = launch(tmp_path, job).succeeded()
    (start,) = run.events(0, "start")
    assert start["iterations"] == len(run.events(0, "step")) == run.events(0)[-1]["iteration"] == 10
    config = json.loads((run.adapters / "adapter_config.json").read_text())
    assert (config["iters"], config["epochs"]) == (10, 1.5)


@pytest.mark.busy
@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"patience": 2}, {"save_best": True}])
def test_without_validation_data_the_job_is_refused(tiny: Tiny, tmp_path: Path, keys: dict[str, Any]) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_bytes((tiny.text / "train.jsonl").read_bytes())
    run = launch(tmp_path / "run", tiny.job(data=str(data), val_batches=-1, **keys))
    run.ended()
    (failure,) = run.events(0, "failure")
    assert failure["error_type"] == JobError.__name__
    assert failure["message"] == f"{data}/valid.jsonl is missing or empty, and {next(iter(keys))} needs it"


@pytest.mark.slow
def test_a_rank_that_is_kept_out_leaves_the_validation_to_the_others(tiny: Tiny, tmp_path: Path) -> None:
    """The losses are those of both ranks, and where nobody is left there is no validation."""
    job = tiny.job(iters=4, steps_per_eval=2, val_batches=2, test=True, test_batches=1)

    def run(name: str, *kept_out: int) -> Launched:
        out = {rank: {"validates": False} for rank in kept_out}
        return launch(tmp_path / name, job, shares=(1.0, 1.0), overrides=out).succeeded()

    everybody, one, nobody = run("everybody"), run("one", 0), run("nobody", 0, 1)
    for kind, key in (("validation", "val_loss"), ("test", "test_loss")):
        losses = [event[key] for event in everybody.events(kind=kind)]
        assert losses and [event[key] for event in one.events(kind=kind)] == pytest.approx(losses, rel=1e-5)
        assert nobody.events(kind=kind) == []
    assert any("takes part in validation" in event["message"] for event in nobody.events(kind="warning"))
    assert nobody.losses() == everybody.losses() == one.losses()
