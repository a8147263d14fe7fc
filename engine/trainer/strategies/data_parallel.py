"""Strategy "data": every rank holds the whole model and computes its share of each global batch.

An update equals the single machine's: gradients, losses and tokens are sums over the ranks, then divided. A single
rank's gradients stay lazy until their parameters are updated; those of several travel bucket by bucket, beside the
rest of the backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.exchange import bucket_elements
from engine.protocol.job import Job
from engine.trainer.collective import Collective, packed
from engine.trainer.gradient_wire import GradientWire, unscaled
from engine.trainer.model import compiles
from engine.trainer.optimizer import Updater
from engine.trainer.optimizer_state import StateForm
from engine.trainer.strategies.base import Strategy
from engine.trainer.strategies.loss import Rows, loss_sum
from engine.trainer.weights import WeightStream, floats, scalar
from engine.training.data import Batch, DataLoader, Split
from engine.training.sampler import Indices

_PIECE_ELEMENTS = 2**20
PIECE_S = 2.0
"""Longest time for which a validation keeps the device busy at once: macOS ends GPU work of several seconds."""


class Gradients:
    """The gradients of one update: sums, not means, over this rank's examples and over the ranks."""

    def __init__(
        self,
        model: nn.Module,
        wire: GradientWire | None = None,
        *,
        held: bool = False,
        summed: Callable[[mx.Dtype], mx.Dtype] = lambda _: mx.float32,
    ) -> None:
        """`wire`: to the other ranks, if any. `held`: without it, too, all gradients are evaluated before one is
        applied, for their norm. `summed`: the type of the ranks' sums of a parameter's gradients, by its own type."""
        self._wire = wire
        self._lazy = wire is None and not held
        trainable = dict(tree_flatten(model.trainable_parameters()))
        self._shapes = {name: value.shape for name, value in trainable.items()}
        self._buckets = _bucketed(trainable)
        self._summed = [summed(trainable[names[0]].dtype) for names in self._buckets]
        self._half = any(value.dtype == mx.float16 for value in trainable.values())
        state = [model.state, mx.random.state]
        compute = partial(_loss_and_gradients, model, self._shapes)
        self._forward_backward = partial(mx.compile, inputs=state, outputs=state)(compute)
        self._forward = partial(mx.compile, inputs=[model.state])(partial(loss_sum, model))
        self._own: list[mx.array] = []
        """This rank's sums of several micro-batches by bucket, float32."""
        self._sums: list[mx.array] = []
        """All ranks' sums of the update by bucket."""
        self._unevaluated: dict[str, mx.array] = {}
        """By parameter, instead of sums: those over `divided_by`, since a later division would copy each to float32."""
        self.divided_by = 1
        self._own_squares: list[mx.array] = []
        self._squares: list[mx.array] = []
        self._piece_rows: int | None = None
        """Rows of a validation that are computed at once; None: all of a batch."""

    def add(self, batch: Batch, *, last: bool = True, exact: bool = False) -> float:
        """The sum of cross-entropies over `batch`; its gradients are added to the update's. With its `last` batch, the
        sums over the ranks begin. `exact`: see GradientWire. Raises PeerLost."""
        only = last and not self._own
        if only and self._lazy:
            self.divided_by = max(batch.targets, 1)
            loss, self._unevaluated = self._forward_backward(*Rows.of(batch, mean=True).inputs)
            mx.eval(loss)
            return scalar(loss)
        rows = Rows.of(batch, half=self._half)
        scale = mx.array(rows.scale) if self._half else None
        loss, gradients = self._forward_backward(*rows.inputs)
        scales = None
        if self._wire and only and self._half:
            scales = self._wire.collective.gather_arrays(mx.array(rows.scale))
        before, self._own = self._own[::-1], []
        self._own_squares = []
        for number, names in enumerate(self._buckets):
            bucket = mx.concatenate([gradients.pop(name).reshape(-1) for name in names])
            if not only or (self._half and self._wire is None):
                bucket = unscaled(bucket, scale)
            if before:
                bucket = bucket + before.pop()
            if last:
                self._send(number, bucket, loss, scales, exact=exact)
            else:
                mx.eval(bucket, loss)
                self._own.append(bucket)
        return scalar(loss)

    def _send(self, number: int, bucket: mx.array, loss: mx.array, scales: mx.array | None, *, exact: bool) -> None:
        """Evaluate the bucket, beside the exchange of the one before, and begin its own."""
        square = _square(bucket)
        mx.eval(bucket, square, loss)
        if self._wire is None:
            self._sums.append(bucket)
            self._squares.append(square)
            return
        self._own_squares.append(square if scales is None else square / mx.square(scales[self._wire.collective.rank]))
        self.finish()
        self._wire.start(number, bucket, scales, exact=exact)

    def finish(self) -> None:
        """Wait for the sum under way, if any. Raises PeerLost."""
        total = self._wire.finish() if self._wire is not None else None
        if total is not None:
            square, kept = _square(total), total.astype(self._summed[len(self._sums)])
            mx.eval(square, kept)
            self._sums.append(kept)
            self._squares.append(square)

    @property
    def nbytes(self) -> int:
        """The bytes of the sums that are held."""
        return sum(bucket.nbytes for bucket in (*self._own, *self._sums))

    def own_norm(self, divisor: float) -> float:
        """The norm of this rank's own sums of the last update over `divisor`, where there are several ranks."""
        return _norm(self._own_squares, divisor)

    def apply(self, updater: Updater, divisor: float) -> float:
        """One step with the sums over `divisor`, each dropped when it has been applied; their norm before clipping."""
        norm = None if self._unevaluated else _norm(self._squares, divisor)
        try:
            return updater.update(self.pieces(), divisor / self.divided_by, norm)
        finally:
            self.clear()

    def clear(self) -> None:
        """Begin another update."""
        self._own, self._sums, self._unevaluated, self._squares, self.divided_by = [], [], {}, [], 1

    def pieces(self) -> Iterator[dict[str, mx.array]]:
        """The sums by parameter, or lazy means, bucket by bucket; no longer held here afterwards."""
        lazy = bool(self._unevaluated)
        self._sums.reverse()
        for names in self._buckets:
            if lazy:
                yield {name: self._unevaluated.pop(name) for name in names}
            else:
                yield self._unpacked(names, self._sums.pop())

    def loss(self, batch: Batch) -> float:
        return scalar(self._forward(*Rows.of(batch).inputs))

    def share_loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """The sum of cross-entropies over these `examples`, perhaps none, and the number of their targets, in pieces:
        after one that took longer than PIECE_S all are half as large."""
        loss, targets, start = 0.0, 0, 0
        while start < len(indices):
            rows = min(self._piece_rows or len(indices), len(indices) - start)
            batch, started = examples.batch(indices[start : start + rows]), time.perf_counter()
            loss, targets, start = loss + self.loss(batch), targets + batch.targets, start + rows
            if time.perf_counter() - started > PIECE_S and rows > 1:
                self._piece_rows = rows // 2
        return loss, targets

    def _unpacked(self, names: list[str], bucket: mx.array) -> dict[str, mx.array]:
        gradients, start = {}, 0
        for name in names:
            end = start + math.prod(self._shapes[name])
            gradients[name] = bucket[start:end].reshape(self._shapes[name])
            start = end
        return gradients


