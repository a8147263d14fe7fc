"""One rank's part of what is trained, where no rank has all of it: its gradients, its optimizer, and how all parts
together are one model and one state."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from ..arrays import floats, number
from ..collective import Collective
from ..job import Job
from ..optimizer import Updater
from ..streamed import Entry, Weights
from .strategy import State

_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class Held:
    """A parameter that some rank holds."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    ranks: tuple[int, ...]
    """Which do: one, or more for embeddings that are the head as well."""


def collected(parameters: Sequence[Held], model: nn.Module, collective: Collective) -> Weights:
    """All `parameters`, of which each rank's `model` has its own; each is to the bit on rank 0, others may get nothing.
    Taking one raises PeerLost."""

    def arrays() -> Iterator[mx.array]:
        own = dict(tree_flatten(model.parameters()))
        for parameter in parameters:
            if 0 in parameter.ranks:
                yield own[parameter.name] if collective.rank == 0 else mx.array(0)
                continue
            kind = _BITS[parameter.dtype.size]
            # As whole numbers: a sum of floats with zeros would make 0.0 of -0.0.
            mine = own[parameter.name] if collective.rank == parameter.ranks[0] else mx.zeros(parameter.shape, kind)
            yield collective.sum(mine.view(kind)).view(parameter.dtype)

    return Weights({entry.name: Entry(entry.shape, entry.dtype) for entry in parameters}, arrays())


class Part:
    """What this rank trains. Its `model` has no other trainable parameters."""

    def __init__(self, job: Job, model: nn.Module, trained: Sequence[Held], collective: Collective) -> None:
        """`trained` is that of all ranks, the same on each. Raises JobError for an optimizer that there is not."""
        self._trained = trained
        self._collective = collective
        self._updater = Updater(job, model)
        self._sums: dict[str, mx.array] = {}
        self._norm = mx.array(0.0)
        self._found: dict[str, dict[str, mx.array]] = {}

    @property
    def learning_rate(self) -> float:
        return self._updater.learning_rate

    @property
    def in_16_bits(self) -> bool:
        """Whether any trained parameter has only 16 bits, on any rank."""
        return any(parameter.dtype.size < 4 for parameter in self._trained)

    @property
    def sums(self) -> dict[str, mx.array]:
        """The gradients' sums so far: float32, by name."""
        return self._sums

    def add(self, gradients: Mapping[str, mx.array]) -> None:
        """Add sums of gradients (float32) to those of the update under way; evaluated."""
        for name, gradient in gradients.items():
            self._sums[name] = self._sums[name] + gradient if name in self._sums else gradient
        mx.eval(self._sums)

    def exchange(self, counters: list[float]) -> list[float]:
        """Sum `counters`, and what more than one rank has a gradient of; and learn the global norm. Raises PeerLost."""
        rank = self._collective.rank
        for parameter in self._trained:
            if len(parameter.ranks) > 1:
                mine = self._sums.get(parameter.name)
                total = self._collective.sum(mx.zeros(parameter.shape) if mine is None else mine)
                if mine is not None:
                    self._sums[parameter.name] = total
        once = [parameter.name for parameter in self._trained if parameter.ranks[0] == rank]
        squares = [mx.square(self._sums[name]).sum() for name in once if name in self._sums]
        tail = mx.concatenate([mx.array(counters), sum(squares, start=mx.array(0.0)).reshape(1)])
        *totals, square = floats(self._collective.sum(tail))
        self._norm = mx.sqrt(mx.array(square))
        return totals

    def apply(self, tokens: float) -> float | None:
        """One optimizer step with the mean over `tokens` targets; the global norm before clipping. None without any."""
        sums, self._sums = self._sums, {}
        if not tokens:
            return None
        norm = self._norm / tokens
        return number(self._updater.update({name: value / tokens for name, value in sums.items()}, norm))

    def state(self) -> State:
        return self._updater.state()

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        return self._updater.fits(state)

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        """As strategy.Strategy has it: this rank's own is picked out of all parts, and put back with the last."""
        ours = self._updater.state()
        if part == 0:
            self._found = {group: {} for group in ours}
        for group, arrays in ours.items():
            theirs = state.get(group, {})
            self._found[group] |= {name: theirs[name] for name in arrays if name in theirs}
        if part == parts - 1:
            found, self._found = self._found, {}
            self._updater.restore(found)
