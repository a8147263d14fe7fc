"""Reads a run's series for a chart: whatever their length, at most two points for each column, over iterations, tokens
or active time."""

from __future__ import annotations

import functools
import math
import statistics
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Concatenate, Final, ParamSpec, TypeVar

from engine.errors import StateError
from engine.protocol.attempt import size_of
from engine.run.series.builder import CLOCK, SeriesBuilder, SeriesName, SeriesState, read_state
from engine.run.series.pyramid import Blocks, DamagedPyramid, PyramidReader
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
    smoothed: float
    """The lowest of its moving average; NaN also of a series of few points, and of what is no loss."""


@dataclass(frozen=True)
class SeriesChart:
    """One metric of a run in a window."""

    metric: str
    unit: str
    axis: str
    """That of x: also of a run that reports no tokens there is one."""
    curves: tuple[SeriesCurve, ...] = ()


Answer = TypeVar("Answer")
Asked = ParamSpec("Asked")


def _rebuilding(
    method: Callable[Concatenate[RunSeries, Asked], Answer],
) -> Callable[Concatenate[RunSeries, Asked], Answer]:
    """The pyramids are made anew where they have other bytes than were written."""

    @functools.wraps(method)
    def ask(series: RunSeries, /, *arguments: Asked.args, **named: Asked.kwargs) -> Answer:
        try:
            return method(series, *arguments, **named)
        except DamagedPyramid:
            series._make_anew()
            return method(series, *arguments, **named)

    return ask


