"""What the divided strategies are put together from: dropout that is drawn twice alike, headers, parts of a state."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.worker.arrays import number
from engine.worker.collective import Collective, GroupError
from engine.worker.data import load_split
from engine.worker.events import EventWriter
from engine.worker.job import Job
from engine.worker.model import files_checksum, load_model
from engine.worker.reporting import Reporter
from engine.worker.strategies.messages import Kind, Messages
from engine.worker.strategies.parts import Held, Part
from engine.worker.strategies.sharded import Sharded
from engine.worker.strategies.strategy import State
from engine.worker.streamed import Weights, write_safetensors
from tests.training.conftest import Tiny, write_weights
from tests.training.together import together


def job_of(tiny: Tiny, home: Path, **keys: Any) -> Job:
    return Job.of(tiny.job(**keys), model=None, data=None, workdir=home, home=home)


@pytest.fixture(autouse=True)
def as_on_the_cpu() -> Any:
    """The trainer's own choice there."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_the_gradient_is_of_the_same_dropout_as_the_loss(tiny: Tiny, tmp_path: Path) -> None:
    """A section runs forward twice: the loss along the gradient must rise by its norm, with the same seed."""
    lora = {"rank": 4, "scale": 4.0, "dropout": 0.4}
    job = job_of(tiny, tmp_path, strategy="sharded", fine_tune_type="lora", num_layers=2, lora_parameters=lora)
    model, tokenizer = load_model(job)
    train = load_split(job, "train", tokenizer, lambda _: None)
    reporter = Reporter(0, EventWriter(None, 0, 1))
    training = Sharded(job, model, train, collective=Collective("ring", 1, 0), shares=[1.0], reporter=reporter)
    training.model.train()
    own = dict(tree_flatten(training.model.trainable_parameters()))
    mx.random.seed(1)
    # lora_b begins at zero, where dropout would change nothing.
    own = {name: value + 0.1 * mx.random.normal(value.shape) for name, value in own.items()}

    def loss(parameters: dict[str, mx.array], seed: int) -> tuple[float, dict[str, mx.array]]:
        training.model.update(tree_unflatten(list(parameters.items())))
        training._sums = {}
        mx.random.seed(seed)
        share = training.accumulate(0)
        return share.loss_sum, dict(training.sums)

    middle, gradient = loss(own, 7)
    assert loss(own, 8)[0] != middle, "there is dropout"
    norm = number(mx.sqrt(sum((mx.square(value).sum() for value in gradient.values()), start=mx.array(0.0))))
    step = 0.02
    ends = [
        loss({name: value + sign * step / norm * gradient[name] for name, value in own.items()}, 7)[0]
        for sign in (1, -1)
    ]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=0.02)


class Wire:
    """A collective's messages, between two threads."""

    def __init__(self) -> None:
        self.sent: deque[mx.array] = deque()
        self.ready = threading.Semaphore(0)

    def send(self, array: mx.array, rank: int) -> None:
        self.sent.append(array)
        self.ready.release()

    def to_receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        return mx.zeros(shape, dtype)

    def receive(self, expected: mx.array) -> mx.array:
        self.ready.acquire()
        array = self.sent.popleft()
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype), "all later messages would be shifted"
        return array


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_message_arrives_as_it_was_announced(dtype: mx.Dtype) -> None:
    messages = Messages(Wire())  # type: ignore[arg-type]
    array = mx.random.normal((2, 5, 8)).astype(dtype)
    messages.send(1, Kind.HIDDEN, 3, 1, array)
    assert mx.array_equal(messages.receive(0, Kind.HIDDEN, 3, 1, (2, 5)), array).item()


@pytest.mark.parametrize(
    ("kind", "batch", "micro", "rows", "said"),
    [
        (Kind.GRADIENT, 3, 1, (2, 5), "gradient of batch 3, micro-batch 1, 2 x 5 x 8 was due"),
        (Kind.HIDDEN, 4, 1, (2, 5), "batch 4, micro-batch 1"),
        (Kind.HIDDEN, 3, 0, (2, 5), "micro-batch 0"),
        (Kind.HIDDEN, 3, 1, (2, 6), "2 x 6 x 8"),
    ],
)
def test_a_message_that_was_not_due_is_never_taken_for_another(
    kind: Kind, batch: int, micro: int, rows: tuple[int, int], said: str
) -> None:
    messages = Messages(Wire())  # type: ignore[arg-type]
    messages.send(1, Kind.HIDDEN, 3, 1, mx.zeros((2, 5, 8)))
    with pytest.raises(GroupError, match="rank 0 sent hidden of batch 3, micro-batch 1, 2 x 5 x 8") as caught:
        messages.receive(0, kind, batch, micro, rows)
    assert said in str(caught.value)