class WholeStep:
    """One rank's forward pass, backward pass and update, compiled as one: the host waits for the device once a step."""

    def __init__(self, model: nn.Module, updater: Updater) -> None:
        self._model = model
        self._updater = updater
        self._trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
        self._state = [model.state, mx.random.state, *updater.arrays]
        self._step = partial(mx.compile, inputs=self._state, outputs=self._state)(self._compute)

    @classmethod
    def of(cls, job: Job, model: nn.Module, updater: Updater, ranks: int) -> WholeStep | None:
        """None where a step is done in parts."""
        whole = ranks == 1 and job.grad_accumulation_steps == 1 and compiles(job) and not updater.needs_slices
        return cls(model, updater) if whole else None

    def run(self, batch: Batch) -> tuple[float, float]:
        """One step with the mean gradient over `batch`: the sum of cross-entropies, and the norm before clipping."""
        loss, square = self._step(*Rows.of(batch, mean=True).inputs)
        mx.eval(loss, square, self._state)
        return scalar(loss), math.sqrt(scalar(square))

    def _compute(self, tokens: mx.array, bounds: mx.array, scale: mx.array) -> Any:
        loss, gradients = _loss_and_gradients(self._model, self._trained, tokens, bounds, scale)
        return loss, self._updater.apply(gradients)


