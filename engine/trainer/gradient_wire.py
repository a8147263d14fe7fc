"""How gradients travel: every rank's flat buckets, one after the other, and their sums in float32.

The sums are the same on all ranks, bit for bit: gathered numbers are added in the order of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add

import mlx.core as mx

from engine.protocol.exchange import INT4_BLOCK, INT8_BLOCK, exchange
from engine.trainer.collective import Collective


@dataclass(frozen=True)
class BlockQuantization:
    """Values (float32, flat) as bytes: multiples of each block's greatest absolute value over `levels`, two of up to 7
    levels in a byte, then those scales in float32."""

    levels: int
    block: int
    """Neighbours that share a scale."""

    def encode(self, values: mx.array) -> mx.array:
        padded = mx.pad(values, (0, -values.size % self.block)).reshape(-1, self.block)
        scales = mx.abs(padded).max(axis=1, keepdims=True) / self.levels
        steps = mx.round(padded / mx.where(scales > 0, scales, 1)).astype(mx.int8).reshape(-1).view(mx.uint8)
        if self._per_byte == 2:
            steps = (steps[::2] & 0xF) | (steps[1::2] << 4)
        return mx.concatenate([steps, scales.reshape(-1).view(mx.uint8)])

    def decode(self, encoded: mx.array, size: int) -> mx.array:
        """The `size` values, each within half a step of its block; none is finite where one of the block was not."""
        end = (size + -size % self.block) // self._per_byte
        steps, scales = encoded[:end], encoded[end:].view(mx.float32).reshape(-1, 1)
        if self._per_byte == 2:
            # The upper half keeps its sign; the lower one gets it by a shift up and down.
            steps = mx.stack([(steps << 4).view(mx.int8) >> 4, steps.view(mx.int8) >> 4], axis=1)
        return (steps.view(mx.int8).reshape(-1, self.block) * scales).reshape(-1)[:size]

    def nbytes(self, size: int) -> int:
        blocks = -(-size // self.block)
        return blocks * (self.block // self._per_byte + 4)

    @property
    def _per_byte(self) -> int:
        return 2 if self.levels <= 7 else 1


INT8 = BlockQuantization(127, INT8_BLOCK)
INT4 = BlockQuantization(7, INT4_BLOCK)


class GradientWire:
    """Sums of buckets over the ranks. At most one is under way; all ranks call the same methods in the same order."""

    def __init__(self, collective: Collective, kind: str) -> None:
        """`kind`: the job's `wire`."""
        self.collective = collective
        self._kind = kind
        self._rests: dict[int, mx.array] = {}
        """By bucket: what int8 has rounded away, in bfloat16."""
        self._read: Callable[[mx.array], mx.array] | None = None

    def start(self, number: int, bucket: mx.array, scales: mx.array | None, *, exact: bool) -> None:
        """Begin the sum of every rank's `number`-th bucket (flat, evaluated). `scales`: [ranks], factors by which each
        is too large, if any. `exact`: nothing is rounded away, and what was before is added. Raises PeerLost."""
        size, scale = bucket.size, None if scales is None else scales[self.collective.rank]
        if self._kind == "int8":
            values = unscaled(bucket, scale)
            if (rest := self._rests.pop(number, None)) is not None:
                values = values + rest
            if exact:
                self._start_sum(values)
                return
            encoded = INT8.encode(values)
            self._start_gather(encoded, lambda row, rank: INT8.decode(row, size))
            # Beside the exchange.
            self._rests[number] = (values - INT8.decode(encoded, size)).astype(mx.bfloat16)
            mx.eval(self._rests[number])
        elif exchange(self._kind, self.collective.size, bucket.dtype.size).gathered:
            self._start_gather(bucket, lambda row, rank: unscaled(row, None if scales is None else scales[rank]))
        else:
            self._start_sum(unscaled(bucket, scale))

    def finish(self) -> mx.array | None:
        """The sum under way, float32, evaluated; None without one. Raises PeerLost."""
        if self._read is None:
            return None
        read, self._read = self._read, None
        total = read(self.collective.finish())
        mx.eval(total)
        return total

    def _start_sum(self, values: mx.array) -> None:
        self.collective.start_sum(values)
        self._read = lambda total: total

    def _start_gather(self, mine: mx.array, value: Callable[[mx.array, int], mx.array]) -> None:
        self.collective.start_gather(mine)
        self._read = lambda rows: reduce(add, (value(row, rank) for rank, row in enumerate(rows)))


def unscaled(values: mx.array, scale: mx.array | None) -> mx.array:
    """`values` over `scale` (None: 1), float32."""
    # A division by 1 would read and write all of it once more.
    return values.astype(mx.float32) if scale is None else values.astype(mx.float32) / scale
