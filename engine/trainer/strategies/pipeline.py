"""Strategy "pipeline": every rank holds contiguous layers, and sends each micro-batch on to the next rank (1F1B).

The first rank has the embeddings, the last one the norm and the head; tied embeddings are on both, and get the sum of
both gradients. All ranks read the whole of each global batch. A header before each array sent between stages describes
it: a message of an unexpected size would otherwise shift all later ones, silently.

An array is sent beside the computations that follow, until the next message of this rank: the order of the messages is
that of the schedule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, cast

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job, JobError
from engine.protocol.partition import LayerSplit, Step, check_split, micro_batches, schedule
from engine.trainer.collective import Collective
from engine.trainer.model import recompute_layers
from engine.trainer.strategies.base import PartitionedStrategy, PlacedParameter
from engine.trainer.strategies.loss import Rows
from engine.trainer.strategies.sections import Section, check_splittable
from engine.trainer.weights import scalar
from engine.training.data import Batch, DataLoader, Split
from engine.training.reporting import GroupError
from engine.training.sampler import Indices

_MAGIC = 0x464C4447
_HEADER_LENGTH = 8
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)


class MessageKind(IntEnum):
    HIDDEN = 1
    """A stage's output, for the next one."""
    GRADIENT = 2
    """Gradient of the loss with respect to that output, for the previous stage."""


class MessageTag(NamedTuple):
    kind: MessageKind
    batch: int
    """Counted from the start of the process, modulo 2^31."""
    micro: int
    """The micro-batch, from 0."""


class StageMessages:
    """Messages of one rank to and from its neighbours. Each call of one side needs the other side's."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._sending = False

    def send(self, rank: int, tag: MessageTag, array: mx.array) -> None:
        """Send `array` [rows, length, width]; it is on its way until the next call. Raises PeerLost."""
        self.settle()
        mx.eval(array)
        header = [_MAGIC, *tag, _DTYPES.index(array.dtype), *array.shape]
        self._collective.start_send(mx.array(header, dtype=mx.int32), rank)
        self._collective.finish()
        self._collective.start_send(array, rank)
        self._sending = True

    def settle(self) -> None:
        """Wait until the last array is sent. Raises PeerLost."""
        if self._sending:
            self._sending = False
            self._collective.finish()

    def receive(self, rank: int, tag: MessageTag, rows: tuple[int, int]) -> mx.array:
        """The array, evaluated; `rows` is its rows and length. Raises GroupError, PeerLost."""
        header = self._header(rank)
        dtype, width = header[4], header[7]
        self._check(rank, header, [_MAGIC, *tag, dtype if 0 <= dtype < len(_DTYPES) else 0, *rows, width])
        return self._collective.receive(self._collective.recv_lazy((*rows, width), _DTYPES[dtype], rank))

    def recv_into(self, later: mx.array, rank: int, tag: MessageTag) -> None:
        """Evaluate `later`, of the collective's recv_lazy. Raises GroupError, PeerLost."""
        self._check(rank, self._header(rank), [_MAGIC, *tag, _DTYPES.index(later.dtype), *later.shape])
        self._collective.receive(later)

    def _header(self, rank: int) -> list[int]:
        self.settle()
        header = self._collective.receive(self._collective.recv_lazy((_HEADER_LENGTH,), mx.int32, rank))
        return cast("list[int]", header.tolist())

    def _check(self, rank: int, header: list[int], expected: list[int]) -> None:
        if header != expected:
            raise GroupError(
                f"rank {rank} sent {_describe_header(header)}, but {_describe_header(expected)} was expected: "
                "the ranks are no longer in step"
            )


def _describe_header(header: list[int]) -> str:
    if header[0] != _MAGIC:
        return f"no header ({', '.join(map(str, header))})"
    names = {kind.value: kind.name.lower() for kind in MessageKind}
    shape = " x ".join(map(str, header[5:8]))
    return f"{names.get(header[1], 'unknown')} of batch {header[2]}, micro-batch {header[3]}, {shape}"


@dataclass
class _MicroBatch:
    rows: Rows
    hidden: mx.array | None = None
    output: mx.array | None = None
    cotangent: mx.array | None = None
    """Gradient with respect to the output; not to be evaluated until it has arrived."""
    gradients: dict[str, mx.array] | None = None
    below: mx.array | None = None


