"""The group of ranks: created strictly, checked against the plan, and used on one stream only; and broadcasts of
objects and arrays, bit for bit, built on the sums that every backend has. NCCL has no sums of 16-bit integers or of
booleans, and neither send nor recv."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import mlx.core as mx

from engine.training.reporting import GroupError, PeerLost, check_equal


class Collective:
    """Operations of all ranks: every call is made by every rank, in the same order. All but `start_sum`, `start_gather`
    and `start_send` are finished when they return. They share a stream, beside which the ranks compute. At most one is
    under way: of several, MLX waits for one that never ends before it raises the error of the first."""

    def __init__(self, backend: str, world_size: int, rank: int, form_limit_s: float = 120.0) -> None:
        """Join the group. Raises GroupError. With NCCL the process ends after `form_limit_s` seconds without one."""
        # A single rank has no peers to connect to, and the backends refuse it with strict=True.
        strict = world_size > 1
        # "jaccl-ring" is mlx.launch's name for one way of wiring jaccl.
        chosen = backend.removesuffix("-ring") if strict else "any"
        try:
            self._group = _init_nccl(form_limit_s) if chosen == "nccl" else mx.distributed.init(strict, chosen)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"the {backend} group could not be formed: {error}") from error
        if (self._group.size(), self._group.rank()) != (world_size, rank):
            raise GroupError(
                f"planned rank {rank} of {world_size}, but MLX's {backend} group has "
                f"rank {self._group.rank()} of {self._group.size()}"
            )
        self.size = world_size
        self.rank = rank
        self.waited_s = 0.0
        """Seconds that this rank has waited for operations, so far."""
        # On Linux mx.cpu computes too; and two streams for one socket would get each other's bytes. NCCL takes none.
        self._stream = mx.new_stream(mx.gpu if chosen == "nccl" else mx.cpu)
        self._under_way: mx.array | None = None

    @property
    def left_out(self) -> bool:
        """The other ranks are training without this one, which has to join them again first."""
        return False

    def all_sum(self, array: mx.array) -> mx.array:
        """The sum of every rank's `array`, evaluated. Raises PeerLost."""
        self.start_sum(array)
        return self.finish()

    def gather_arrays(self, array: mx.array) -> mx.array:
        """Every rank's `array` (of one shape and type), [ranks, *shape], evaluated. Raises PeerLost."""
        self.start_gather(array)
        return self.finish()

    def start_sum(self, array: mx.array) -> None:
        """Begin `all_sum`, whose result `finish` returns. Raises PeerLost."""
        mx.eval(array)
        self._start(lambda: mx.distributed.all_sum(array, group=self._group, stream=self._stream))

    def start_gather(self, array: mx.array) -> None:
        """Begin `gather_arrays`, whose result `finish` returns. Raises PeerLost."""
        mx.eval(array)
        whole = array[None]
        mx.eval(whole)
        self._start(lambda: mx.distributed.all_gather(whole, group=self._group, stream=self._stream))

    def finish(self) -> mx.array:
        """Wait for the operation that was started. Raises PeerLost."""
        assert self._under_way is not None
        result, self._under_way = self._under_way, None
        return self._wait(result)

    def start_send(self, array: mx.array, rank: int) -> None:
        """Begin to send `array` to a neighbour; `finish` may return only when it is receiving. Raises PeerLost."""
        mx.eval(array)
        self._start(lambda: mx.distributed.send(array, rank, group=self._group, stream=self._stream))

    def recv_lazy(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """The array that a neighbour will send, for computations before it arrives."""
        return mx.distributed.recv(shape, dtype, rank, group=self._group, stream=self._stream)

    def receive(self, expected: mx.array) -> mx.array:
        """Wait for `expected`, of recv_lazy. Raises PeerLost."""
        return self._wait(expected)

    def barrier(self) -> None:
        """Return when all ranks have called it. Raises PeerLost."""
        self.all_sum(mx.array(1.0))

    def check_equal(self, facts: dict[str, object]) -> None:
        """Check that `facts` (JSON values) are the same on all ranks. Raises GroupError, PeerLost."""
        check_equal(all_gather_object(self, facts))

    def _start(self, operation: Callable[[], mx.array]) -> None:
        assert self._under_way is None, "another operation is under way"
        with _peer_loss():
            self._under_way = operation()
            mx.async_eval(self._under_way)  # type: ignore[no-untyped-call]  # mlx has no types for it

    def _wait(self, result: mx.array) -> mx.array:
        assert self._under_way is None, "another operation is under way"
        started = time.perf_counter()
        with _peer_loss():
            mx.eval(result)
        self.waited_s += time.perf_counter() - started
        return result


def _init_nccl(limit_s: float) -> mx.distributed.Group:
    """MLX's rank 0 waits for missing ranks for ever, the others 5 minutes for rank 0, and the group for NCCL; all hold
    Python's lock, so that no other thread could end the process."""
    os.environ.setdefault("MLX_NCCL_TIMEOUT", str(int(1000 * limit_s)))
    faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        return mx.distributed.init(strict=True, backend="nccl")
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _peer_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # A backend's own error, and not for instance a lack of memory.
        if str(error).startswith(("[ring]", "[jaccl]")):
            raise PeerLost(str(error)) from error
        raise


_BUCKET_WORDS = 16 * 2**20
_ALIGNED_BYTES = 64

Groups = Mapping[str, Mapping[str, mx.array]]
Item = TypeVar("Item")
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor's shape and type, known before its values arrive."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str) -> TensorSpec:
        """As `describe` has them."""
        return cls(tuple(shape), getattr(mx, dtype))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    @property
    def words(self) -> int:
        """The length of its `as_words`: whole 64 bytes, for kernels that read several numbers at once."""
        return -(-self.nbytes // _ALIGNED_BYTES) * (_ALIGNED_BYTES // 4)


def as_words(value: mx.array) -> mx.array:
    """The bits of `value` as 32-bit words, padded with zeros, in memory of their own."""
    raw = mx.contiguous(value).reshape(-1).view(mx.uint8)
    return mx.pad(raw, (0, 4 * TensorSpec(value.shape, value.dtype).words - raw.size)).view(mx.uint32)


def from_words(words: mx.array, specs: Mapping[Name, TensorSpec]) -> dict[Name, mx.array]:
    """The arrays of these `specs`, whose words follow one another in `words`."""
    arrays, start = {}, 0
    for name, spec in specs.items():
        arrays[name] = words[start : start + spec.words].view(spec.dtype)[: spec.size].reshape(spec.shape)
        start += spec.words
    return arrays


def all_gather_object(collective: Collective, facts: Any) -> list[Any]:
    """Every rank's `facts` (a JSON value), by rank. Raises PeerLost."""
    raw = json.dumps(facts).encode()
    longest = cast("int", mx.max(collective.gather_arrays(mx.array(len(raw)))).item())
    padded = mx.array(list(raw.ljust(longest)), dtype=mx.uint8)
    return [json.loads(bytes(row)) for row in cast("list[list[int]]", collective.gather_arrays(padded).tolist())]


def broadcast_object(collective: Collective, facts: Any, owner: int) -> Any:
    """`facts` of rank `owner` (a JSON value), on every rank. Raises PeerLost."""
    return all_gather_object(collective, facts if collective.rank == owner else None)[owner]


def describe(groups: Groups) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Group, name, shape and type of each array, as JSON values for TensorSpec.of."""
    arrays = ((group, name, value) for group, values in groups.items() for name, value in values.items())
    return [(group, name, value.shape, str(value.dtype).rpartition(".")[2]) for group, name, value in arrays]


def broadcast_arrays(collective: Collective, groups: Groups | None, owner: int) -> Groups:
    """The `groups` of rank `owner`, bit for bit, on every rank; the others pass None. Raises PeerLost."""
    if collective.size == 1 and groups is not None:
        return groups
    mine = groups if collective.rank == owner else None
    described = broadcast_object(collective, describe(mine or {}), owner)
    specs = {(group, name): TensorSpec.of(shape, dtype) for group, name, shape, dtype in described}
    received: dict[str, dict[str, mx.array]] = {}
    # Hundreds of small sums would take longer than one large one.
    for names in packed(specs, lambda name: specs[name].words, _BUCKET_WORDS):
        bucket = {name: specs[name] for name in names}
        # As integers: a sum of floats with zeros would turn -0.0 into 0.0.
        if mine is None:
            bits = mx.zeros(sum(spec.words for spec in bucket.values()), dtype=mx.uint32)
        else:
            bits = mx.concatenate([as_words(mine[group][name]) for group, name in names])
        total = collective.all_sum(bits) if bits.size else bits
        # The owner keeps its own arrays: there is no room for two states.
        if mine is None:
            for (group, name), value in from_words(total, bucket).items():
                # A copy: a slice would keep its whole bucket in memory.
                received.setdefault(group, {})[name] = mx.contiguous(value)
            mx.eval(received)
    return received if mine is None else mine


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
