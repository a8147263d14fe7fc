"""What neighbouring stages send each other: each array behind a header that says what it is.

A message has no bounds of its own: one of another size than expected would shift all that come after it, silently.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from enum import IntEnum
from typing import cast

import mlx.core as mx

from ..collective import Collective, GroupError

_MAGIC = 0x464C4447
_WORDS = 8
_DTYPES = (mx.float32, mx.bfloat16, mx.float16)


class Kind(IntEnum):
    """What a message is."""

    HIDDEN = 1
    """What a stage has computed, for the next one."""
    GRADIENT = 2
    """Of the loss with respect to it, for the stage before."""


class Messages:
    """Messages of one rank to and from its neighbours. Each call of one side needs the other side's."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def send(self, rank: int, kind: Kind, batch: int, micro: int, array: mx.array) -> None:
        """Send `array` [rows, length, width], of micro-batch `micro` of the `batch`-th batch. Raises PeerLost."""
        mx.eval(array)
        header = [_MAGIC, kind, batch % 2**31, micro, _DTYPES.index(array.dtype), *array.shape]
        self._collective.send(mx.array(header, dtype=mx.int32), rank)
        self._collective.send(array, rank)

    def announced(self, rank: int, kind: Kind, batch: int, micro: int, rows: tuple[int, int]) -> mx.array:
        """What is coming, after a look at its header; `rows` is its rows and length. Raises GroupError, PeerLost."""
        words = self._header(rank)
        expected = [_MAGIC, kind, batch % 2**31, micro]
        if words[:4] != expected or tuple(words[5:7]) != rows or not 0 <= words[4] < len(_DTYPES):
            raise GroupError(
                f"rank {rank} sent {_told(words)}, and {_told([*expected, words[4], *rows, words[7]])} was due: "
                "the ranks are no longer in step"
            )
        return self._collective.to_receive((*rows, words[7]), _DTYPES[words[4]], rank)

    def receive(self, rank: int, kind: Kind, batch: int, micro: int, rows: tuple[int, int]) -> mx.array:
        """What is coming, when it is there. Raises GroupError, PeerLost."""
        return self._collective.receive(self.announced(rank, kind, batch, micro, rows))

    def later(self, rank: int, like: mx.array) -> mx.array:
        """What `fetch` will get: to be computed with before."""
        return self._collective.to_receive(like.shape, like.dtype, rank)

    def fetch(self, later: mx.array, rank: int, kind: Kind, batch: int, micro: int) -> None:
        """Have `later` there. Raises GroupError, PeerLost."""
        words = self._header(rank)
        expected = [_MAGIC, kind, batch % 2**31, micro, _DTYPES.index(later.dtype), *later.shape]
        if words != expected:
            raise GroupError(
                f"rank {rank} sent {_told(words)}, and {_told(expected)} was due: the ranks are no longer in step"
            )
        self._collective.receive(later)

    def _header(self, rank: int) -> list[int]:
        header = self._collective.receive(self._collective.to_receive((_WORDS,), mx.int32, rank))
        return cast("list[int]", header.tolist())


def _told(words: list[int]) -> str:
    if words[0] != _MAGIC:
        return f"no header ({', '.join(map(str, words))})"
    names = {kind.value: kind.name.lower() for kind in Kind}
    shape = " x ".join(map(str, words[5:8]))
    return f"{names.get(words[1], 'unknown')} of batch {words[2]}, micro-batch {words[3]}, {shape}"
