"""The group of ranks: created strictly, checked against the plan, and used on the CPU stream only; and broadcasts of
objects and arrays, bit for bit, built on the sums that every backend has.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import mlx.core as mx

from engine.protocol.exit_codes import TrainerError, TrainerExit


class GroupError(TrainerError):
    """The group could not be formed as planned, or its ranks do not have the same job, model and data."""

    exit_code = TrainerExit.GROUP


class PeerLost(TrainerError):
    """Another rank is gone: a consequence of its failure, not the cause."""

    exit_code = TrainerExit.PEER_LOST


class Collective:
    """Sums over all ranks. Every call is made by every rank, in the same order, and is finished when it returns."""

    def __init__(self, backend: str, world_size: int, rank: int) -> None:
        """Join the group. Raises GroupError."""
        # A single rank has no peers to connect to, and the backends refuse it with strict=True.
        strict = world_size > 1
        try:
            # "jaccl-ring" is mlx.launch's name for one way of wiring jaccl.
            chosen = backend.removesuffix("-ring") if strict else "any"
            self._group = mx.distributed.init(strict=strict, backend=chosen)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"the {backend} group could not be formed: {error}") from error
        if (self._group.size(), self._group.rank()) != (world_size, rank):
            raise GroupError(
                f"planned rank {rank} of {world_size}, but MLX's {backend} group has "
                f"rank {self._group.rank()} of {self._group.size()}"
            )
        self.size = world_size
        self.rank = rank

    def all_sum(self, array: mx.array) -> mx.array:
        """The sum of every rank's `array`, evaluated. Raises PeerLost."""
        mx.eval(array)
        if self.size == 1:
            return array
        return self._evaluate(lambda: mx.distributed.all_sum(array, group=self._group, stream=mx.cpu))

    def gather_arrays(self, array: mx.array) -> mx.array:
        """Every rank's `array` (of one shape and type), [ranks, *shape], evaluated. Raises PeerLost."""
        mx.eval(array)
        if self.size == 1:
            return array[None]
        return self._evaluate(lambda: mx.distributed.all_gather(array[None], group=self._group, stream=mx.cpu))

    def all_gather(self, values: list[int]) -> list[list[int]]:
        """Every rank's `values` (32 bits each, as many on every rank), one row per rank. Raises PeerLost."""
        if self.size == 1:
            return [values]
        return cast("list[list[int]]", self.gather_arrays(mx.array(values, dtype=mx.uint32)).tolist())

    def send(self, array: mx.array, rank: int) -> None:
        """Send `array` to a neighbour, which must be receiving: this may return only then. Raises PeerLost."""
        mx.eval(array)
        # On the stream of the collectives, and evaluated: on another stream both would get each other's bytes.
        self._evaluate(lambda: mx.distributed.send(array, rank, group=self._group, stream=mx.cpu))

    def recv_lazy(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """The array that a neighbour will send, for computations before it arrives."""
        return mx.distributed.recv(shape, dtype, rank, group=self._group, stream=mx.cpu)

    def receive(self, expected: mx.array) -> mx.array:
        """Wait for `expected`, of recv_lazy. Raises PeerLost."""
        return self._evaluate(lambda: expected)

    def barrier(self) -> None:
        """Return when all ranks have called it. Raises PeerLost."""
        self.all_sum(mx.array(1.0))

    def check_equal(self, facts: dict[str, int]) -> None:
        """Check that `facts` (32 bits each) are the same on all ranks. Raises GroupError, PeerLost."""
        rows = self.all_gather(list(facts.values()))
        for rank, row in enumerate(rows):
            for name, ours, theirs in zip(facts, rows[0], row, strict=True):
                if ours != theirs:
                    raise GroupError(f"{name} of rank {rank} differs from rank 0's: make them the same on both nodes")

    def _evaluate(self, operation: Callable[[], mx.array]) -> mx.array:
        try:
            result = operation()
            mx.eval(result)
        except RuntimeError as error:
            # A backend's own error, and not for instance a lack of memory.
            if str(error).startswith(("[ring]", "[jaccl]")):
                raise PeerLost(str(error)) from error
            raise
        return result


_BUCKET_WORDS = 16 * 2**20
_ALIGNED_WORDS = 2
"""No element of any type is cut in two."""

Groups = Mapping[str, Mapping[str, mx.array]]
Item = TypeVar("Item")


def all_gather_object(collective: Collective, facts: Any) -> list[Any]:
    """Every rank's `facts` (a JSON value), by rank. Raises PeerLost."""
    raw = json.dumps(facts).encode()
    lengths = [row[0] for row in collective.all_gather([len(raw)])]
    padded = raw.ljust(-(-max(lengths) // 4) * 4, b"\0")
    rows = collective.all_gather(list(struct.unpack(f"<{len(padded) // 4}I", padded)))
    return [json.loads(struct.pack(f"<{len(row)}I", *row)[:length]) for row, length in zip(rows, lengths, strict=True)]


def broadcast_object(collective: Collective, facts: Any, owner: int) -> Any:
    """`facts` of rank `owner` (a JSON value), on every rank. Raises PeerLost."""
    return all_gather_object(collective, facts if collective.rank == owner else None)[owner]


def broadcast_arrays(collective: Collective, groups: Groups | None, owner: int) -> Groups:
    """The `groups` of rank `owner`, bit for bit, on every rank; the others pass None. Raises PeerLost."""
    if collective.size == 1 and groups is not None:
        return groups
    mine = groups if collective.rank == owner else None
    described = {
        group: {name: (value.shape, str(value.dtype).rpartition(".")[2]) for name, value in arrays.items()}
        for group, arrays in (mine or {}).items()
    }
    described = broadcast_object(collective, described, owner)
    entries = [
        _Entry(group, name, tuple(shape), getattr(mx, dtype))
        for group, arrays in described.items()
        for name, (shape, dtype) in arrays.items()
    ]
    found: dict[str, dict[str, mx.array]] = {group: {} for group in described}
    # Hundreds of small sums would take longer than one large one.
    for bucket in packed(entries, lambda entry: entry.words, _BUCKET_WORDS):
        # As integers: a sum of floats with zeros would turn -0.0 into 0.0.
        if mine is None:
            bits = mx.zeros(sum(entry.words for entry in bucket), dtype=mx.uint32)
        else:
            bits = mx.concatenate([as_words(mine[entry.group][entry.name], entry.words) for entry in bucket])
        total = collective.all_sum(bits) if bits.size else bits
        if mine is not None:
            # The owner keeps its own arrays: there is no room for two states.
            continue
        start = 0
        for entry in bucket:
            # A copy: a slice would keep its whole bucket in memory.
            piece = mx.contiguous(total[start : start + entry.words].view(entry.dtype)[: math.prod(entry.shape)])
            found[entry.group][entry.name] = piece.reshape(entry.shape)
            start += entry.words
        mx.eval(found)
    return found if mine is None else mine


class _Entry(NamedTuple):
    group: str
    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def words(self) -> int:
        return aligned_words(math.prod(self.shape) * self.dtype.size, _ALIGNED_WORDS)


def packed(items: Iterable[Item], size: Callable[[Item], int], room: int) -> list[list[Item]]:
    """`items` in order, in lists of up to `room` each; one that is larger begins its own."""
    lists: list[list[Item]] = []
    left = 0
    for item in items:
        if not lists or size(item) > left:
            lists.append([])
            left = max(room, size(item))
        lists[-1].append(item)
        left -= size(item)
    return lists


def aligned_words(nbytes: int, multiple: int) -> int:
    """32-bit words for so many bytes, padded to a multiple."""
    return -(-nbytes // (4 * multiple)) * multiple


def as_words(value: mx.array, words: int) -> mx.array:
    """The bits of `value` as 32-bit words, padded with zeros to `words`."""
    raw = mx.contiguous(value).reshape(-1).view(mx.uint8)
    return mx.pad(raw, (0, 4 * words - raw.size)).view(mx.uint32)
