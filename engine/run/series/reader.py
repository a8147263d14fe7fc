"""Reads a run's series for a chart: whatever their length, at most two points for each column, over iterations, tokens
or active time."""

from __future__ import annotations

import math
import statistics
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from engine.protocol.attempt import size_of
from engine.run.series.builder import CLOCK, SeriesBuilder, SeriesName, SeriesState, read_state
from engine.run.series.pyramid import Blocks, PyramidReader
from engine.store.layout import RunDir

AXES: Final = ("iterations", "tokens", "time")
"""Kinds of x; "time" is active seconds."""
UNITS: Final = {
    "throughput": "tok/s",
    "step time": "s",
    "compute": "s",
    "memory": "B",
    "skew": "%",
    "GPU use": "%",
    "CPU use": "%",
    "power": "W",
    "temperature": "°C",
    "memory used": "B",
    "network": "B/s",
}
"""Units of y, by metric; "%" of shares of one."""
ORDER: Final = ("loss", "learning rate", "gradient", *UNITS)
"""Metrics in the order in which they are shown; any other figure of a report follows."""
_LABELS: Final = ("train", "validation", "whole", "compute")
"""Curves of a metric that come before its others."""
_BY_NODE: Final = frozenset({"GPU use", "CPU use", "power", "temperature", "memory used", "network"})
"""Metrics over seconds since the epoch and not over iterations."""
_BLOCKS_PER_COLUMN: Final = 3
_PARTS: Final = 64
_SMOOTHED: Final = 0.02
"""Time constant of the moving average, as a share of the whole series."""
_LEAST_AVERAGED: Final = 16
"""A series of fewer points has no average."""
_WARM_UP: Final = 5
"""Time constants before a window in which its average begins."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class SeriesCurve:
    """One series in a window, x ascending."""

    label: str
    points: Points
    """At most two a column, the lowest and the highest; NaN where there was no finite value."""
    average: Points
    """Exponential moving average, at most one point a column."""
    place: int | None = None
    """By which its colour is chosen; None: its number among the curves."""


@dataclass(frozen=True)
class SeriesFigures:
    """A whole series in figures; NaN where it has no finite value."""

    first: float
    last: float
    lowest: float
    typical: float
    """The median of the means of its parts."""


@dataclass(frozen=True)
class SeriesChart:
    """One metric of a run in a window."""

    metric: str
    unit: str
    axis: str
    """That of x: also of a run that reports no tokens there is one."""
    curves: tuple[SeriesCurve, ...] = ()


class RunSeries:
    """Any thread may ask."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._counts: dict[SeriesName, tuple[int, int]] = {}
        """Series → the name of its files, and its points."""
        self._built: dict[str, int | None] = {}
        """Sizes of the sources that were built from."""

    def refresh(self, *, ended: bool = False) -> None:
        """Take notice of new points; builds what no supervisor keeps. `ended`: no rank is waited for. Raises OSError,
        StateError."""
        with self._lock:
            state = read_state(self._run_dir.series)
            sources = (self._run_dir.metrics, self._run_dir.telemetry, *self._run_dir.path.glob("rank*.events.jsonl"))
            sizes = {path.name: size_of(path) for path in sources}
            read = state.offsets if state is not None else {}
            new = sizes != self._built and any((size or 0) > read.get(name, 0) for name, size in sizes.items())
            if new or (state is not None and not self._is_whole(state)):
                builder = SeriesBuilder.take(self._run_dir)
                if builder is not None:
                    try:
                        builder.poll(ended=ended)
                    finally:
                        builder.close()
                    self._built, state = sizes, read_state(self._run_dir.series)
            series = state.series if state is not None else []
            self._counts = {SeriesName(*name): (place, count) for place, (*name, count) in enumerate(series) if count}

    def _is_whole(self, state: SeriesState) -> bool:
        """The points are there; a loss of power may have left fewer."""
        folder = self._run_dir.series
        return all(
            PyramidReader(folder / str(place), count).count == count for place, (*_, count) in enumerate(state.series)
        )

    @property
    def metrics(self) -> list[str]:
        names = dict.fromkeys(name.metric for name in self._counts if name.metric != "clock")
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def chart(
        self, metric: str, axis: str, window: tuple[float, float] | None, width: int, *, smooth: bool = False
    ) -> SeriesChart:
        """`window`: its first and last x, None for everything. `width`: columns."""
        names = sorted(
            (name for name in self._counts if name.metric == metric),
            key=lambda name: (_LABELS.index(name.label) if name.label in _LABELS else len(_LABELS), name.label),
        )
        scale = self._scale(metric, axis, window, width)
        left, right = window or self.extent(metric, axis)
        step = (right - left) / max(1, width)
        borders = [scale.to_native(left + step * column) for column in range(width + 1)]
        curves = tuple(self._curve(name, scale, borders, smooth=smooth) for name in names) if step >= 0 else ()
        return SeriesChart(metric, UNITS.get(metric, ""), scale.axis, curves)

    def extent(self, metric: str, axis: str) -> tuple[float, float]:
        """First and last x of all that there is."""
        scale = self._scale(metric, axis, None, 1)
        limits = scale.limits
        ends = [
            scale.to_axis(min(max(x, limits[0]), limits[1]))
            for name in self._counts
            if name.metric == metric
            for x in self._ends(name)
        ]
        return (min(ends), max(ends)) if ends else (0.0, 0.0)

    def places(self, axis: str, iterations: Sequence[float]) -> list[float]:
        """x of iterations."""
        scale = self._scale("loss", axis, None, 1000)
        return [scale.to_axis(iteration) for iteration in iterations]

    def values(self, axis: str, x: float) -> Iterator[tuple[SeriesName, float]]:
        """The newest y of each series at x; those of the clock are x itself on the other axes."""
        natives: dict[bool, float] = {}
        for name in self._counts:
            reader, by_node = self._reader(name), name.metric in _BY_NODE
            if by_node not in natives:
                natives[by_node] = self._scale(name.metric, axis, (x, x), 2).to_native(x)
            native = natives[by_node]
            number = reader.index(math.nextafter(native, math.inf)) - 1
            if number >= 0:
                yield name, reader.point(number)[1]

    def figures(self) -> dict[tuple[str, str], SeriesFigures]:
        """By metric and label."""
        figures = dict[tuple[str, str], SeriesFigures]()
        for name in self._counts:
            reader = self._reader(name)
            blocks = reader.blocks(0, reader.count, _PARTS)
            lows = [min(pair) for pair in zip(blocks.y1, blocks.y2, strict=True) if pair[0] == pair[0]]
            means = [mean for mean in blocks.mean if not math.isnan(mean)]
            typical = statistics.median(means) if means else math.nan
            ends = reader.point(0)[1], reader.point(reader.count - 1)[1]
            figures[name] = SeriesFigures(*ends, min(lows, default=math.nan), typical)
        return figures

    def _reader(self, name: SeriesName) -> PyramidReader:
        place, count = self._counts.get(name, (-1, 0))
        return PyramidReader(self._run_dir.series / str(place), count)

    def _ends(self, name: SeriesName) -> tuple[float, float]:
        reader = self._reader(name)
        return (reader.point(0)[0], reader.point(reader.count - 1)[0]) if reader.count else (0.0, 0.0)

    def _curve(self, name: SeriesName, scale: Scale, borders: Sequence[float], *, smooth: bool) -> SeriesCurve:
        reader, width = self._reader(name), len(borders) - 1
        # One more on both sides, so that lines go to the edges.
        start, stop = reader.index(borders[0]) - 1, reader.index(borders[-1]) + 1
        blocks = reader.blocks(max(0, start), min(stop + 1, reader.count), _BLOCKS_PER_COLUMN * width)
        average: Points = []
        if smooth and reader.count >= _LEAST_AVERAGED:
            first, last = self._ends(name)
            constant = (last - first) * _SMOOTHED
            warm_up = reader.index(borders[0] - _WARM_UP * constant)
            average = moving_average(reader.blocks(warm_up, max(0, start), width), constant)[-1:]
            average = moving_average(blocks, constant, *average)
            places = (bisect_left(average, (border,)) for border in (*borders, math.inf))
            average = [average[place - 1] for before, place in pairwise([0, *places]) if place > before]
        shown = scale.shows
        points = [(scale.to_axis(x), y) for x, y in columns(blocks, borders) if shown(x)]
        return SeriesCurve(name.label, points, [(scale.to_axis(x), y) for x, y in average if shown(x)])

    def _scale(self, metric: str, axis: str, window: tuple[float, float] | None, width: int) -> Scale:
        """Between x of a metric's series and `axis` in the window."""
        by_node, clock = metric in _BY_NODE, self._reader(CLOCK["at"])
        wanted = CLOCK["tokens" if axis == "tokens" else "seconds"]
        if axis != "iterations" and self._counts.get(wanted, (0, 0))[1] != clock.count:
            axis, wanted = "iterations", CLOCK["seconds"]
        if not clock.count or (axis == "iterations" and not by_node):
            begun = min((self._ends(name)[0] for name in self._counts if name.metric == metric), default=0.0)
            return Scale("time" if by_node else "iterations", [begun if by_node else 0.0], [0.0])
        target = clock if axis == "iterations" else self._reader(wanted)
        start, stop = 0, clock.count
        if window is not None:
            column = 0 if axis == "iterations" else 1
            start, stop = (
                bisect_left(range(stop), edge, key=lambda number: target.point(number)[column]) for edge in window
            )
        reach = max(0, start - 1), min(clock.count, stop + 2), _BLOCKS_PER_COLUMN * width
        mapped, times = target.blocks(*reach), clock.blocks(*reach)
        over = _knots(mapped.x1, mapped.x2) if axis == "iterations" else _knots(mapped.y1, mapped.y2)
        knots = _knots(times.y1, times.y2) if by_node else _knots(times.x1, times.x2)
        limits = (clock.point(0)[1], clock.point(clock.count - 1)[1]) if by_node else (-math.inf, math.inf)
        return Scale(axis, knots, over, limits)