class RunSeries:
    """Any thread may ask. Every answer may raise OSError or StateError, where damaged series cannot be made anew."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._counts: dict[SeriesName, tuple[int, int]] = {}
        """Series → the name of its files, and its points."""
        self._limits: dict[SeriesName, tuple[float, float]] = {}
        """First and last x, as far as they were asked for."""
        self._extents: dict[tuple[str, str], tuple[float, float]] = {}
        """The same of a metric on an axis."""
        self._built: dict[str, int | None] = {}
        """Sizes of the sources that were built from."""
        self._ended = False
        """All that an ended run has was read."""

    def refresh(self, *, ended: bool = False) -> None:
        """Take notice of new points; builds what no supervisor keeps. `ended`: no rank is waited for. Raises OSError,
        StateError."""
        with self._lock:
            if ended and self._ended:
                return
            state = read_state(self._run_dir.series)
            sources = (self._run_dir.metrics, self._run_dir.telemetry, *self._run_dir.path.glob("rank*.events.jsonl"))
            sizes = {path.name: size_of(path) for path in sources}
            read = state.offsets if state is not None else {}
            new = sizes != self._built and any((size or 0) > read.get(name, 0) for name, size in sizes.items())
            wanted = new or (state is not None and not self._is_whole(state))
            if wanted and (builder := SeriesBuilder.take(self._run_dir)) is not None:
                state, new, self._built = self._build(builder, ended=ended), False, sizes
            self._ended = ended and not new
            self._take(state)

    def _build(self, builder: SeriesBuilder, *, ended: bool) -> SeriesState | None:
        try:
            builder.poll(ended=ended)
        finally:
            builder.close()
        return read_state(self._run_dir.series)

    def _take(self, state: SeriesState | None) -> None:
        series = state.series if state is not None else []
        self._counts = {SeriesName(*name): (place, count) for place, (*name, count) in enumerate(series) if count}
        self._limits, self._extents = {}, {}

    def _make_anew(self) -> None:
        """Pyramids with other bytes than were written are replaced. Raises OSError, StateError."""
        with self._lock:
            builder = SeriesBuilder.take(self._run_dir, anew=True)
            if builder is None:
                where, todo = str(self._run_dir.series), "they are made anew once its supervisor has ended"
                raise StateError("the series are damaged", where=where, todo=todo)
            self._take(self._build(builder, ended=self._ended))

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

    @_rebuilding
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
        borders = scale.to_native([left + step * column for column in range(width + 1)])
        curves = tuple(self._curve(name, scale, borders, smooth=smooth) for name in names) if step >= 0 else ()
        return SeriesChart(metric, UNITS.get(metric, ""), scale.axis, curves)

    @_rebuilding
    def extent(self, metric: str, axis: str) -> tuple[float, float]:
        """First and last x of all that there is."""
        asked = (metric, axis)
        if asked not in self._extents:
            extents, scale = self._extents, self._scale(metric, axis, None, 1)
            low, high = scale.limits
            ends = [x for name in self._counts if name.metric == metric for x in self._ends(name)]
            ends = scale.to_axis([min(max(x, low), high) for x in ends])
            # Of what was read just now: another thread may have taken notice of new points.
            extents[asked] = (min(ends), max(ends)) if ends else (0.0, 0.0)
            return extents[asked]
        return self._extents[asked]

    @_rebuilding
    def places(self, axis: str, iterations: Sequence[float]) -> list[float]:
        """x of iterations."""
        return self._scale("loss", axis, None, 1000).to_axis(iterations)

    @_rebuilding
    def values(self, axis: str, x: float, metric: str | None = None) -> list[tuple[SeriesName, float]]:
        """The newest y of each series at x, of one metric alone where it is named; those of the clock are x itself on
        the other axes."""
        natives, values = dict[bool, float](), list[tuple[SeriesName, float]]()
        for name in (name for name in self._counts if metric in (None, name.metric)):
            reader, by_node = self._reader(name), name.metric in _BY_NODE
            if by_node not in natives:
                (natives[by_node],) = self._scale(name.metric, axis, (x, x), 2).to_native([x])
            native = natives[by_node]
            # A point's own x has lost a few digits on its way over the axis, and seconds since the epoch more of them.
            slack = 1e-6 if by_node else 1e-9 * max(1.0, abs(native))
            number = reader.index(native + slack) - 1
            if number >= 0:
                values.append((name, reader.point(number)[1]))
        return values

    @_rebuilding
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
            first, last = self._ends(name)
            is_averaged = name.metric == "loss" and reader.count >= _LEAST_AVERAGED
            average = moving_average(blocks, (last - first) * _SMOOTHED) if is_averaged else []
            smoothed = min((y for _, y in average), default=math.nan)
            figures[name] = SeriesFigures(*ends, min(lows, default=math.nan), typical, smoothed)
        return figures

    def _reader(self, name: SeriesName) -> PyramidReader:
        place, count = self._counts.get(name, (-1, 0))
        return PyramidReader(self._run_dir.series / str(place), count)

    def _ends(self, name: SeriesName) -> tuple[float, float]:
        if name not in self._limits:
            reader = self._reader(name)
            self._limits[name] = reader.ends() if reader.count else (0.0, 0.0)
        return self._limits[name]

    def _curve(self, name: SeriesName, scale: Scale, borders: Sequence[float], *, smooth: bool) -> SeriesCurve:
        reader, width = self._reader(name), len(borders) - 1
        # One more on both sides, so that lines go to the edges.
        start, stop = reader.index(borders[0]) - 1, reader.index(borders[-1]) + 1
        blocks = reader.blocks(max(0, start), min(stop + 1, reader.count), width)
        average: Points = []
        if smooth and reader.count >= _LEAST_AVERAGED:
            first, last = self._ends(name)
            constant = (last - first) * _SMOOTHED
            warm_up = reader.index(borders[0] - _WARM_UP * constant)
            average = moving_average(reader.blocks(warm_up, max(0, start), _PARTS), constant)[-1:]
            average = moving_average(blocks, constant, *average)
            xs = [x for x, _ in average]
            places = (bisect_left(xs, border) for border in (*borders, math.inf))
            average = [average[place - 1] for before, place in pairwise([0, *places]) if place > before]
        return SeriesCurve(name.label, scale.placed(columns(blocks, borders)), scale.placed(average))

    def axis_of(self, metric: str, axis: str) -> str:
        """The axis that a metric has a place on: `axis`, or another one where the run has reported nothing for it."""
        clock = self._counts.get(CLOCK["at"], (0, 0))[1]
        if not clock:
            return "time" if metric in _BY_NODE else "iterations"
        wanted = CLOCK["tokens" if axis == "tokens" else "seconds"]
        return axis if axis == "iterations" or self._counts.get(wanted, (0, 0))[1] == clock else "iterations"

    def _scale(self, metric: str, axis: str, window: tuple[float, float] | None, width: int) -> Scale:
        """Between x of a metric's series and `axis` in the window."""
        by_node, clock, axis = metric in _BY_NODE, self._reader(CLOCK["at"]), self.axis_of(metric, axis)
        if not clock.count or (axis == "iterations" and not by_node):
            begun = min((self._ends(name)[0] for name in self._counts if name.metric == metric), default=0.0)
            return Scale(axis, [begun if by_node else 0.0], [0.0])
        target = clock if axis == "iterations" else self._reader(CLOCK["tokens" if axis == "tokens" else "seconds"])
        start, stop = 0, clock.count
        if window is not None:
            start, stop = (target.index(edge, int(axis != "iterations")) for edge in window)
        reach = max(0, start - 1), min(clock.count, stop + 2), width
        mapped = target.blocks(*reach)
        times = clock.blocks(*reach) if by_node and target is not clock else mapped
        over = _knots(mapped.x1, mapped.x2) if axis == "iterations" else _knots(mapped.y1, mapped.y2)
        native = _knots(times.y1, times.y2) if by_node else _knots(mapped.x1, mapped.x2)
        limits = (clock.point(0)[1], clock.point(clock.count - 1)[1]) if by_node else (-math.inf, math.inf)
        return Scale(axis, native, over, limits)


