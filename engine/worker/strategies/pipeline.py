"""Strategy "pipeline": every rank holds contiguous layers, and passes each micro-batch on to the next one (1F1B).

The first rank has the embeddings, the last one the norm and the head; embeddings that are the head as well are on both,
and what is trained of them gets the sum of both gradients. All ranks read the whole of each global batch.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..arrays import number
from ..collective import Collective
from ..data import Batch, Split
from ..feed import Feed
from ..job import Job, JobError
from ..layers import Split as Layers
from ..layers import check_split
from ..reporting import Reporter
from ..sampler import Indices
from .divided import Divided
from .messages import Kind, Messages
from .parts import Held
from .passes import Rows, forward, forward_backward, like_output
from .sections import Section, check
from .stages import Step, micro_batches, schedule
from .strategy import Share


@dataclass
class _Micro:
    """A micro-batch on its way through this stage."""

    rows: Rows
    hidden: mx.array | None = None
    output: mx.array | None = None
    cotangent: mx.array | None = None
    """Of the output; until it has come, it must not be evaluated."""
    gradients: dict[str, mx.array] | None = None
    below: mx.array | None = None
    """The gradient of `hidden`."""


class Pipeline(Divided):
    """One rank's stage (a Strategy)."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        train: Split,
        *,
        collective: Collective,
        layers: Layers,
        reporter: Reporter,
    ) -> None:
        """`model` is whole and has not been evaluated: what is on other ranks never is. Raises JobError."""
        check(model, "pipeline")
        rank, stages = collective.rank, collective.size
        if stages < 2:
            raise JobError('[job] strategy = "pipeline" needs at least two ranks')
        try:
            check_split(layers, len(model.layers), stages)
        except ValueError as error:
            raise JobError(f"[job] layer_split: {error}") from error
        # Before anything is loaded: a batch that cannot be is told at once.
        feed = Feed(train, job, [1.0], 0, reporter)
        sections = [
            Section(model, start, end, first=stage == 0, last=stage == stages - 1)
            for stage, (start, end) in enumerate(layers)
        ]
        self._section = sections[rank]
        mx.eval(self._section.model.parameters())
        trained = _held([dict(tree_flatten(section.model.trainable_parameters())) for section in sections])
        super().__init__(
            job,
            self._section.model,
            feed,
            collective=collective,
            trained=trained,
            whole=_held([dict(tree_flatten(section.model.parameters())) for section in sections]),
        )
        self._messages = Messages(collective)
        self._first_trained = min(parameter.ranks[0] for parameter in trained)
        self._batches = 0

    def accumulate(self, position: int) -> Share:
        begun = time.perf_counter()
        batch = self.feed.batch(position)
        ready, self._waited_s = time.perf_counter(), 0.0
        loss = self._run(batch, train=True)
        seconds = time.perf_counter() - ready
        tokens = batch.targets if self._section.last else 0
        return Share(loss, tokens, ready - begun, seconds - self._waited_s, self._waited_s)

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        batch = examples.batch(indices)
        loss = self._run(batch, train=False)
        return loss, batch.targets if self._section.last else 0

    def _run(self, batch: Batch, *, train: bool) -> float:
        """All of this stage's work on one global batch; the sum of cross-entropies on the last stage, else 0."""
        rank, stages = self._collective.rank, self._collective.size
        rows = len(batch.tokens)
        count = micro_batches(rows, stages)
        edges = [rows * number // count for number in range(count + 1)]
        half = train and self._half
        pieces = [_Micro(Rows.of(batch, slice(start, end), half=half)) for start, end in itertools.pairwise(edges)]
        # Without anything to train, all go forward only.
        steps = schedule(rank, stages, count, self._first_trained if train else stages)
        learns = train and rank >= self._first_trained
        loss = 0.0
        for step in steps:
            if step.act == "forward":
                loss += self._forward(pieces[step.micro], learns=learns)
            elif step.act == "backward":
                self._backward(pieces[step.micro])
            else:
                begun = time.perf_counter()
                self._communicate(step, pieces[step.micro])
                self._waited_s += time.perf_counter() - begun
        self._batches += 1
        return loss

    def _forward(self, micro: _Micro, *, learns: bool) -> float:
        section, rows, hidden = self._section, micro.rows, micro.hidden
        if learns:
            if section.last:
                micro.cotangent = mx.array(1.0)
            else:
                micro.cotangent = self._messages.later(self._collective.rank + 1, like_output(section, rows, hidden))
            trained = dict(tree_flatten(self.model.trainable_parameters()))
            micro.output, micro.gradients, micro.below = forward_backward(
                section, trained, rows, hidden, micro.cotangent, below=self._collective.rank > self._first_trained
            )
        else:
            micro.output = forward(section, rows, hidden)
        mx.eval(micro.output)
        return number(micro.output) / rows.scale if section.last else 0.0

    def _backward(self, micro: _Micro) -> None:
        assert micro.gradients is not None
        gradients, micro.gradients = micro.gradients, None
        mx.eval(gradients, [] if micro.below is None else micro.below)
        self.add(gradients)
        micro.hidden = micro.output = micro.cotangent = None

    def _communicate(self, step: Step, micro: _Micro) -> None:
        rank, batch, messages = self._collective.rank, self._batches, self._messages
        match step.act:
            case "receive_forward":
                micro.hidden = messages.receive(rank - 1, Kind.HIDDEN, batch, step.micro, micro.rows.inputs)
            case "send_forward":
                assert micro.output is not None
                messages.send(rank + 1, Kind.HIDDEN, batch, step.micro, micro.output)
                micro.output = None
            case "receive_backward":
                assert micro.cotangent is not None
                messages.fetch(micro.cotangent, rank + 1, Kind.GRADIENT, batch, step.micro)
            case "send_backward":
                assert micro.below is not None
                messages.send(rank - 1, Kind.GRADIENT, batch, step.micro, micro.below)
                micro.below = None


def _held(stages: Sequence[Mapping[str, mx.array]]) -> list[Held]:
    """Every parameter of the `stages`, and which of them hold it."""
    every = {name: value for stage in reversed(stages) for name, value in stage.items()}
    ranks = {name: tuple(rank for rank, stage in enumerate(stages) if name in stage) for name in every}
    return [Held(name, value.shape, value.dtype, ranks[name]) for name, value in every.items()]
