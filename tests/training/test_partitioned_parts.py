"""Components of the partitioned strategies: repeated dropout, message headers, parts of a state."""

from __future__ import annotations

import json
import shutil
import threading
from collections import deque
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.events import EventWriter
from engine.protocol.job import Job, JobError
from engine.protocol.partition import layer_split
from engine.trainer.collective import Collective
from engine.trainer.model import load_model, row_format
from engine.trainer.strategies.base import PartitionedStrategy, PlacedParameter
from engine.trainer.strategies.pipeline import MessageKind, MessageTag, Pipeline, StageMessages
from engine.trainer.strategies.sharded import Sharded
from engine.trainer.weights import State, WeightStream, scalar, write_safetensors
from engine.training.data import Batch, DataLoader, Split, files_checksum
from engine.training.reporting import GroupError, Reporter
from engine.training.sampler import Indices
from tests.training.tiny import Tiny, make_job, write_weights
from tests.training.together import together


@pytest.fixture(autouse=True)
def as_on_the_cpu() -> Any:
    """As the trainer does on the CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def test_a_pipeline_of_one_rank_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path, strategy="pipeline")
    model, tokenizer = load_model(job)
    loader = DataLoader(
        Split(job, "train", row_format(job, tokenizer), lambda _: None),
        job,
        [1.0],
        0,
        Reporter(EventWriter(None, 0, 1)),
    )
    with pytest.raises(JobError, match="needs at least two ranks"):
        Pipeline(job, model, loader, Collective("ring", 1, 0), layer_split(len(model.layers), [1]))


def test_the_gradient_has_the_same_dropout_as_the_loss(tiny: Tiny, tmp_path: Path) -> None:
    """A section runs forward twice: the loss along the gradient must rise by its norm, with the same seed."""
    lora = {"rank": 4, "scale": 4.0, "dropout": 0.4}
    job = make_job(tiny, tmp_path, strategy="sharded", fine_tune_type="lora", num_layers=2, lora_parameters=lora)
    model, tokenizer = load_model(job)
    train = Split(job, "train", row_format(job, tokenizer), lambda _: None)
    reporter = Reporter(EventWriter(None, 0, 1))
    training = Sharded(job, model, DataLoader(train, job, [1.0], 0, reporter), Collective("ring", 1, 0))
    training.model.train()
    own = dict(tree_flatten(training.model.trainable_parameters()))
    mx.random.seed(1)
    # lora_b starts at zero, where dropout would change nothing.
    own = {name: value + 0.1 * mx.random.normal(value.shape) for name, value in own.items()}

    def loss(parameters: dict[str, mx.array], seed: int) -> tuple[float, dict[str, mx.array]]:
        training.model.update(tree_unflatten(list(parameters.items())))
        training.sums = {}
        mx.random.seed(seed)
        share = training.accumulate(0, last=True)
        return share.loss_sum, dict(training.sums)

    middle, gradient = loss(own, 7)
    assert loss(own, 8)[0] != middle, "there is dropout"
    norm = scalar(mx.sqrt(sum((mx.square(value).sum() for value in gradient.values()), start=mx.array(0.0))))
    step = 0.02
    ends = [
        loss({name: value + sign * step / norm * gradient[name] for name, value in own.items()}, 7)[0]
        for sign in (1, -1)
    ]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(norm, rel=0.02)


class Loopback:
    """A collective's messages, between two threads."""

    def __init__(self) -> None:
        self.sent: deque[mx.array] = deque()
        self.ready = threading.Semaphore(0)

    def send(self, array: mx.array, rank: int) -> None:
        self.start_send(array, rank)
        self.finish()

    def start_send(self, array: mx.array, rank: int) -> None:
        self.sent.append(array)

    def finish(self) -> None:
        self.ready.release()

    def recv_lazy(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        return mx.zeros(shape, dtype)

    def receive(self, expected: mx.array) -> mx.array:
        self.ready.acquire()
        array = self.sent.popleft()
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype), "all later messages would be shifted"
        return array


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_message_arrives_as_it_was_sent(dtype: mx.Dtype) -> None:
    messages = StageMessages(Loopback())  # type: ignore[arg-type]
    array = mx.random.normal((2, 5, 8)).astype(dtype)
    tag = MessageTag(MessageKind.HIDDEN, 3, 1)
    messages.send(1, tag, array)
    messages.settle()
    assert mx.array_equal(messages.receive(0, tag, (2, 5)), array).item()


@pytest.mark.parametrize(
    ("tag", "rows", "message"),
    [
        (MessageTag(MessageKind.GRADIENT, 3, 1), (2, 5), "gradient of batch 3, micro-batch 1, 2 x 5 x 8 was expected"),
        (MessageTag(MessageKind.HIDDEN, 4, 1), (2, 5), "batch 4, micro-batch 1"),
        (MessageTag(MessageKind.HIDDEN, 3, 0), (2, 5), "micro-batch 0"),
        (MessageTag(MessageKind.HIDDEN, 3, 1), (2, 6), "2 x 6 x 8"),
    ],
)
def test_an_unexpected_message_is_never_taken_for_another(tag: MessageTag, rows: tuple[int, int], message: str) -> None:
    messages = StageMessages(Loopback())  # type: ignore[arg-type]
    messages.send(1, MessageTag(MessageKind.HIDDEN, 3, 1), mx.zeros((2, 5, 8)))
    with pytest.raises(GroupError, match="rank 0 sent hidden of batch 3, micro-batch 1, 2 x 5 x 8") as caught:
        messages.receive(0, tag, rows)
    assert message in str(caught.value)