class Pipeline(PartitionedStrategy):
    def __init__(
        self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective, layers: LayerSplit
    ) -> None:
        """`model`: whole, not evaluated (other ranks' layers never are). `loader`: whole batches. Raises JobError."""
        check_splittable(model, "pipeline")
        rank, stages = collective.rank, collective.size
        if stages < 2:
            raise JobError('[job] strategy = "pipeline" needs at least two ranks')
        try:
            check_split(layers, len(model.layers), stages)
        except ValueError as error:
            raise JobError(f"[job] layer_split: {error}") from error
        sections = [
            Section(model, start, end, first=stage == 0, last=stage == stages - 1)
            for stage, (start, end) in enumerate(layers)
        ]
        recompute_layers(model.layers[slice(*layers[rank])], job.grad_checkpoint)
        self._section = sections[rank]
        mx.eval(self._section.model.parameters())
        super().__init__(job, self._section.model, loader, collective, _placed(sections))
        self._messages = StageMessages(collective)
        self._first_trained = min((parameter.ranks[0] for parameter in self._trained), default=stages)
        self._batches = 0

    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        return self._run(batch, train=True)

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        return self._run(examples.batch(indices), train=False)

    def logits(self, tokens: mx.array) -> mx.array | None:
        """On the last stage."""
        section, rank = self._section, self.collective.rank
        tag = MessageTag(MessageKind.HIDDEN, self._batches % 2**31, 0)
        self._batches += 1
        rows, length = tokens.shape
        output = section(tokens, None if section.first else self._messages.receive(rank - 1, tag, (rows, length)))
        if section.last:
            return output
        self._messages.send(rank + 1, tag, output)
        self._messages.settle()
        return None

    def _run(self, batch: Batch, *, train: bool) -> tuple[float, int]:
        """This stage's work on a global batch; the sum of cross-entropies and the targets, 0 but on the last stage."""
        rank, stages = self.collective.rank, self.collective.size
        rows = len(batch.tokens)
        count = micro_batches(rows, stages)
        edges = [rows * number // count for number in range(count + 1)]
        half = train and self._half
        pieces = [_MicroBatch(Rows.of(batch, slice(start, end), half=half)) for start, end in itertools.pairwise(edges)]
        # Without training, all stages only go forward.
        steps = schedule(rank, stages, count, self._first_trained if train else stages)
        learns = train and rank >= self._first_trained
        loss = 0.0
        for step in steps:
            if step.act == "forward":
                loss += self._forward(pieces[step.micro], learns=learns)
            elif step.act == "backward":
                self._backward(pieces[step.micro])
            else:
                self._communicate(step, pieces[step.micro])
        self._messages.settle()
        self._batches += 1
        return loss, batch.targets if self._section.last else 0

    def _forward(self, micro: _MicroBatch, *, learns: bool) -> float:
        section, rows, hidden = self._section, micro.rows, micro.hidden
        if learns:
            if section.last:
                micro.cotangent = mx.array(1.0)
            else:
                # Every section returns the shape that it gets; only the first one's embeddings know the width.
                output = section.forward(rows, None) if hidden is None else hidden
                micro.cotangent = self.collective.recv_lazy(output.shape, output.dtype, self.collective.rank + 1)
            trained = dict(tree_flatten(self.model.trainable_parameters()))
            micro.output, micro.gradients, micro.below = section.forward_backward(
                trained, rows, hidden, micro.cotangent, below=self.collective.rank > self._first_trained
            )
        else:
            micro.output = section.forward(rows, hidden)
        mx.eval(micro.output)
        return scalar(micro.output) / rows.scale if section.last else 0.0

    def _backward(self, micro: _MicroBatch) -> None:
        assert micro.gradients is not None
        gradients, micro.gradients = micro.gradients, None
        # What is evaluated once may be freed on the way.
        micro.hidden = micro.output = micro.cotangent = None
        self.add(gradients, micro.below)

    def _communicate(self, step: Step, micro: _MicroBatch) -> None:
        rank, messages = self.collective.rank, self._messages
        hidden, gradient = (MessageTag(kind, self._batches % 2**31, step.micro) for kind in MessageKind)
        match step.act:
            case "receive_forward":
                rows, length = micro.rows.tokens.shape
                micro.hidden = messages.receive(rank - 1, hidden, (rows, length - 1))
            case "send_forward":
                assert micro.output is not None
                messages.send(rank + 1, hidden, micro.output)
                micro.output = None
            case "receive_backward":
                assert micro.cotangent is not None
                messages.recv_into(micro.cotangent, rank + 1, gradient)
            case "send_backward":
                assert micro.below is not None
                messages.send(rank - 1, gradient, micro.below)
                micro.below = None


def _placed(sections: Sequence[Section]) -> list[PlacedParameter]:
    """Every parameter of the stages, with those that hold it."""
    stages = [dict(tree_flatten(section.model.parameters())) for section in sections]
    trained = {name for section in sections for name, _ in tree_flatten(section.model.trainable_parameters())}
    every = {name: value for stage in reversed(stages) for name, value in stage.items()}
    ranks = {name: tuple(rank for rank, stage in enumerate(stages) if name in stage) for name in every}
    return [
        PlacedParameter(value.shape, value.dtype, name, ranks[name], name in trained) for name, value in every.items()
    ]
