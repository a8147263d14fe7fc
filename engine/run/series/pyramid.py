"""One series on disk as a pyramid of minima and maxima, so that ten million points are drawn as fast as a thousand.

`<name>.0` has the points in ascending x, two little-endian f64 each: x, y (NaN: there was no finite value). Level k,
`<name>.k`, has a block for each FACTOR**k points, five f64: the lowest and the highest point in the order of x, and the
mean. A block is written when its last point has come; all levels are cut where the points are. Read by offset, and not
by memory map: a file cut short under a map would kill the process that reads it. Imports no numpy: the console reads
with this."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from engine.protocol.attempt import regular_descriptor
from engine.run.logs.line_index import GrowingFile

FACTOR: Final = 8
_SHIFT: Final = 3
_POINT, _BLOCK = struct.Struct("<2d"), struct.Struct("<5d")
_HELD_BYTES: Final = 1 << 20
_NEAR: Final = 64
"""Points that are read at once where one is looked for."""


class DamagedPyramid(ValueError):
    """Its files have other bytes than were written."""


class Block(NamedTuple):
    """Neighbouring points: the lowest and the highest in the order of x. All of y is NaN where none is finite."""

    x1: float
    y1: float
    x2: float
    y2: float
    mean: float


def merged(blocks: Sequence[Block]) -> Block:
    """One block for neighbouring ones (at least one) of equally many points; of several of one height the outer."""
    finite = [block for block in blocks if block.y1 == block.y1]
    if not finite:
        return Block(blocks[0].x1, math.nan, blocks[-1].x2, math.nan, math.nan)
    points = [point for block in finite for point in ((block.x1, block.y1), (block.x2, block.y2))]
    low, high = min(points, key=lambda point: point[1]), max(reversed(points), key=lambda point: point[1])
    return Block(*min(low, high), *max(low, high), sum(block.mean for block in finite) / len(finite))


def level_file(path: Path, level: int) -> Path:
    return path.with_name(f"{path.name}.{level}")


class PyramidWriter:
    """Appends to a pyramid; what was added is on disk after `flush`."""

    def __init__(self, path: Path, count: int = 0) -> None:
        """Goes on behind the first `count` points; all behind them is cut off. Raises ValueError when there are not so
        many, OSError."""
        self.path = path
        self.count = 0
        self.last_x = -math.inf
        self._open: list[list[Block]] = []
        """By level: the newest blocks that do not fill one of the next level yet."""
        self._waiting: list[bytearray] = []
        """By level: what is not written yet."""
        self._cut(count)

    def add(self, x: float, y: float) -> None:
        """Append a point. Going back in x (a restart) drops what was there. Raises OSError."""
        if x <= self.last_x:
            self.flush()
            self._cut(PyramidReader(self.path, self.count).index(x))
        self.count, self.last_x = self.count + 1, x
        self._enter(0, Block(x, y, x, y, y), _POINT.pack(x, y))

    def flush(self) -> None:
        """Raises OSError; what was not written goes on waiting."""
        for level, waiting in enumerate(self._waiting):
            if waiting:
                descriptor = regular_descriptor(level_file(self.path, level), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                try:
                    while waiting:
                        del waiting[: os.write(descriptor, waiting)]
                finally:
                    os.close(descriptor)

    def _enter(self, level: int, block: Block, record: bytes) -> None:
        while len(self._open) <= level:
            self._open.append([])
            self._waiting.append(bytearray())
        self._waiting[level] += record
        if level == 0 and len(self._waiting[0]) > _HELD_BYTES:
            self.flush()
        siblings = self._open[level]
        siblings.append(block)
        if len(siblings) == FACTOR:
            whole = merged(siblings)
            siblings.clear()
            self._enter(level + 1, whole, _BLOCK.pack(*whole))

    def _cut(self, count: int) -> None:
        """Keep the first `count` points."""
        self._open, self._waiting = [], []
        reader = PyramidReader(self.path, count)
        for level in itertools.count():
            file, kept = level_file(self.path, level), count >> _SHIFT * level
            if not kept and not file.exists():
                break
            size = kept * (_BLOCK if level else _POINT).size
            if not file.exists() or file.stat().st_size < size:
                raise ValueError(f"{file.name} has fewer than {kept} records")
            os.truncate(file, size)
            self._open.append(list(reader.records(level, kept & -FACTOR, kept).rows()))
            self._waiting.append(bytearray())
        self.count, self.last_x = count, reader.point(count - 1)[0] if count else -math.inf


@dataclass(frozen=True)
class Blocks:
    """Neighbouring blocks, a column a field."""

    x1: array[float]
    y1: array[float]
    x2: array[float]
    y2: array[float]
    mean: array[float]

    def rows(self) -> Iterator[Block]:
        return map(Block, self.x1, self.y1, self.x2, self.y2, self.mean)


class PyramidReader:
    """The first `count` points of a pyramid, fewer where there are not so many. A point that cannot be read any more
    lies at infinity."""

    def __init__(self, path: Path, count: int) -> None:
        self._path = path
        self._points = GrowingFile(level_file(path, 0))
        self.count = min(count, self._points.size() // _POINT.size)

    def point(self, number: int) -> tuple[float, float]:
        record = self._points.read(number * _POINT.size, _POINT.size)
        return _POINT.unpack(record) if len(record) == _POINT.size else (math.inf, math.nan)

    def ends(self) -> tuple[float, float]:
        """First and last x, of one point at least. Raises DamagedPyramid."""
        # With their neighbours, so that other bytes are noticed.
        first = self.records(0, 0, min(self.count, _NEAR))
        last = self.records(0, max(0, self.count - _NEAR), self.count)
        if not (first.x1 and last.x1 and first.x1[0] <= last.x1[-1]):
            raise DamagedPyramid(self._path)
        return first.x1[0], last.x1[-1]

    def index(self, value: float, column: int = 0) -> int:
        """The number of the first point with x at `value` or behind it; with `column` 1 y, ascending as well."""
        if not self.count:
            return 0
        first, last = self.point(0)[column], self.point(self.count - 1)[column]
        # Most are evenly spaced: the point lies where it would lie then, or near it.
        if first < value <= last:
            near = max(0, int((value - first) / (last - first) * self.count) - _NEAR // 2)
            beside = self.records(0, near, min(self.count, near + _NEAR))
            values = beside.y1 if column else beside.x1
            if values and values[0] < value <= values[-1]:
                return near + bisect_left(values, value)
        return bisect_left(range(self.count), value, key=lambda number: self.point(number)[column])

    def blocks(self, start: int, stop: int, least: int) -> Blocks:
        """The points `start` to `stop` in blocks as large as can be, but at least `least` of them where there are so
        many points: whole blocks, so that there may be a few more points at both ends. Raises DamagedPyramid."""
        level = 0
        while (stop - start) >> _SHIFT * (level + 1) >= least:
            level += 1
        unit = 1 << _SHIFT * level
        place, stop = max(0, start) & -unit, min(self.count, (stop + unit - 1) & -unit)
        parts = []
        for k in range(level, -1, -1):
            parts.append(self.records(k, place >> _SHIFT * k, stop >> _SHIFT * k))
            place = stop >> _SHIFT * k << _SHIFT * k
        columns = zip(*((part.x1, part.y1, part.x2, part.y2, part.mean) for part in parts), strict=True)
        return Blocks(*(functools.reduce(operator.add, column) for column in columns))

    def records(self, level: int, start: int, stop: int) -> Blocks:
        record = _BLOCK if level else _POINT
        file = GrowingFile(level_file(self._path, level)) if level else self._points
        data = file.read(start * record.size, (stop - start) * record.size) if stop > start else b""
        values, width = array("d"), record.size // 8
        values.frombytes(data[: len(data) // record.size * record.size])
        if sys.byteorder == "big":
            values.byteswap()
        columns = Blocks(*(values[place::width] for place in (range(5) if level else (0, 1, 0, 1, 1))))
        for xs in (columns.x1, columns.x2) if level else (columns.x1,):
            # Other bytes are hardly ever in order.
            if xs and (xs.tolist() != sorted(xs) or math.isinf(xs[0]) or math.isinf(xs[-1])):
                raise DamagedPyramid(self._path)
        return columns
