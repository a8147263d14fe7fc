"""The group of ranks: made strictly, checked against the plan, and used on the CPU stream only."""

from __future__ import annotations

from typing import cast

import mlx.core as mx


class GroupError(RuntimeError):
    """The ranks could not come together as planned, or are not replicas of one another."""


class PeerLost(RuntimeError):
    """Another rank has gone: a consequence of its failure, not a cause."""


class Collective:
    """Sums over all ranks. Every call is made by every rank, in the same order, and is finished when it returns."""

    def __init__(self, backend: str, world_size: int, rank: int) -> None:
        """Join the group. Raises GroupError."""
        # A lone rank has no peers to connect to, and the backends refuse it when asked strictly.
        strict = world_size > 1
        try:
            # "jaccl-ring" is mlx.launch's word for a way of wiring jaccl.
            chosen = backend.removesuffix("-ring") if strict else "any"
            self._group = mx.distributed.init(strict=strict, backend=chosen)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"the {backend} group could not be made: {error}") from error
        if (self._group.size(), self._group.rank()) != (world_size, rank):
            raise GroupError(
                f"planned rank {rank} of {world_size}, but MLX's {backend} group says "
                f"rank {self._group.rank()} of {self._group.size()}"
            )
        self.size = world_size
        self.rank = rank

    def sum(self, array: mx.array) -> mx.array:
        """The sum of everybody's `array`, evaluated. Raises PeerLost."""
        mx.eval(array)
        if self.size == 1:
            return array
        try:
            total = mx.distributed.all_sum(array, group=self._group, stream=mx.cpu)
            mx.eval(total)
        except RuntimeError as error:
            raise _lost(error) from error
        return total

    def gather_arrays(self, array: mx.array) -> mx.array:
        """Everybody's `array` (of one shape and type), [ranks, *shape], evaluated. Raises PeerLost."""
        mx.eval(array)
        if self.size == 1:
            return array[None]
        try:
            gathered = mx.distributed.all_gather(array[None], group=self._group, stream=mx.cpu)
            mx.eval(gathered)
        except RuntimeError as error:
            raise _lost(error) from error
        return gathered

    def send(self, array: mx.array, rank: int) -> None:
        """Give `array` to a neighbour, who must be receiving: this may return only then. Raises PeerLost."""
        mx.eval(array)
        try:
            # On the stream of the collectives, and evaluated: on another one, both would get each other's bytes.
            mx.eval(mx.distributed.send(array, rank, group=self._group, stream=mx.cpu))
        except RuntimeError as error:
            raise _lost(error) from error

    def to_receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """What a neighbour will send, to be computed with before it is there."""
        return mx.distributed.recv(shape, dtype, rank, group=self._group, stream=mx.cpu)

    def receive(self, expected: mx.array) -> mx.array:
        """`expected`, of to_receive, when it is there. Raises PeerLost."""
        try:
            mx.eval(expected)
        except RuntimeError as error:
            raise _lost(error) from error
        return expected

    def barrier(self) -> None:
        """Return when all ranks have come here. Raises PeerLost."""
        self.sum(mx.array(1.0))

    def gather(self, words: list[int]) -> list[list[int]]:
        """Everybody's `words` (32 bits each, as many on every rank), one row per rank. Raises PeerLost."""
        if self.size == 1:
            return [words]
        mine = mx.array(words, dtype=mx.uint32)[None]
        try:
            table = mx.distributed.all_gather(mine, group=self._group, stream=mx.cpu)
            mx.eval(table)
        except RuntimeError as error:
            raise _lost(error) from error
        return cast("list[list[int]]", table.tolist())

    def agree(self, facts: dict[str, int]) -> None:
        """Check that `facts` (32 bits each) are the same on all ranks. Raises GroupError, PeerLost."""
        rows = self.gather(list(facts.values()))
        for rank, row in enumerate(rows):
            for name, ours, theirs in zip(facts, rows[0], row, strict=True):
                if ours != theirs:
                    raise GroupError(f"{name} of rank {rank} differs from rank 0's: make them the same on both nodes")


def _lost(error: RuntimeError) -> RuntimeError:
    """`error` as PeerLost when it is a backend's own, and not for instance a want of memory."""
    return PeerLost(str(error)) if str(error).startswith(("[ring]", "[jaccl]")) else error
