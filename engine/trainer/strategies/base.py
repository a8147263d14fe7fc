"""One rank's side of a training (the three phases of an update, and its state), and the base of the partitioned
ones."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from engine.protocol.job import Job
from engine.trainer.checkpoint.store import Snapshot
from engine.trainer.collective import Collective, TensorSpec, as_words, from_words, packed
from engine.trainer.gradient_wire import GradientWire
from engine.trainer.optimizer import Updater
from engine.trainer.weights import State, WeightStream, floats
from engine.training.data import Batch, DataLoader, Split
from engine.training.sampler import Indices


@dataclass(frozen=True)
class LocalStep:
    """One rank's part of an iteration, and the seconds of each part of the work."""

    loss_sum: float
    """Sum of cross-entropies; 0 on a rank that does not compute the loss, and before a late one is known."""
    tokens: int
    """Targets in `loss_sum`."""
    data_s: float
    compute_s: float
    communicate_s: float
    update_s: float = 0.0
    """On a single rank 0: backward pass and update are one, in `compute_s`."""

    def with_update(self, exchanged_s: float, applied_s: float, *, lazy: bool) -> LocalStep:
        """An update's last iteration, with seconds of exchange and step. `lazy`: that is mostly the backward pass."""
        return replace(
            self,
            compute_s=self.compute_s + (applied_s if lazy else 0.0),
            communicate_s=self.communicate_s + exchanged_s,
            update_s=0.0 if lazy else applied_s,
        )


class Strategy(ABC):
    """Methods are called by all ranks, in the same order, and may raise PeerLost, unless they are local. An update is
    `accumulate` for each of its iterations, `exchange`, `apply`. The state changes in `apply` only: a rank that loses a
    peer before has the last update's. What the last `accumulate` can exchange already is, beside its computation."""

    replicated: bool
    """Every rank has the same, complete state; else each has a part of one."""
    any_part = False
    """Each part is enough to go on."""
    late_loss: float | None = None
    """The last iteration's `loss_sum`, where only `apply` computes it. Local."""

    @property
    def lazy(self) -> bool:
        """`apply` also computes what is left of the backward pass. Local."""
        return self.collective.size == 1 or self.any_part

    def __init__(
        self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective, elements: int | None = None
    ) -> None:
        """`model`: this rank's part. `elements`: see Updater. Raises JobError for what the optimizer rejects."""
        self.model = model
        self.loader = loader
        self.collective = collective
        self.updater = Updater(job, model, elements)

    def accumulate(self, position: int, *, last: bool, exact: bool = False) -> LocalStep:
        """Forward and backward of the `position`-th global batch, from 0, added to the update under way, whose `last`
        it may be. `exact`: a checkpoint is due after the update, so no part of its gradient may be left to the next."""
        started = time.perf_counter()
        batch = self.loader.batch(position)
        ready, before = time.perf_counter(), self.collective.waited_s
        loss, tokens = self.forward_backward(batch, last=last, exact=exact)
        seconds, waited = time.perf_counter() - ready, self.collective.waited_s - before
        return LocalStep(loss, tokens, ready - started, seconds - waited, waited)

    @abstractmethod
    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        """Add the gradients of this rank's `batch`; `loss_sum` and `tokens` of a LocalStep."""

    @abstractmethod
    def local_norm(self, tokens: int) -> float | None:
        """The norm of this rank's own gradients of the last update over its `tokens`; None where it has none. Local."""

    @abstractmethod
    def exchange(self, counters: list[float]) -> list[float]:
        """Finish summing the gradients, and sum `counters` (float32: exact for integers up to 2^24) over the ranks;
        returns the sums of the counters. The state does not change."""

    @abstractmethod
    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean gradient over `tokens` global targets, evaluated; returns its norm before
        clipping. None, and no step, without targets. Local."""

    def average(self) -> Callable[[], None]:
        """After `apply`: exchange what the ranks average; only the result's call, which is local, changes the state."""
        return lambda: None

    @abstractmethod
    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        """This rank's part of one batch: the sum of cross-entropies, and the number of targets."""

    @abstractmethod
    def trained_weights(self) -> WeightStream:
        """All trained parameters by mlx-lm's names, complete on rank 0. Every rank iterates over all of them."""

    def state(self) -> State:
        """This rank's trained parameters at the optimizer's precision, and the optimizer's state, after the last
        update: the same groups, names, shapes and types at every update. Local."""
        return self.updater.state()

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        """`state` is exactly this rank's. Local."""
        return self.updater.fits(state)

    @abstractmethod
    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """Restore a result of `state`: of rank `part` of `parts`, called for all of them in order; nothing changes
        before the last. A replicated one, or one of which this rank's own part `fits`, is part 0 of 1. Raises
        ValueError for a state that does not fit this job, and changes nothing then. Local."""

    @property
    def admits(self) -> bool:
        """After this update, ranks that were left out wait for this one to `admit` them. Local."""
        return False

    def admit(self, snapshot: Snapshot) -> None:
        """Let them go on from this rank's `snapshot`."""
        raise NotImplementedError

    def rejoin(self, stopped: Callable[[], bool], release: Callable[[], None]) -> Snapshot:
        """After LeftOut: wait to be admitted, and restore the state that comes with it, before which `release` is
        called: there is no room for two; the rest of the snapshot. Raises PeerLost, also when `stopped`; GroupError."""
        raise NotImplementedError


