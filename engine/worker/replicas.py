"""Whether the ranks still are replicas of one another: all bits of all parameters, summed up and compared.

Data-parallel ranks apply the same sums to the same parameters, so these stay the same to the bit. A difference is a
silent corruption (of memory, or by a bug), and it would be trained into everybody's next update.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from .collective import Collective
from .reporting import Reporter

_ROW = 4096
"""Words. Sums of rows and of columns read memory once each, and tell of one changed bit, and of elements exchanged."""
_DIGEST_BYTES = 8
_KEPT_PART = 0.1
"""The trained parameters are kept as they were at the last agreement when they are no more than this of the model:
adapters cost nothing, a second copy of a whole model would be missing elsewhere."""
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_NAMED = 3
"""Parameters that are named of those that differ."""


class Corrupted(RuntimeError):
    """This rank's parameters differ from the others', or nobody can tell whose are right."""

    def __init__(self, message: str, ranks: Sequence[int], *, certain: bool) -> None:
        super().__init__(message)
        self.facts = {"ranks": list(ranks), "certain": certain}
        """For the `failure` event."""


@dataclass(frozen=True)
class Difference:
    """Which ranks differ, as far as that can be known."""

    ranks: tuple[int, ...]
    certain: bool
    """These and no others are wrong: a majority, or frozen parameters as they were at the start, bear witness. Else
    they only differ, and any of them may be right."""


def digests(parameters: Mapping[str, mx.array]) -> dict[str, bytes]:
    """8 bytes for each parameter, which change with any of its bits: in one pass over the memory, on the device."""
    pieces = {name: _pieces(parameter) for name, parameter in parameters.items()}
    mx.eval([piece for parts in pieces.values() for piece in parts])
    found = {}
    for name, parts in pieces.items():
        parameter = parameters[name]
        digest = hashlib.blake2b(f"{name} {parameter.shape} {parameter.dtype}\n".encode(), digest_size=_DIGEST_BYTES)
        for piece in parts:
            digest.update(np.asarray(piece).tobytes())
        found[name] = digest.digest()
    return found


def differing(rows: Sequence[Sequence[int]], frozen: Sequence[int] | None) -> Difference | None:
    """What rows of words (frozen parameters' two, trained parameters' two), one per rank, say; None when all agree.
    `frozen`: what the frozen ones' words were when all ranks last agreed on them."""
    if all(list(row) == list(rows[0]) for row in rows):
        return None
    if frozen is not None and (ranks := [rank for rank, row in enumerate(rows) if list(row[:2]) != list(frozen)]):
        return Difference(tuple(ranks), certain=True)
    kinds = [tuple(row) for row in rows]
    usual = max(kinds, key=kinds.count)
    if kinds.count(usual) * 2 > len(kinds):
        return Difference(tuple(rank for rank, kind in enumerate(kinds) if kind != usual), certain=True)
    return Difference(tuple(range(len(rows))), certain=False)


