"""Batches by a budget of tokens: any ranks and any division have the losses of one rank, also where a long example is
all that a batch has; and a killed training goes on bit by bit."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.protocol.job import JobError, scaled_rate
from engine.trainer.model import load_model, row_format
from engine.training import data
from engine.training.data import EMPTY, DataLoader, Split, with_batches
from tests.training.launching import Launched, launch
from tests.training.test_resume import by_iteration, kill_all_at, resumed, run_training, same_weights
from tests.training.tiny import SCHEDULE, Tiny, make_job, sentence, write_rows

BUDGET = 96
STEPS = 50


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory of short texts, and of some that alone are longer than the budget."""
    folder, dice = tmp_path_factory.mktemp("tail"), random.Random(3)
    for name, size in (("train", 90), ("valid", 30)):
        sizes = ((80, 120) if number % 9 == 8 else (2, 12) for number in range(size))
        write_rows(folder / f"{name}.jsonl", ({"text": sentence(dice, *bounds)} for bounds in sizes))
    return folder


def job(tiny: Tiny, tail: Path, **keys: Any) -> dict[str, Any]:
    own = {"data": str(tail), "batch_tokens": BUDGET, "iters": STEPS, "lr_schedule": SCHEDULE, "max_seq_length": 400}
    whole = tiny.job(**{**own, "val_batches": 3, "steps_per_eval": 25, "steps_per_report": 10, **keys})
    return {key: value for key, value in whole.items() if key != "batch_size"}


def load(tiny: Tiny, tail: Path, home: Path, **keys: Any) -> Split:
    made = make_job(tiny, home, **{"data": str(tail), "batch_tokens": BUDGET, "max_seq_length": 400, **keys})
    return Split(made, "train", row_format(made, load_model(made)[1]), lambda _: None)


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tail: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return launch(tmp_path_factory.mktemp("alone"), job(tiny, tail)).succeeded()


PIPELINE = {"strategy": "pipeline", "layer_split": "0-1,1-2"}


@pytest.mark.slow
@pytest.mark.busy
@pytest.mark.parametrize(
    "division",
    [
        ((1.0, 1.0), {}),
        ((4.0, 1.0, 2.0, 1.0), {}),
        ((1.0, 1.0), {"strategy": "sharded"}),
        ((1.0, 1.0), PIPELINE),
    ],
    ids=["2 ranks", "4 unequal ranks", "sharded", "pipeline"],
)
def test_any_ranks_have_the_losses_of_one(
    tiny: Tiny, tail: Path, tmp_path: Path, alone: Launched, division: tuple[tuple[float, ...], dict[str, Any]]
) -> None:
    shares, own = division
    several = launch(tmp_path, job(tiny, tail, **own), shares=shares).succeeded()
    assert len(alone.losses()) == len(several.losses()) == STEPS
    assert np.abs(np.array(several.losses()) - alone.losses()).max() < 1e-4
    assert [event["tokens"] for event in several.events(0, "step")] == [e["tokens"] for e in alone.events(0, "step")]
    validations = [[event["val_loss"] for event in run.events(0, "validation")] for run in (alone, several)]
    assert validations[0] == pytest.approx(validations[1], abs=1e-4) and len(validations[0]) == 3


@pytest.mark.slow
@pytest.mark.busy
def test_ranks_by_themselves_train_by_budget_too(tiny: Tiny, tail: Path, tmp_path: Path) -> None:
    run = launch(tmp_path, job(tiny, tail, strategy="local", local_steps=4), shares=(1.0, 1.0)).succeeded()
    losses = run.losses()
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2 and not run.events(0, "warning")


@pytest.mark.slow
@pytest.mark.busy
def test_a_killed_training_goes_on_bit_by_bit(tiny: Tiny, tail: Path, tmp_path: Path) -> None:
    keys = {"val_batches": 0, "iters": 100}
    undisturbed = run_training(tmp_path / "undisturbed", job(tiny, tail, **keys), every=0).succeeded()
    killed = run_training(tmp_path / "killed", job(tiny, tail, **keys))
    kill_all_at(killed, 2, 17)
    after = run_training(tmp_path / "killed", job(tiny, tail, **keys), attempt=2).succeeded()
    first = resumed(after)["iteration"] + 1
    assert first > 1
    assert by_iteration(after) == {i: loss for i, loss in by_iteration(undisturbed).items() if i >= first}
    assert same_weights(after, undisturbed)