def _knots(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [value for pair in zip(first, second, strict=True) for value in pair]


@dataclass(frozen=True)
class Scale:
    """Between x as a series has it and x on an axis: piecewise linear between `native` and `mapped`, both ascending."""

    axis: str
    native: Sequence[float]
    mapped: Sequence[float]
    limits: tuple[float, float] = (-math.inf, math.inf)
    """Native x beyond them has no place on the axis."""

    def to_axis(self, x: float) -> float:
        return _interpolated(x, self.native, self.mapped)

    def to_native(self, x: float) -> float:
        return _interpolated(x, self.mapped, self.native)

    def shows(self, native: float) -> bool:
        return self.limits[0] <= native <= self.limits[1]


def _interpolated(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """By the two knots around x, at the ends by the last two; steps of no width are passed over."""
    right = min(max(1, bisect_right(xs, x)), len(xs) - 1)
    left = right - 1
    while left > 0 and xs[left] == xs[right]:
        left -= 1
    while right < len(xs) - 1 and xs[left] == xs[right]:
        right += 1
    if right <= left or xs[left] == xs[right]:
        return ys[0] + x - xs[0]
    return ys[left] + (x - xs[left]) / (xs[right] - xs[left]) * (ys[right] - ys[left])


def columns(blocks: Blocks, borders: Sequence[float]) -> Points:
    """At most two points for each column, the lowest and the highest of the blocks that begin in it, and for what
    begins before and behind all columns."""
    if len(blocks.x1) <= len(borders):
        return _all_points(blocks)
    places = [bisect_left(blocks.x1, border) for border in (*borders, math.inf)]
    return [point for begin, end in pairwise([0, *places]) if begin < end for point in _extremes(blocks, begin, end)]


def _all_points(blocks: Blocks) -> Points:
    """Each block's two points, once where they are one."""
    points = [point for row in blocks.rows() for point in ((row.x1, row.y1), (row.x2, row.y2))]
    return [point for before, point in pairwise([(-math.inf, 0.0), *points]) if point[0] != before[0]]


def _extremes(blocks: Blocks, begin: int, end: int) -> Points:
    part = slice(begin, end)
    pairs = zip((*blocks.y1[part], *blocks.y2[part]), (*blocks.x1[part], *blocks.x2[part]), strict=True)
    finite = [pair for pair in pairs if pair[0] == pair[0]]
    if not finite:
        return [(blocks.x1[begin], math.nan)]
    return sorted({(x, y) for y, x in (min(finite), max(finite))})


def moving_average(blocks: Blocks, constant: float, before: tuple[float, float] | None = None) -> Points:
    """Exponential, with the time constant in x, one point a block; it begins with the first value or goes on from
    `before`. A value that is not finite is passed over."""
    points: Points = []
    place, value = before or (0.0, math.nan)
    for x, mean in zip(blocks.x2, blocks.mean, strict=True):
        if math.isnan(mean):
            continue
        weight = -math.expm1((place - x) / constant) if constant > 0 and not math.isnan(value) else 1.0
        place, value = x, mean if weight >= 1.0 else value + max(0.0, weight) * (mean - value)
        points.append((x, value))
    return points