def _knots(first: Sequence[float], second: Sequence[float]) -> list[float]:
    knots = [0.0] * (2 * len(first))
    knots[::2], knots[1::2] = first, second
    return knots


@dataclass(frozen=True)
class Scale:
    """Between x as a series has it and x on an axis: piecewise linear between `native` and `mapped`, both ascending."""

    axis: str
    native: Sequence[float]
    mapped: Sequence[float]
    limits: tuple[float, float] = (-math.inf, math.inf)
    """Native x beyond them has no place on the axis."""

    def placed(self, points: Points) -> Points:
        """Those that have a place on the axis, at it."""
        low, high = self.limits
        shown = [(x, y) for x, y in points if low <= x <= high]
        return list(zip(self.to_axis([x for x, _ in shown]), [y for _, y in shown], strict=True))

    def to_axis(self, places: Sequence[float]) -> list[float]:
        return _interpolated(places, self.native, self.mapped)

    def to_native(self, places: Sequence[float]) -> list[float]:
        return _interpolated(places, self.mapped, self.native)


def _interpolated(places: Sequence[float], xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """By the two knots around each, at the ends by the last two; steps of no width are passed over."""
    last, shift = len(xs) - 1, ys[0] - xs[0]
    if not last:
        return [x + shift for x in places] if shift else list(places)
    values = []
    for x in places:
        right = bisect_right(xs, x, 1, last)
        left = right - 1
        while left > 0 and xs[left] == xs[right]:
            left -= 1
        while right < last and xs[left] == xs[right]:
            right += 1
        width = xs[right] - xs[left]
        values.append(ys[left] + (x - xs[left]) / width * (ys[right] - ys[left]) if width else x + shift)
    return values


def columns(blocks: Blocks, borders: Sequence[float]) -> Points:
    """At most two points for each column, the lowest and the highest of the blocks that begin in it, and for what
    begins before and behind all columns."""
    if len(blocks.x1) <= len(borders):
        return _all_points(blocks)
    x1, y1, x2, y2 = blocks.x1, blocks.y1, blocks.x2, blocks.y2
    lows, highs = list(map(min, y1, y2)), list(map(max, y1, y2))
    for place in [place for place, y in enumerate(y1) if math.isnan(y)]:
        lows[place], highs[place] = math.inf, -math.inf
    places = [bisect_left(x1, border) for border in (*borders, math.inf)]
    points: Points = []
    for begin, end in pairwise([0, *places]):
        if begin == end:
            continue
        low, high = min(lows[begin:end]), max(highs[begin:end])
        lowest, highest = lows.index(low, begin, end), highs.index(high, begin, end)
        if low > high:
            points.append((x1[begin], math.nan))
        elif low == high:
            # Both ends of what is level.
            newest = end - 1 - highs[begin:end][::-1].index(high)
            points += dict.fromkeys(((x1[lowest], low), (x2[newest], low)))
        else:
            at_low = x1[lowest] if y1[lowest] == low else x2[lowest]
            at_high = x2[highest] if y2[highest] == high else x1[highest]
            points += ((at_low, low), (at_high, high)) if at_low < at_high else ((at_high, high), (at_low, low))
    return points


def _all_points(blocks: Blocks) -> Points:
    """Each block's two points, once where they are one."""
    pairs = zip(zip(blocks.x1, blocks.y1, strict=True), zip(blocks.x2, blocks.y2, strict=True), strict=True)
    return [point for first, last in pairs for point in ((first,) if first[0] == last[0] else (first, last))]


def moving_average(blocks: Blocks, constant: float, before: tuple[float, float] | None = None) -> Points:
    """Exponential, with the time constant in x, one point a block; it begins with the first value or goes on from
    `before`. A value that is not finite is passed over."""
    points: Points = []
    place, value = before or (0.0, math.nan)
    for x, mean in zip(blocks.x2, blocks.mean, strict=True):
        if math.isnan(mean):
            continue
        if constant > 0 and not math.isnan(value):
            # A step back in x has no weight.
            value -= math.expm1((place - x) / constant) * (mean - value) if x > place else 0.0
        else:
            value = mean
        place = x
        points.append((x, value))
    return points
