"""Strategy "local": every rank trains the whole model by itself on its share of each global batch, and from time to
time the ranks average how far their weights have moved. Another algorithm than one optimizer over all: for slow links.

After `local_steps` updates, and before each validation and save, rank 0 averages the ranks' changes of the trained
weights since the last averaging, weighted by the tokens they were trained on, and every rank takes one outer step with
them, from the weights of the last averaging: DiLoCo (Douillard et al., 2023), with changes in 4 bits as in Streaming
DiLoCo (Douillard et al., 2025). Each rank keeps its own optimizer state."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from operator import add
from struct import calcsize, pack, unpack_from

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.exchange import AVERAGING_PIECE, AveragingSchedule
from engine.protocol.job import Job
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.collective import TensorSpec, all_gather_object, broadcast_arrays, describe, packed
from engine.trainer.elastic_group import ElasticGroup, LeftOut, raw, read_array
from engine.trainer.gradient_wire import INT4, INT8
from engine.trainer.optimizer_state import StateForm
from engine.trainer.strategies.base import LocalStep
from engine.trainer.strategies.data_parallel import DataParallel
from engine.trainer.weights import State, WeightStream, floats, scalar
from engine.training.data import Batch, DataLoader

_GROUP = "averaging"
"""In the state: by parameter the weight after the last averaging and the outer momentum, and `_TOKENS`."""
_ANCHOR, _MOMENTUM = ":anchor", ":v"
_TOKENS = ":tokens"
"""The targets that this rank was trained on since the last averaging."""
_WEIGHT = "!d"
QUANTIZATIONS = {"auto": INT4, "int8": INT8}
"""By `wire`, as engine.protocol.exchange.averaging plans it; others send float32."""


class LocalSteps(DataParallel):
    replicated = False
    any_part = True

    def __init__(self, job: Job, model: nn.Module, loader: DataLoader, group: ElasticGroup) -> None:
        super().__init__(job, model, loader, group, ranks=1)
        # The step's own loss is summed with those of other ranks before it is done.
        self._whole_step = None
        self._group = group
        evals = job.steps_per_eval if job.val_batches else None
        self._schedule = AveragingSchedule(
            job.iters, job.grad_accumulation_steps, job.local_steps, job.save_every, steps_per_eval=evals
        )
        self._quantization = QUANTIZATIONS.get(job.wire)
        self._outer = optim.SGD(job.outer_learning_rate, job.outer_momentum, nesterov=job.outer_momentum > 0)
        precise = StateForm.of(job).precision in ("float32", "kahan")
        self._dtypes = {name: value.dtype for name, value in tree_flatten(model.trainable_parameters())}
        self._averaged: dict[str, mx.array] = {_TOKENS: mx.array(0.0)}
        """As `_GROUP` of the state."""
        for name, dtype in self._dtypes.items():
            kept = mx.float32 if precise else dtype
            self._averaged[name + _ANCHOR] = self.updater.weight(name).astype(kept)
            if job.outer_momentum > 0:
                # In float16 a small change would be subnormal.
                wide = mx.float32 if kept == mx.float16 else kept
                self._averaged[name + _MOMENTUM] = mx.zeros(self.updater.masters[name].shape, wide)
        mx.eval(self._averaged)
        self._iteration = 0
        self._update_tokens = 0
        self._due = False
        """The last update ended with an averaging."""
        self._pieces = packed(self._dtypes, lambda name: self.updater.masters[name].size, AVERAGING_PIECE)

    def accumulate(self, position: int, *, last: bool, exact: bool = False) -> LocalStep:
        self._iteration = position + 1
        return super().accumulate(position, last=last, exact=exact)

    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        self._update_tokens += batch.targets
        return super().forward_backward(batch, last=last)

    def exchange(self, counters: list[float]) -> list[float]:
        if not all(map(math.isfinite, counters)):
            self._leave("its loss is not finite")
        self._group.begin()
        return floats(self._group.all_sum(mx.array(counters)))

    def apply(self, tokens: float) -> float | None:
        local_tokens, self._update_tokens, self._due = self._update_tokens, 0, False
        self._norm = super().apply(local_tokens) or 0.0
        if math.isfinite(self._norm):
            self._averaged[_TOKENS] = mx.array(scalar(self._averaged[_TOKENS]) + local_tokens)
            self._due = self._schedule.averaging_due(self._iteration)
        else:
            self._leave("its gradient is not finite")
        return self._norm if tokens else None

    def _leave(self, why: str) -> None:
        """This rank goes on from the others' weights; but rank 0, without whose there would be none. Raises LeftOut."""
        if self._group.rank > 0:
            self._group.leave()
            raise LeftOut(why)

    def trained_weights(self) -> WeightStream:
        """Those of the last averaging."""
        return WeightStream.of({name: self._anchor(name).astype(dtype) for name, dtype in self._dtypes.items()})

    def state(self) -> State:
        return {**super().state(), _GROUP: dict(self._averaged)}

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        theirs, ours = (
            {name: (value.shape, value.dtype) for name, value in arrays.items()}
            for arrays in (state.get(_GROUP, {}), self._averaged)
        )
        return theirs == ours and super().fits(state)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Each part is a whole state: this rank's own is used, else the first."""
        if part != (self._group.rank if self._group.rank < parts else 0):
            return
        if self.updater.fits(state) and not self.fits(state):
            raise ValueError("what is saved of the last averaging is of another job")
        self.updater.restore(state)
        self._averaged = dict(state[_GROUP])

    def agree(self) -> None:
        """Resumed states may be of both sides of an averaging, or of two attempts: then all ranks take rank 0's."""
        averaged = (value for name, value in sorted(self._averaged.items()) if name != _TOKENS)
        checksum = reduce(lambda crc, value: zlib.crc32(raw(value), crc), averaged, 0)
        if len(set(all_gather_object(self._group, checksum))) > 1:
            self.restore(broadcast_arrays(self._group, self.state(), 0), 0, 1)

    @property
    def admits(self) -> bool:
        return self._due and self._group.awaited

    def admit(self, snapshot: Snapshot) -> None:
        header = json.dumps({**snapshot.facts(), "arrays": describe(snapshot.state)})
        self._group.admit(header, lambda: (value for group in snapshot.state.values() for value in group.values()))

    def rejoin(self, stopped: Callable[[], bool], release: Callable[[], None]) -> Snapshot:
        text, contents = self._group.join(stopped)
        release()
        header = json.loads(text)
        self.gradients.clear()
        self._update_tokens = 0
        for (group, name, shape, dtype), content in zip(header.pop("arrays"), contents, strict=False):
            value = read_array(content, TensorSpec.of(shape, dtype))
            # In place of this rank's own.
            if group == _GROUP:
                self._averaged[name] = value
            else:
                self.updater.restore_one(group, name, value)
        return Snapshot(**header, state={})

    def _anchor(self, name: str) -> mx.array:
        return self._averaged[name + _ANCHOR].astype(mx.float32)

    def average(self) -> Callable[[], None]:
        if not self._due:
            return super().average()
        means = [
            (names, self._group.combine(self._change(names), partial(self._mean, names))) for names in self._pieces
        ]
        return partial(self._adopt, means)

    def _change(self, names: Sequence[str]) -> bytes:
        """How far this rank's weights have moved since the last averaging, with the tokens that it was trained on."""
        encoded = [pack(_WEIGHT, scalar(self._averaged[_TOKENS]))]
        for name in names:
            change = self._anchor(name) - self.updater.weight(name).astype(mx.float32)
            encoded.append(raw(self._encode(change.reshape(-1))))
        return b"".join(encoded)

    def _mean(self, names: Sequence[str], parts: Mapping[int, bytes]) -> bytes:
        """The members' changes, weighted by their tokens, encoded as theirs."""
        tokens = [unpack_from(_WEIGHT, part)[0] for part in parts.values()]
        whole = max(sum(tokens), 1.0)
        rows = [self._decoded(names, memoryview(part)[calcsize(_WEIGHT) :]) for part in parts.values()]
        means = []
        for changes in zip(*rows, strict=True):
            weighted = (change * (count / whole) for count, (_, change) in zip(tokens, changes, strict=True))
            means.append(raw(self._encode(reduce(add, weighted))))
        return b"".join(means)

    def _adopt(self, means: Sequence[tuple[Sequence[str], bytes]]) -> None:
        """Take the outer step, from the weights of the last averaging."""
        for names, mean in means:
            for name, change in self._decoded(names, mean):
                momentum = self._averaged.get(name + _MOMENTUM)
                outer = {} if momentum is None else {"v": momentum.astype(mx.float32)}
                anchor = self._anchor(name)
                weight = self._outer.apply_single(change.reshape(anchor.shape), anchor, outer)
                self.updater.replace(name, weight, self._iteration)
                kept = self._averaged[name + _ANCHOR].dtype
                # In 16 bits, where the weights' own rounding has put it.
                self._averaged[name + _ANCHOR] = weight if kept == mx.float32 else self.updater.masters[name]
                if momentum is not None:
                    self._averaged[name + _MOMENTUM] = outer["v"].astype(momentum.dtype)
                mx.eval(self.updater.arrays, self._averaged)
        mx.eval(self.model.trainable_parameters())
        self._averaged[_TOKENS] = mx.array(0.0)

    def _encode(self, values: mx.array) -> mx.array:
        return values if self._quantization is None else self._quantization.encode(values)

    def _decoded(self, names: Sequence[str], content: bytes | memoryview) -> Iterator[tuple[str, mx.array]]:
        """The flat changes, one parameter at a time."""
        start, form = 0, self._quantization
        for name in names:
            size = self.updater.masters[name].size
            end = start + (4 * size if form is None else form.nbytes(size))
            encoded = mx.array(np.frombuffer(content[start:end], np.uint8))
            yield name, encoded.view(mx.float32) if form is None else form.decode(encoded, size)
            start = end