def test_a_rank_without_rows_takes_part_with_none(tiny: Tiny, tail: Path, tmp_path: Path) -> None:
    split = load(tiny, tail, tmp_path)
    made = make_job(tiny, tmp_path, data=str(tail), batch_tokens=BUDGET, max_seq_length=400)
    loaders = [DataLoader(split, made, [1.0, 1.0, 2.0], rank, None) for rank in range(3)]  # type: ignore[arg-type]
    sampler, empty, longest = split.sampler(1, made.seed), 0, [0, 0, 0]
    for position in range(3 * sampler.batches_per_epoch):
        batches = [loader.batch(position) for loader in loaders]
        whole = split.batch(sampler.batch(position))
        assert sum(batch.targets for batch in batches) == whole.targets
        assert sum(len(batch.tokens) for batch in batches if batch is not EMPTY) == len(whole.tokens)
        assert all(batch.targets > 0 for batch in batches if batch is not EMPTY)
        empty += sum(batch is EMPTY for batch in batches)
        longest[max(range(3), key=lambda rank: batches[rank].tokens.shape[1])] += 1
    assert empty > 0 and min(longest) > 0, "no rank has all the long examples"


def test_epochs_and_the_rate_by_rule_are_those_of_the_batches(tiny: Tiny, tail: Path, tmp_path: Path) -> None:
    split = load(tiny, tail, tmp_path)
    batches = split.sampler(1, 0).batches_per_epoch
    asked = make_job(tiny, tmp_path, batch_tokens=BUDGET, epochs=1.5, learning_rate="auto", grad_accumulation_steps=2)
    made = with_batches(asked, split)
    assert made.iters == round(1.5 * batches)
    assert made.learning_rate == pytest.approx(scaled_rate(2 * 90 / batches, "sqrt"))


@pytest.mark.parametrize("batch", [{"batch_tokens": BUDGET}, {"batch_tokens": None}], ids=["budget", "batch_size"])
def test_batches_are_sorted_by_tokens_which_are_counted_once(
    tiny: Tiny, tail: Path, tmp_path: Path, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = load(tiny, tail, tmp_path, **batch)
    tokens = np.asarray([held.batch([index]).bounds[0, 1] for index in range(90)])
    sampler = held.sampler(8, 0)
    spans = sorted((min(t), max(t)) for t in (tokens[sampler.batch(p)] for p in range(sampler.batches_per_epoch)))
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    first = load(tiny, tail, tmp_path, chunk_size=40, **batch)
    assert first.plan.enabled
    taken = [first.sampler(8, 0).batch(position).tolist() for position in range(5)]
    chunks = [(0, 40), (40, 80), (80, 90)]
    assert all(first._lengths(*chunk).tolist() == tokens[slice(*chunk)].tolist() for chunk in chunks)

    def never(*_: object) -> None:
        raise AssertionError("the rows were tokenised again")

    monkeypatch.setattr(Split, "_count", never)
    again = load(tiny, tail, tmp_path, chunk_size=40, **batch)
    assert [again.sampler(8, 0).batch(position).tolist() for position in range(5)] == taken
    assert all(again._lengths(*chunk).tolist() == tokens[slice(*chunk)].tolist() for chunk in chunks)


def test_while_all_rows_are_tokenised_it_says_that_it_goes_on(
    tiny: Tiny, tail: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_COMPARED", 20)
    made = make_job(tiny, tmp_path, data=str(tail), batch_tokens=BUDGET)
    calls: list[int] = []
    split = Split(made, "train", row_format(made, load_model(made)[1]), lambda _: None, lambda: calls.append(1))
    split.sampler(1, 0)
    assert len(calls) == 5


def test_a_row_of_another_form_ends_it_before_the_first_step(tiny: Tiny, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [{"text": "tower"}, {"words": "hold"}])
    with pytest.raises(JobError, match=r"train\.jsonl: line 2 does not have the format of the first one"):
        load(tiny, tmp_path, tmp_path).sampler(1, 0)