@dataclass(frozen=True)
class PlacedParameter(TensorSpec):
    """A parameter that some rank holds."""

    name: str
    ranks: tuple[int, ...]
    """One, or more for embeddings that are the head as well."""
    trained: bool = True

    @property
    def gradient(self) -> TensorSpec:
        """float32 for float16 parameters, whose gradients' sums over tokens may leave its range."""
        return TensorSpec(self.shape, mx.float32 if self.dtype == mx.float16 else self.dtype)


_PIECE_ELEMENTS = 2**18
"""Gradients applied at a time: few beside a model, and enough for each wait of the host."""


def float32_sum(first: mx.array, second: mx.array) -> mx.array:
    """The sum of two gradients, in float32. Not evaluated."""
    return first.astype(mx.float32) + second


class PartitionedStrategy(Strategy):
    """A rank that holds and trains a part of the model: everything but the forward and backward passes."""

    replicated = False

    def __init__(
        self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective, placed: Sequence[PlacedParameter]
    ) -> None:
        """`model`: this rank's part, with no trainable parameters but its own; `placed`: the whole model's parameters,
        the same on each rank. Raises JobError for settings that the optimizer rejects."""
        self._placed = placed
        self._trained = [parameter for parameter in placed if parameter.trained]
        elements = sum(parameter.size for parameter in self._trained) // collective.size
        super().__init__(job, model, loader, collective, elements)
        self._half = any(parameter.dtype == mx.float16 for parameter in self._trained)
        self._norm = 0.0
        self._found: State = {}
        self.sums: dict[str, mx.array] = {}
        """The gradients' sums so far: float32, or a single contribution in its own type, or rounded as Shards says."""
        self._contributions = 0
        self._wire = GradientWire(collective, "auto")

    def add(self, gradients: dict[str, mx.array], below: mx.array | None = None) -> None:
        """Move `gradients` to the sums of the update under way, evaluated together with `below`, of the same backward
        pass: `gradients` is empty afterwards, and each of them is freed when it has been added."""
        names = list(gradients)
        for name in names:
            mine = gradients.pop(name)
            self.sums[name] = float32_sum(self.sums[name], mine) if name in self.sums else mine
            del mine
        self._contributions += 1
        mx.eval([self.sums[name] for name in names], [] if below is None else below)

    @abstractmethod
    def logits(self, tokens: mx.array) -> mx.array | None:
        """Those [rows, length, vocabulary] of `tokens` [rows, length] on the rank that computes the last ones; None on
        the others. Raises PeerLost."""

    def local_norm(self, tokens: int) -> None:
        """None: a rank's gradients are those of its own part of the model, not of its own examples."""

    def exchange(self, counters: list[float]) -> list[float]:
        """Also sums the gradients that several ranks have, and computes the global norm."""
        for parameter in self._trained:
            if len(parameter.ranks) > 1:
                self._sum_shared(parameter)
        square = mx.array(0.0)
        for names in self._pieces(p.name for p in self._trained if p.ranks[0] == self.collective.rank):
            square = sum((mx.square(self.sums[name].astype(mx.float32)).sum() for name in names), start=square)
            # Not all squares at once: each is as large as its gradient in float32.
            mx.eval(square)
        tail = mx.concatenate([mx.array(counters), square.reshape(1)])
        *totals, squares = floats(self.collective.all_sum(tail))
        self._norm = math.sqrt(squares)
        return totals

    def _sum_shared(self, parameter: PlacedParameter) -> None:
        """The sum of what several ranks have: the same on all of them, bit for bit."""
        mine = self.sums.get(parameter.name)
        dtype = parameter.gradient.dtype if self._contributions == 1 else mx.float32
        value = mx.zeros(parameter.shape, dtype) if mine is None else mine
        mx.eval(value)
        self._wire.start(0, value.reshape(-1), None, exact=True)
        total = self._wire.finish()
        if mine is not None and total is not None:
            self.sums[parameter.name] = total.reshape(parameter.shape)

    def apply(self, tokens: float) -> float | None:
        self._contributions = 0
        if not tokens:
            self.sums = {}
            return None
        pieces = ({name: self.sums.pop(name) for name in names} for names in self._pieces(list(self.sums)))
        return self.updater.update(pieces, tokens, self._norm / tokens)

    def _pieces(self, names: Iterable[str]) -> list[list[str]]:
        """The `names` that this rank has sums of, in pieces."""
        return packed((name for name in names if name in self.sums), lambda name: self.sums[name].size, _PIECE_ELEMENTS)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """This rank's own is collected from all parts, and restored with the last."""
        if part == 0:
            self._found = {}
        for group, arrays in self.updater.own_part(state).items():
            self._found.setdefault(group, {}).update(arrays)
        if part == parts - 1:
            whole, self._found = self._found, {}
            self.updater.restore(whole)

    def trained_weights(self) -> WeightStream:
        return WeightStream({placed.name: placed for placed in self._trained}, self._gathered(self._trained))

    def all_weights(self) -> WeightStream:
        """All parameters, as `trained_weights`."""
        return WeightStream({placed.name: placed for placed in self._placed}, self._gathered(self._placed))

    def _gathered(self, parameters: Sequence[PlacedParameter]) -> Iterator[mx.array]:
        """`parameters` bit for bit on rank 0; other ranks may get placeholders. Iteration raises PeerLost."""
        held = dict(tree_flatten(self.model.parameters()))
        for parameter in parameters:
            if 0 in parameter.ranks:
                yield held[parameter.name] if self.collective.rank == 0 else mx.array(0)
                continue
            holds = self.collective.rank == parameter.ranks[0]
            mine = as_words(held[parameter.name]) if holds else mx.zeros(parameter.words, mx.uint32)
            yield from from_words(self.collective.all_sum(mine), {parameter.name: parameter}).values()