@dataclass
class Replicas:
    """The comparison of one run's ranks. Every call is made by every rank, at the same update."""

    model: nn.Module
    collective: Collective
    reporter: Reporter
    every: int
    """Updates between two comparisons; 0: never."""
    stops: bool
    """Whether a difference ends the training."""
    difference: Difference | None = None
    """What the last comparison found."""
    agreed_at: int | None = None
    """The last iteration at which all ranks agreed."""
    _compared: int | None = None
    """The update of the last comparison."""
    _frozen: list[int] | None = None
    _kept: dict[str, mx.array] = field(default_factory=dict)
    _kept_words: list[int] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _restored: bool = False

    @property
    def on(self) -> bool:
        return self.every > 0 and self.collective.size > 1

    def due(self, update: int) -> bool:
        return self.on and update % self.every == 0

    def compare(self, iteration: int, update: int) -> bool:
        """Whether the training may go on. Once for an update: nothing changes in between. Raises PeerLost."""
        if not self.on or self._compared == update:
            return self.difference is None or not self.stops
        begun = time.perf_counter()
        trained = dict(tree_flatten(self.model.trainable_parameters()))
        every = dict(tree_flatten(self.model.parameters()))
        own = digests(every)
        row = [*_combined(own, every.keys() - trained.keys()), *_combined(own, trained.keys())]
        rows = self.collective.gather(row)
        self._compared, self.difference = update, differing(rows, self._frozen)
        if self.difference is None:
            self.agreed_at, self._frozen = iteration, row[:2]
            self._keep(trained, every, row[2:])
        else:
            self._names = self._differing_parameters(own)
        self._tell(iteration, update, rows, time.perf_counter() - begun)
        return self.difference is None or not self.stops

    def words(self) -> str:
        """What the last comparison found, as one line."""
        if self.difference is None:
            return "all ranks have the same parameters"
        ranks = [str(rank) for rank in self.difference.ranks]
        several = len(ranks) > 1
        named = f"{', '.join(ranks[:-1])} and {ranks[-1]}" if several else ranks[0]
        who = f"the parameters of rank{'s' if several else ''} {named} "
        if self.difference.certain:
            said = who + "are corrupted: they differ from what the other ranks have" + self._which()
        else:
            said = who + "differ from each other, and whose are right cannot be told" + self._which()
        last = "never" if self.agreed_at is None else f"at iteration {self.agreed_at}"
        return f"{said}; all agreed last {last}"

    @property
    def sound(self) -> int | None:
        """The first rank whose trained parameters are not known to be corrupted; None when there is none."""
        found = self.difference
        if found is None or self._restored or not found.certain:
            return 0
        return next((rank for rank in range(self.collective.size) if rank not in found.ranks), None)

    def trained_of(self, rank: int) -> dict[str, mx.array]:
        """The trained parameters of `rank`, to the bit, on every rank. Raises PeerLost."""
        found = {}
        for name, value in tree_flatten(self.model.trainable_parameters()):
            # As whole numbers: a sum of floats with zeros would make 0.0 of -0.0.
            bits = value.reshape(-1).view(_BITS[value.dtype.size])
            mine = bits if self.collective.rank == rank else mx.zeros_like(bits)
            found[name] = self.collective.sum(mine).view(value.dtype).reshape(value.shape)
        return found

    def restore(self) -> bool:
        """Put the trained parameters back to the last agreement; whether that could be done, on every rank."""
        kept = bool(self._kept) and _combined(digests(self._kept), self._kept.keys()) == self._kept_words
        # One whose copy has been hurt too must not save it.
        if not all(row[0] for row in self.collective.gather([int(kept)])):
            return False
        self.model.update(tree_unflatten(list(self._kept.items())))
        self._restored = True
        return True

    def _keep(self, trained: dict[str, mx.array], every: dict[str, mx.array], found: list[int]) -> None:
        if sum(value.nbytes for value in trained.values()) <= _KEPT_PART * sum(
            value.nbytes for value in every.values()
        ):
            self._kept, self._kept_words = trained, found

    def _differing_parameters(self, own: dict[str, bytes]) -> list[str]:
        """Their names: one alone speaks for memory, all of them for another arithmetic."""
        table = self.collective.gather([word for digest in own.values() for word in _words(digest)])
        return [
            name
            for place, name in enumerate(own)
            if any(row[2 * place : 2 * place + 2] != table[0][2 * place : 2 * place + 2] for row in table)
        ]

    def _which(self) -> str:
        if not self._names:
            return ""
        more = f" and {len(self._names) - _NAMED} more" if len(self._names) > _NAMED else ""
        return f" in {', '.join(self._names[:_NAMED])}{more}"

    def _tell(self, iteration: int, update: int, rows: list[list[int]], seconds: float) -> None:
        found = self.difference
        self.reporter.event(
            "replica_check",
            iteration=iteration,
            update=update,
            agreed=found is None,
            seconds=seconds,
            agreed_at=self.agreed_at,
            **(
                {
                    "ranks": list(found.ranks),
                    "certain": found.certain,
                    "parameters": self._names[:_NAMED],
                    "differing": len(self._names),
                    "checksums": ["".join(f"{word:08x}" for word in row) for row in rows],
                    "message": self.words(),
                }
                if found is not None
                else {}
            ),
        )
        if found is not None and not self.stops:
            self.reporter.warn(self.words())


def _pieces(parameter: mx.array) -> list[mx.array]:
    """Sums over rows and columns of its 32-bit words, modulo 2^32, and the words of the last, broken row."""
    flat = parameter.reshape(-1)
    if flat.nbytes % 4 == 0:
        bits = flat.view(mx.uint32)
    else:
        bits = flat.view({1: mx.uint8, 2: mx.uint16}[flat.dtype.size]).astype(mx.uint32)
    rows = bits.size // _ROW
    table = bits[: rows * _ROW].reshape(rows, _ROW)
    sums = [table.sum(axis=1), table.sum(axis=0)] if rows else []
    return [*sums, bits[rows * _ROW :]]


def _combined(own: Mapping[str, bytes], names: Iterable[str]) -> list[int]:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(names):
        digest.update(own[name])
    return _words(digest.digest())


def _words(digest: bytes) -> list[int]:
    return [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