def _loss_and_gradients(
    model: nn.Module, trained: Collection[str], tokens: mx.array, bounds: mx.array, scale: mx.array
) -> Any:
    """The sum of cross-entropies, and the gradients of `scale` times that sum by parameter."""
    loss, gradients = nn.value_and_grad(model, loss_sum)(model, tokens, bounds, scale, trained=trained)
    return loss / scale, dict(tree_flatten(gradients))


def _bucketed(trainable: dict[str, mx.array]) -> list[list[str]]:
    """The parameters in buckets of one type, in the order in which a backward pass has their gradients; each bucket in
    the model's order, in which MLX evaluates several layers at once with the fewest recomputed at a time."""
    backwards = list(reversed(trainable))
    room = bucket_elements(sum(value.size for value in trainable.values()))
    kinds = {name: str(value.dtype) for name, value in trainable.items()}
    buckets = [
        bucket
        for kind in sorted(set(kinds.values()))
        for bucket in packed([n for n in backwards if kinds[n] == kind], lambda name: trainable[name].size, room)
    ]
    return [names[::-1] for names in sorted(buckets, key=lambda names: backwards.index(names[-1]))]


def _square(flat: mx.array) -> mx.array:
    """The sum of the squares, float32, in pieces: the square of a whole bucket would take another bucket."""
    starts = range(0, flat.size, _PIECE_ELEMENTS)
    pieces = (mx.square(flat[start : start + _PIECE_ELEMENTS].astype(mx.float32)).sum() for start in starts)
    return sum(pieces, start=mx.array(0.0))


def _norm(squares: list[mx.array], divisor: float) -> float:
    return scalar(mx.sqrt(mx.stack(squares).sum())) / divisor


class DataParallel(Strategy):
    replicated = True

    def __init__(
        self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective, ranks: int | None = None
    ) -> None:
        """`ranks`: gradients are kept as those of so many are; None: the collective's."""
        super().__init__(job, model, loader, collective)
        ranks = ranks or collective.size
        self._exchanges = ranks > 1
        wire = GradientWire(collective, job.wire) if self._exchanges else None
        self.gradients = Gradients(model, wire, held=job.max_grad_norm is not None, summed=StateForm.of(job).summed)
        self._whole_step = WholeStep.of(job, model, self.updater, ranks)
        self._batch: Batch | None = None
        """The batch of the whole step under way."""
        self._norm = 0.0
        """The last update's."""

    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        if self._whole_step is not None:
            self._batch, self.late_loss = batch, None
            return 0.0, batch.targets
        return self.gradients.add(batch, last=last, exact=exact), batch.targets

    def local_norm(self, tokens: int) -> float | None:
        if not tokens:
            return None
        return self.gradients.own_norm(tokens) if self._exchanges else self._norm

    def exchange(self, counters: list[float]) -> list[float]:
        self.gradients.finish()
        if self.collective.size == 1:
            return counters
        # float32 counts up to 16 million tokens per iteration exactly.
        return floats(self.collective.all_sum(mx.array(counters)))

    def apply(self, tokens: float) -> float | None:
        if not tokens:
            self.gradients.clear()
            return None
        if self._whole_step is not None and self._batch is not None:
            self.late_loss, self._norm = self._whole_step.run(self._batch)
        else:
            self._norm = self.gradients.apply(self.updater, tokens)
        return self._norm

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        return self.gradients.share_loss(examples, self.loader.validation_share(examples, indices))

    def trained_weights(self) -> WeightStream:
        return WeightStream.of(dict(tree_flatten(self.model.trainable_parameters())))

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        if (part, parts) != (0, 1):
            raise ValueError(f"it is part {part} of {parts}, and this strategy's state has only one")
        self.updater.restore(state)