class Four(nn.Module):  # type: ignore[misc]  # mlx.nn has no types
    def __init__(self, own: list[int]) -> None:
        super().__init__()
        for index in own:
            setattr(self, f"p{index}", mx.arange(3 + index).astype(mx.float32))


class Part(PartitionedStrategy):
    """Everything but the passes over a model."""

    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        raise NotImplementedError

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        raise NotImplementedError

    def logits(self, tokens: mx.array) -> mx.array | None:
        raise NotImplementedError


def parts_of(job: Job, division: list[list[int]], dtype: mx.Dtype = mx.float32) -> list[Part]:
    """Four parameters over so many ranks; one update each."""
    ranks = {index: tuple(rank for rank, own in enumerate(division) if index in own) for index in range(4)}
    held = [PlacedParameter((3 + index,), dtype, f"p{index}", ranks[index]) for index in range(4)]

    def one(collective: Collective) -> Part:
        own = division[collective.rank]
        model = Four(own)
        model.set_dtype(dtype)
        part = Part(job, model, cast("DataLoader", None), collective, held)
        part.add({f"p{index}": mx.full((3 + index,), 1.0 + collective.rank, dtype) for index in own})
        assert part.exchange([2.0]) == [2.0 * len(division)]
        part.apply(4.0)
        return part

    return together(len(division), one)


def test_a_partitioned_state_is_restored_by_any_number_of_ranks(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path, optimizer="adamw")
    before: list[State] = [part.state() for part in parts_of(job, [[0, 1], [1, 2, 3]])]
    assert mx.array_equal(before[0]["weights"]["p1"], before[1]["weights"]["p1"]).item(), (
        "a parameter that both hold stays the same"
    )
    for division in ([[0, 1, 2, 3]], [[3], [0, 2], [1]], [[0], [1, 2, 3]]):
        for part in parts_of(job, division):
            for index, state in enumerate(before):
                part.restore(state, index, len(before))
            for group, arrays in part.state().items():
                for name, value in arrays.items():
                    theirs = next(state[group][name] for state in before if name in state[group])
                    assert mx.array_equal(value, theirs).item(), name


def test_parts_of_another_form_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """Not restored without the bits of a compensation."""
    kahan, stochastic = (make_job(tiny, tmp_path, optimizer_precision=form) for form in ("kahan", "stochastic"))
    states = [part.state() for part in parts_of(kahan, [[0, 1], [2, 3]], mx.bfloat16)]
    (alone,) = parts_of(stochastic, [[0, 1, 2, 3]], mx.bfloat16)
    with pytest.raises(ValueError, match="another optimizer_precision"):
        for index, state in enumerate(states):
            alone.restore(state, index, len(states))


def test_an_incomplete_set_of_parts_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    job = make_job(tiny, tmp_path)
    left, right = (part.state() for part in parts_of(job, [[0, 1], [2, 3]]))
    (alone,) = parts_of(job, [[0, 1, 2, 3]])
    untouched = alone.state()
    with pytest.raises(ValueError, match="only in this job's weights"):
        for index, state in enumerate((left, left)):
            alone.restore(state, index, 2)
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


def test_mlx_reads_what_is_written_tensor_by_tensor(tmp_path: Path) -> None:
    arrays = {
        "a": mx.random.normal((3, 5)),
        "b": mx.random.normal((7,)).astype(mx.bfloat16),
        "c": mx.arange(6, dtype=mx.uint32).reshape(2, 3).T,
        "d": mx.array(2.5),
        "e": mx.zeros((0, 4)),
    }
    path = tmp_path / "x.safetensors"
    weights = WeightStream.of(arrays)
    write_safetensors(path, weights.entries, weights.arrays)
    found = mx.load(str(path))
    assert isinstance(found, dict) and found.keys() == arrays.keys()
    assert all(
        (found[name].dtype, found[name].shape) == (value.dtype, value.shape) and mx.array_equal(found[name], value)
        for name, value in arrays.items()
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"]
    broken = WeightStream(weights.entries, iter([arrays["a"]]))
    with pytest.raises((StopIteration, RuntimeError)):
        write_safetensors(path, broken.entries, broken.arrays)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.safetensors"], "no partial file is left"
    assert np.array_equal(np.asarray(mx.load(str(path))["a"]), np.asarray(arrays["a"]))  # type: ignore[call-overload]


def test_other_weights_have_another_file_checksum(tiny: Tiny, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny.model, other)
    same = files_checksum(make_job(tiny, tmp_path, model=str(other)), adapter=True)
    assert same == files_checksum(make_job(tiny, tmp_path), adapter=True)
    write_weights(other, json.loads((other / "config.json").read_text()), seed=99)
    assert files_checksum(make_job(tiny, tmp_path, model=str(other)), adapter=True) != same