class Four(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    def __init__(self, own: list[int]) -> None:
        super().__init__()
        for number_ in own:
            setattr(self, f"p{number_}", mx.arange(3 + number_).astype(mx.float32))


def parts_of(job: Job, division: list[list[int]]) -> list[Part]:
    """Four parameters over so many ranks; one update each."""
    ranks = {number_: tuple(rank for rank, own in enumerate(division) if number_ in own) for number_ in range(4)}
    held = [Held(f"p{number_}", (3 + number_,), mx.float32, ranks[number_]) for number_ in range(4)]

    def one(collective: Collective) -> Part:
        own = division[collective.rank]
        part = Part(job, Four(own), held, collective)
        part.add({f"p{number_}": mx.full((3 + number_,), 1.0 + collective.rank) for number_ in own})
        assert part.exchange([2.0]) == [2.0 * len(division)]
        part.apply(4.0)
        return part

    return together(len(division), one)


def test_a_state_in_parts_is_picked_up_by_any_number_of_ranks(tiny: Tiny, tmp_path: Path) -> None:
    job = job_of(tiny, tmp_path, optimizer="adamw")
    before: list[State] = [part.state() for part in parts_of(job, [[0, 1], [1, 2, 3]])]
    assert mx.array_equal(before[0]["weights"]["p1"], before[1]["weights"]["p1"]).item(), (
        "what both hold stays the same"
    )
    for division in ([[0, 1, 2, 3]], [[3], [0, 2], [1]], [[0], [1, 2, 3]]):
        for part in parts_of(job, division):
            for number_, state in enumerate(before):
                part.restore(state, number_, len(before))
            for group, arrays in part.state().items():
                for name, value in arrays.items():
                    theirs = next(state[group][name] for state in before if name in state[group])
                    assert mx.array_equal(value, theirs).item(), name


def test_parts_that_are_not_all_of_it_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    job = job_of(tiny, tmp_path)
    left, right = (part.state() for part in parts_of(job, [[0, 1], [2, 3]]))
    (alone,) = parts_of(job, [[0, 1, 2, 3]])
    untouched = alone.state()
    with pytest.raises(ValueError, match="only in the weights of this job"):
        for number_, state in enumerate((left, left)):
            alone.restore(state, number_, 2)
    assert all(
        mx.array_equal(value, untouched[group][name]).item()
        for group, arrays in alone.state().items()
        for name, value in arrays.items()
    )
    alone.restore(right, 0, 2)
    alone.restore(left, 1, 2)
    mine, _ = parts_of(job, [[0, 1], [2, 3]])
    assert mine.fits(left) and not mine.fits(right)
    with pytest.raises(ValueError, match="weights"):
        mine.restore(right, 0, 1)


def test_what_is_written_one_after_the_other_is_what_mlx_reads(tmp_path: Path) -> None:
    arrays = {
        "a": mx.random.normal((3, 5)),
        "b": mx.random.normal((7,)).astype(mx.bfloat16),
        "c": mx.arange(6, dtype=mx.uint32).reshape(2, 3).T,
        "d": mx.array(2.5),
        "e": mx.zeros((0, 4)),
    }
    path = tmp_path / "x.safetensors"
    weights = Weights.of(arrays)
    write_safetensors(path, weights.entries, weights.arrays)
    found = mx.load(str(path))
    assert isinstance(found, dict) and found.keys() == arrays.keys()
    assert all(
        (found[name].dtype, found[name].shape) == (value.dtype, value.shape) and mx.array_equal(found[name], value)
        for name, value in arrays.items()
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
    broken = Weights(weights.entries, iter([arrays["a"]]))
    with pytest.raises((StopIteration, RuntimeError)):
        write_safetensors(path, broken.entries, broken.arrays)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"], "nothing half written is left"
    assert np.array_equal(np.asarray(mx.load(str(path))["a"]), np.asarray(arrays["a"]))  # type: ignore[call-overload]


def test_other_weights_have_another_checksum_without_being_loaded(tiny: Tiny, tmp_path: Path) -> None:
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    same = files_checksum(job_of(tiny, tmp_path, model=str(other)))
    assert same == files_checksum(job_of(tiny, tmp_path))
    write_weights(other, json.loads((other / "config.json").read_text()), seed=99)
    assert files_checksum(job_of(tiny, tmp_path, model=str(other))) != same
