"""Checks that the ranks are still replicas of one another: digests of all parameters are compared over the ranks.

Data-parallel ranks apply the same sums to the same parameters, so these stay equal to the bit. A difference is a
silent corruption (of memory, or by a bug), and the next update would spread it to every rank."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.exit_codes import TrainerError, TrainerExit
from engine.trainer.collective import Collective, all_gather_object, broadcast_arrays
from engine.trainer.weights import UINT_OF_SIZE, copied
from engine.training.reporting import Reporter

_ROW = 4096
"""32-bit words. Sums of rows and of columns read memory once each, and show a flipped bit or exchanged elements."""
_DIGEST_BYTES = 8
_KEPT_FRACTION = 0.1
"""The last agreed trained parameters are kept when they are at most this fraction of the model: adapters."""
_NAMED = 3
"""Differing parameters named in a message, at most."""


@dataclass(frozen=True)
class ReplicaMismatch:
    """The ranks that differ, as far as that can be known."""

    ranks: tuple[int, ...]
    certain: bool
    """By a majority or by changed frozen parameters, these and no others are wrong; else any of them may be right."""
    parameters: tuple[str, ...] = ()


class Corrupted(TrainerError):
    """This rank's parameters differ from the others', or there is no majority that tells which are right."""

    exit_code = TrainerExit.CORRUPTED

    def __init__(self, message: str, mismatch: ReplicaMismatch) -> None:
        super().__init__(message)
        self.facts = {"ranks": list(mismatch.ranks), "certain": mismatch.certain}
        """For the `failure` event."""


def parameter_digests(parameters: Mapping[str, mx.array]) -> dict[str, str]:
    """16 hexadecimal digits each, which change with any of its bits: one pass over the memory, on the device."""
    pieces = {name: _pieces(parameter) for name, parameter in parameters.items()}
    mx.eval([piece for parts in pieces.values() for piece in parts])
    digests = {}
    for name, parts in pieces.items():
        parameter = parameters[name]
        digest = hashlib.blake2b(f"{name} {parameter.shape} {parameter.dtype}\n".encode(), digest_size=_DIGEST_BYTES)
        for piece in parts:
            digest.update(np.asarray(piece).tobytes())
        digests[name] = digest.hexdigest()
    return digests


def parameter_checksum(model: nn.Module) -> str:
    """16 hexadecimal digits, the same for models with the same parameters."""
    return _combined(parameter_digests(dict(tree_flatten(model.parameters()))))


def find_mismatch(rows: Sequence[Sequence[object]], frozen: object | None) -> ReplicaMismatch | None:
    """Compare `rows`, one per rank (a digest of the frozen parameters, one of the trained); None when all agree.
    `frozen`: the digest of the frozen parameters when all ranks last agreed."""
    votes = [tuple(row) for row in rows]
    majority = max(votes, key=votes.count)
    if votes.count(majority) == len(votes):
        return None
    if frozen is not None and (ranks := [rank for rank, vote in enumerate(votes) if vote[0] != frozen]):
        return ReplicaMismatch(tuple(ranks), certain=True)
    if votes.count(majority) * 2 > len(votes):
        return ReplicaMismatch(tuple(rank for rank, vote in enumerate(votes) if vote != majority), certain=True)
    return ReplicaMismatch(tuple(range(len(rows))), certain=False)


@dataclass
class ReplicaCheck:
    """The comparison of a run's ranks. Every call is made by every rank, at the same update."""

    model: nn.Module
    collective: Collective
    reporter: Reporter
    every: int
    """Updates between two comparisons; 0: never."""
    stops: bool
    """A difference ends the training."""
    difference: ReplicaMismatch | None = None
    """Found by the last comparison."""
    agreed_at: int | None = None
    """The last iteration at which all ranks agreed."""
    _compared: int | None = None
    """The update of the last comparison."""
    _frozen: str | None = None
    """The digest of the frozen parameters when all ranks last agreed."""
    _kept: dict[str, mx.array] = field(default_factory=dict)
    _kept_digest: str = ""
    _restored: bool = False

    @property
    def on(self) -> bool:
        return self.every > 0 and self.collective.size > 1

    def due(self, update: int) -> bool:
        return self.on and update % self.every == 0

    def compare(self, iteration: int, update: int) -> bool:
        """False when the training has to stop. At most once per update: nothing changes in between. Raises PeerLost."""
        if not self.on or self._compared == update:
            return self.difference is None or not self.stops
        started = time.perf_counter()
        trained = dict(tree_flatten(self.model.trainable_parameters()))
        every = dict(tree_flatten(self.model.parameters()))
        by_name = parameter_digests(every)
        digests = [_combined({name: by_name[name] for name in names}) for names in (every.keys() - trained, trained)]
        rows = all_gather_object(self.collective, digests)
        mismatch = find_mismatch(rows, self._frozen)
        if mismatch is None:
            self.agreed_at, self._frozen = iteration, digests[0]
            if _size(trained) <= _KEPT_FRACTION * _size(every):
                self._kept, self._kept_digest = trained, digests[1]
        else:
            mismatch = replace(mismatch, parameters=self._differing_parameters(by_name))
        self._compared, self.difference = update, mismatch
        self._report(iteration, update, rows, time.perf_counter() - started)
        return mismatch is None or not self.stops

    def message(self) -> str:
        """The difference that the last comparison has found, in one line."""
        assert self.difference is not None
        *others, final = map(str, self.difference.ranks)
        who = f"ranks {', '.join(others)} and {final}" if others else f"rank {final}"
        what = (
            "are corrupted: they differ from those of the other ranks"
            if self.difference.certain
            else "differ from each other, and it is not known which are right"
        )
        names = self.difference.parameters
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = f" in {', '.join(names[:_NAMED])}{more}" if names else ""
        last = "never agreed" if self.agreed_at is None else f"last agreed at iteration {self.agreed_at}"
        return f"the parameters of {who} {what}{which}; the ranks {last}"

    @property
    def intact_rank(self) -> int | None:
        """The first rank whose trained parameters are not known to be corrupted; None when there is none."""
        mismatch = self.difference
        if mismatch is None or self._restored or not mismatch.certain:
            return 0
        return next((rank for rank in range(self.collective.size) if rank not in mismatch.ranks), None)

    def broadcast_trained(self, rank: int) -> Mapping[str, mx.array]:
        """The trained parameters of `rank`, bit for bit, on every rank. Raises PeerLost."""
        trained = dict(tree_flatten(self.model.trainable_parameters()))
        return broadcast_arrays(self.collective, {"trained": trained}, rank)["trained"]

    def restore(self) -> bool:
        """Restore the trained parameters of the last agreement; False, on all ranks, when one does not have them."""
        kept = bool(self._kept) and _combined(parameter_digests(self._kept)) == self._kept_digest
        # A rank whose copy is corrupted too must not save it.
        if not all(all_gather_object(self.collective, kept)):
            return False
        self.model.update(tree_unflatten(list(self._kept.items())))
        self._restored = True
        return True

    def _differing_parameters(self, by_name: dict[str, str]) -> tuple[str, ...]:
        """Their names: a single one hints at bad memory, all of them at different arithmetic."""
        table = all_gather_object(self.collective, list(by_name.values()))
        return tuple(name for name, *digests in zip(by_name, *table, strict=True) if len(set(digests)) > 1)

    def _report(self, iteration: int, update: int, rows: list[list[str]], seconds: float) -> None:
        mismatch = self.difference
        facts: dict[str, object] = {"iteration": iteration, "update": update, "agreed": mismatch is None}
        facts |= {"seconds": seconds, "agreed_at": self.agreed_at}
        if mismatch is not None:
            facts |= {
                "ranks": list(mismatch.ranks),
                "certain": mismatch.certain,
                "parameters": mismatch.parameters[:_NAMED],
                "differing": len(mismatch.parameters),
                "checksums": ["".join(row) for row in rows],
                "message": self.message(),
            }
        self.reporter.event("replica_check", **facts)
        if mismatch is not None and not self.stops:
            self.reporter.warn(self.message())


def _pieces(parameter: mx.array) -> list[mx.array]:
    """Sums over rows and columns of its 32-bit words, modulo 2^32, and the words of the last, incomplete row."""
    flat = parameter.reshape(-1)
    bits = flat.view(mx.uint32 if flat.nbytes % 4 == 0 else UINT_OF_SIZE[flat.dtype.size]).astype(mx.uint32)
    rows = bits.size // _ROW
    table = bits[: rows * _ROW].reshape(rows, _ROW)
    sums = [table.sum(axis=1), table.sum(axis=0)] if rows else []
    # Read on the host, where CUDA's arrays move for good with all that shares their memory, as a sum of one row does.
    return [copied(piece) for piece in (*sums, bits[rows * _ROW :])]


def _combined(digests: Mapping[str, str]) -> str:
    """16 hexadecimal digits over those of several parameters."""
    together = "".join(digests[name] for name in sorted(digests))
    return hashlib.blake2b(together.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _size(parameters: Mapping[str, mx.array]) -> int:
    return sum(value.nbytes for value in parameters.values())
