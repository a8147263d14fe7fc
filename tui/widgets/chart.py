"""One chart for every series of a run: several curves over iterations, tokens or active time, told apart by the kind of
their line and a letter at their end, and by colour besides.

Drawn at most twice a second, at once after a key, and only while visible. The points are read in a thread, at most two
for each column of dots."""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from textual.app import RenderResult
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from engine import api
from tui.formatting import axis_text, figure_text, scale_of
from tui.glyphs import MUTED, RANK_STYLES, Glyphs
from tui.state import ENGINE_ERRORS
from tui.widgets.plot import (
    FRAME,
    KINDS,
    MARKS,
    SAMPLES,
    Axis,
    Canvas,
    ChartMark,
    framed,
    labels_of,
    margin_of,
    mark_shape,
)

if TYPE_CHECKING:
    from engine.api import Comparison, SeriesChart
    from engine.snapshots import RunSnapshot

REDRAW_S: Final = 0.5
LEAST_ROWS: Final = 4
"""Rows of a chart at least; one of so few has no legend."""
LEAST_WIDTH: Final = 24
_GRID_CELL: Final = (38, 8)
"""Cells of a small chart at least, across and down."""
_SYMBOLS: Final = ("", "o", "+", "x", "%", "=")
"""Curves in ASCII; the first is drawn by the shape of its dots."""
_NAMED_CURVES: Final = 2
"""When there are more, each has a letter at its end."""
_MOST_CURVES: Final = 8
"""With more only the first has a band, and the values of other metrics are not asked for: there is no room."""
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_HIGHEST: Final = 1e300
"""A higher value is a gap, as what is not finite: the difference of two such values is not."""
_ZOOM_POINTS: Final = 4
"""Fewer are not zoomed in on."""

Points = Sequence[tuple[float, float]]
Marks = Sequence[tuple[float, str]]
"""Iterations, each with a key of MARKS."""


class SeriesSource(Protocol):
    """Read in a thread: `engine.api.RunSeries`, or several of them as one."""

    def refresh(self, *, ended: bool = False) -> None: ...

    @property
    def metrics(self) -> list[str]: ...

    def extent(self, metric: str, axis: str) -> tuple[float, float]: ...

    def chart(
        self, metric: str, axis: str, window: tuple[float, float] | None, width: int, *, smooth: bool = False
    ) -> SeriesChart: ...

    def places(self, axis: str, iterations: Sequence[float]) -> list[float]: ...

    def values(self, axis: str, x: float, metric: str | None = None) -> Iterable[tuple[tuple[str, str], float]]:
        """At x, of all metrics or of one."""


@dataclass(frozen=True)
class ChartCurve:
    name: str
    points: Points
    """x ascending; NaN is a gap."""
    style: str
    kind: str = "solid"
    average: Points = ()
    """Drawn in place of the points, which are the band around it then."""
    symbol: str = ""
    tag: str = ""
    """At its end, where there are many."""
    place: int = 0
    """Its style and kind stand there among all."""


@dataclass(frozen=True)
class Picture:
    """A chart, ready to be drawn."""

    metric: str
    unit: str
    curves: tuple[ChartCurve, ...]
    window: tuple[float, float]
    """First and last x."""
    axis: str = "iterations"
    wanted: str = ""
    """The axis that was asked for, where it is another one."""
    marks: tuple[ChartMark, ...] = ()
    logarithmic: bool = False
    cursor: float | None = None
    values: str = ""
    """At the cursor."""

    @property
    def title(self) -> str:
        return f"{self.metric}, {self.unit}" if self.unit else self.metric


def picture(chart: SeriesChart, window: tuple[float, float]) -> Picture:
    """Without marks and cursor."""
    # Bytes alone have a scale by their height.
    curves_of_bytes = chart.curves if chart.unit.startswith("B") else ()
    highest = max((abs(y) for curve in curves_of_bytes for _, y in curve.points if math.isfinite(y)), default=0.0)
    factor, unit = scale_of(chart.unit, highest)
    tags = _tags([curve.label for curve in chart.curves])
    curves = []
    # A validation looks the same before there is a report of the training.
    first = int([curve.label for curve in chart.curves] == ["validation"])
    for at, curve in enumerate(chart.curves):
        number = first + at if curve.place is None else curve.place
        points, average = (
            part if factor == 1 else [(x, y / factor) for x, y in part] for part in (curve.points, curve.average)
        )
        kind, style = list(KINDS)[number % len(KINDS)], RANK_STYLES[number % len(RANK_STYLES)]
        symbol = _SYMBOLS[number % len(_SYMBOLS)]
        curves.append(ChartCurve(curve.label, points, style, kind, average, symbol, tags[at], number))
    return Picture(chart.metric, unit, tuple(curves), window, chart.axis)


def _tags(labels: Sequence[str]) -> list[str]:
    """A letter of each label, or its last digit, that tells it from the others; none where there are only few."""
    if len(labels) <= _NAMED_CURVES:
        return [""] * len(labels)
    tags: list[str] = []
    for label in labels:
        letters = [letter for letter in (label[-1:] if label[-1:].isdigit() else label) + _LETTERS if letter.isalnum()]
        tags.append(next((letter for letter in letters if letter not in tags), letters[0]))
    return tags


def draw(picture: Picture, width: int, height: int, glyphs: Glyphs) -> Content:
    """The whole chart as `height` lines of `width` cells; a plain sentence when there is nothing to draw."""
    heights, logarithmic = finite_heights(picture)
    if not heights:
        return Content.styled(f"no {picture.title} yet", FRAME)
    if height < LEAST_ROWS or width < LEAST_WIDTH:
        return Content.styled("too small for the chart", FRAME)
    legend = height > LEAST_ROWS
    upright = Axis.of(heights, (height - 2 - legend) * 4, logarithmic=logarithmic)
    labels = labels_of(upright)
    columns = width - margin_of(labels) - 1
    across = Axis.across(picture.window, columns * 2, kind=picture.axis)
    canvas = Canvas(columns, upright.dots // 4)
    # The first curve is the one that matters most: it comes on top.
    bands = len(picture.curves) if len(picture.curves) <= _MOST_CURVES else 1
    ends = [_draw_curve(canvas, curve, across, upright, band=at < bands) for at, curve in enumerate(picture.curves)]
    for curve, (column, row) in zip(reversed(picture.curves), reversed(ends), strict=True):
        while column > 0 and canvas.is_written(column, row):
            column -= 1
        if curve.tag and row >= 0:
            canvas.write(column, row, curve.tag, curve.style)
    if picture.cursor is not None:
        canvas.upright(across.position(picture.cursor) // 2, "|" if glyphs.ascii else "│", FRAME)
    lines = [_legend(picture, width, glyphs, logarithmic=logarithmic)] if legend else []
    lines += framed(canvas, labels, across, glyphs, picture.marks)
    return Content("\n").join(lines)


def finite_heights(picture: Picture) -> tuple[list[float], bool]:
    """All y that are drawn, and whether on a logarithmic axis: with nothing above 0 there is none."""
    heights = [y for curve in picture.curves for _, y in curve.points if abs(y) < _HIGHEST]
    logarithmic = picture.logarithmic and any(y > 0 for y in heights)
    return [y for y in heights if y > 0 or not logarithmic], logarithmic


def _draw_curve(canvas: Canvas, curve: ChartCurve, x: Axis, y: Axis, *, band: bool) -> tuple[int, int]:
    """Column and row of its end; -1, -1 where nothing of it is drawn."""
    parts = list(_parts(curve.average or curve.points, x, y))
    for part in parts:
        canvas.curve(part, curve.style, curve.kind, curve.symbol)
    if curve.average and band:
        points = itertools.groupby(itertools.chain(*_parts(curve.points, x, y)), lambda dot: dot[0])
        for column, rows in ((column, [row for _, row in dots]) for column, dots in points):
            canvas.fill(column, min(rows), max(rows), MUTED)
    ends = [part[-1] for part in parts if part]
    return (ends[-1][0] // 2, ends[-1][1] // 4) if ends else (-1, -1)


def _parts(points: Points, x: Axis, y: Axis) -> Iterator[list[tuple[int, int]]]:
    """The dots of a curve between its gaps."""
    last, lowest = x.dots - 1, y.dots - 1
    for part in curve_parts(points, x, y):
        yield [(round(across * last), round((1 - up) * lowest)) for across, up in part]


def curve_parts(points: Points, x: Axis, y: Axis) -> Iterator[list[tuple[float, float]]]:
    """A curve between its gaps, up to the edges: shares of both axes."""
    least = 0.0 if y.logarithmic else -_HIGHEST
    drawn = [least < value < _HIGHEST for _, value in points]
    if all(drawn):
        yield _clipped(points, x, y)
        return
    for is_drawn, part in itertools.groupby(zip(drawn, points, strict=True), lambda pair: pair[0]):
        if is_drawn:
            yield _clipped([point for _, point in part], x, y)


def _clipped(part: Points, x: Axis, y: Axis) -> list[tuple[float, float]]:
    """The part of a line that lies between 0 and 1 across, within 0 and 1 upright."""
    across, up = x.shares(at for at, _ in part), y.shares(value for _, value in part)
    first, last = bisect_left(across, 0.0), bisect_right(across, 1.0)
    kept = list(zip(across[first:last], up[first:last], strict=True))

    def edge(share: float, left: int) -> list[tuple[float, float]]:
        """The line at an edge that lies between two points."""
        if not (0 <= left < len(part) - 1 and across[left] < share < across[left + 1]):
            return []
        way = (share - across[left]) / (across[left + 1] - across[left])
        return [(share, up[left] + way * (up[left + 1] - up[left]))]

    kept = [*edge(0.0, first - 1), *kept, *edge(1.0, last - 1)]
    return [(at, 0.0 if value < 0 else 1.0 if value > 1 else value) for at, value in kept]


def _legend(picture: Picture, width: int, glyphs: Glyphs, *, logarithmic: bool) -> Content:
    title = [(picture.title.replace("°", "") if glyphs.ascii else picture.title, "bold")]
    if picture.cursor is not None:
        left = Content.assemble(*title, "  ", picture.values)
        return left.truncate(width, ellipsis=not glyphs.ascii)
    parts: list[tuple[str, str]] = []
    for curve in picture.curves:
        if curve.name:
            parts.append((" ".join(filter(None, (_sample(curve, glyphs), curve.tag, curve.name))), curve.style))
    options = {"log axis": logarithmic, "average": any(curve.average for curve in picture.curves)}
    parts += [(name, FRAME) for name, on in options.items() if on]
    if picture.wanted:
        parts.append((f"{picture.axis}: {picture.wanted} not recorded", FRAME))
    elif picture.axis != "iterations":
        parts.append((picture.axis, FRAME))
    for kind in MARKS:
        if any(mark.kind == kind for mark in picture.marks):
            parts.append((f"{mark_shape(kind, glyphs)} {kind}", MARKS[kind][2]))
    gap, room = 3, width - len(picture.title) - 2
    while parts and sum(len(text) + gap for text, _ in parts) - gap > room:
        parts.pop()
    right = Content(" " * gap).join([Content.styled(text, style) for text, style in parts])
    return Content.assemble(*title, " " * max(2, width - len(picture.title) - right.cell_length), right)


def _sample(curve: ChartCurve, glyphs: Glyphs) -> str:
    if glyphs.ascii:
        return (curve.symbol or "-") * 2
    return SAMPLES[curve.kind]


@dataclass(frozen=True)
class View:
    """The part of the series that is looked at, and how."""

    metric: str | None = None
    """None: the first."""
    axis: str = "iterations"
    span: float | None = None
    """Width of the window in x; None is everything."""
    right: float | None = None
    """Its last x; None follows the end."""
    logarithmic: bool = False
    smooth: bool = False
    cursor: float | None = None
    grid: bool = False
    page: int = 0

    def window(self, extent: tuple[float, float]) -> tuple[float, float]:
        first, last = extent
        if self.span is None:
            return extent
        right = last if self.right is None else min(self.right, last)
        return max(first, right - self.span), right


@dataclass(frozen=True)
class Reading:
    """The result of reading the series for a view."""

    view: View
    metrics: tuple[str, ...] = ()
    metric: str | None = None
    extent: tuple[float, float] = (0.0, 0.0)
    pictures: tuple[Picture, ...] = ()
    """One, or the small ones of the grid."""
    read_for: tuple[object, ...] = ()
    """Where nothing of it changes, the pictures stay but for their cursor; empty while there may be new points."""


def read_picture(source: SeriesSource, view: View, metric: str, columns: int, marks: Marks) -> Picture:
    """One metric in the view's window, with at most two points a column."""
    window = view.window(source.extent(metric, view.axis))
    chart = source.chart(metric, view.axis, window, columns, smooth=view.smooth)
    places = source.places(chart.axis, [iteration for iteration, _ in marks])
    placed = tuple(ChartMark(x, kind) for x, (_, kind) in zip(places, marks, strict=True))
    wanted = view.axis if view.axis != chart.axis else ""
    return replace(picture(chart, window), logarithmic=view.logarithmic, marks=placed, wanted=wanted)


def at_cursor(source: SeriesSource, view: View, shown: Picture) -> Picture:
    """With the view's cursor, and all values there."""
    if view.cursor is None or view.grid:
        return replace(shown, cursor=None, values="")
    alone = shown.metric if len(shown.curves) > _MOST_CURVES else None
    at = {tuple(name): y for name, y in source.values(shown.axis, view.cursor, alone)}
    return replace(shown, cursor=view.cursor, values=_values(at, shown.metric, shown.axis, view.cursor))


class Chart(Widget):
    """`open` names the source; `show` says that there may be more. The keys change what is looked at."""

    @dataclass
    class MetricsRead(Message):
        """The source has other metrics than before."""

        metrics: tuple[str, ...]

    DEFAULT_CSS = "Chart { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view = View()
        self.glyphs = Glyphs()
        self.reading: Reading | None = None
        self._source: SeriesSource | None = None
        self._marks: Marks = ()
        self._snapshot: RunSnapshot | Comparison | None = None
        self._fault = ""
        self._busy = False
        self._again = False
        """It is to be read anew once the reading under way has ended."""
        self._due = False
        """A timer reads it."""
        self._read_at = float("-inf")

    def open(self, source: SeriesSource | None) -> None:
        if source is not self._source:
            self._source, self._snapshot, self.reading, self._fault = source, None, None, ""
            self.view = replace(self.view, span=None, right=None, cursor=None)
            self.post_message(self.MetricsRead(()))
            self.refresh()

    def show(self, snapshot: RunSnapshot | Comparison, marks: Marks, glyphs: Glyphs) -> None:
        """There may be new points, where it is another snapshot than before."""
        self._marks, self.glyphs = marks, glyphs
        if snapshot is not self._snapshot:
            self._snapshot = snapshot
            self._read_soon()

    @property
    def settled(self) -> bool:
        """Nothing is to be read."""
        return not (self._busy or self._again or self._due)

    @property
    def _seen(self) -> bool:
        return self.is_on_screen and bool(self.size.width)

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.reading.metrics if self.reading is not None else ()

    def change(self, **view: object) -> None:
        """Look at something else, at once."""
        self.view = replace(self.view, **view)  # type: ignore[arg-type]
        self._read()

    def do(self, action: str) -> None:
        CHART_ACTIONS[action](self)

    def next_metric(self) -> None:
        if self.view.grid:
            self.change(page=self.view.page + 1)
        elif self.metrics:
            place = self.metrics.index(self.view.metric) + 1 if self.view.metric in self.metrics else 1
            self.change(metric=self.metrics[place % len(self.metrics)])

    def next_axis(self) -> None:
        place = api.AXES.index(self.view.axis) + 1
        self.change(axis=api.AXES[place % len(api.AXES)], span=None, right=None, cursor=None)

    def zoom(self, factor: float) -> None:
        """Show `factor` of what is shown, around the cursor, else at the end that is followed or around the middle."""
        if self.reading is None or not self.reading.pictures:
            return
        (low, high), (first, last) = self.view.window(self.reading.extent), self.reading.extent
        shown = sum(low <= x <= high for curve in self.reading.pictures[0].curves for x, _ in curve.points)
        if factor < 1 and shown <= _ZOOM_POINTS:
            return
        span, middle = (high - low) * factor, self.view.cursor
        if span >= last - first:
            self.change(span=None, right=None)
            return
        share = (middle - low) / (high - low) if middle is not None and high > low else 0.5
        right = low + (high - low) * share + span * (1 - share)
        follows = middle is None and self.view.right is None and self.view.span is not None
        self.change(span=span, right=None if follows or right >= last else max(right, first + span))

    def pan(self, direction: int) -> None:
        if self.reading is None or self.view.span is None:
            return
        first, last = self.reading.extent
        right = (last if self.view.right is None else self.view.right) + direction * self.view.span / 2
        self.change(right=None if right >= last else max(right, first + self.view.span))

    def move_cursor(self, direction: int) -> None:
        """To the next point that lies in another column."""
        if self.reading is None or not self.reading.pictures or self.view.grid:
            return
        shown = self.reading.pictures[0]
        low, high = shown.window
        columns = max(2, self.size.width - 8)
        across = Axis.across(shown.window, columns)
        xs = sorted({x for curve in shown.curves for x, _ in curve.points if low <= x <= high})
        if not xs:
            return
        here = self.view.cursor
        if here is None:
            self.change(cursor=xs[-1])
            return
        beyond = [x for x in xs if (across.position(x) - across.position(here)) * direction > 0]
        if beyond:
            self.change(cursor=beyond[0] if direction > 0 else beyond[-1])

    def back(self) -> bool:
        """Take away the cursor, else the grid; False when there is neither."""
        if self.view.cursor is None and not self.view.grid:
            return False
        self.change(**({"cursor": None} if self.view.cursor is not None else {"grid": False, "page": 0}))
        return True

    def on_show(self) -> None:
        self._read_soon()

    def on_resize(self) -> None:
        self._read()

    def _read_soon(self) -> None:
        """Read at most every REDRAW_S."""
        wait = self._read_at + REDRAW_S - monotonic()
        if self._due:
            return
        if wait > 0:
            self._due = True
            self.set_timer(wait, self._read_due)
        else:
            self._read()

    def _read_due(self) -> None:
        self._due = False
        self._read()

    def _read(self) -> None:
        # What there is to be shown is read before it can be seen.
        if self._source is None or not (self.is_attached and (self._seen or not self.metrics)):
            return
        if self._busy:
            self._again = True
        else:
            self._busy, self._again, self._read_at = True, False, monotonic()
            self.run_worker(self._reread, group="chart")  # type: ignore[arg-type]

    async def _reread(self) -> None:
        source = self._source
        try:
            reading = await asyncio.to_thread(self._load, source, self.view) if source is not None else None
            if source is self._source:
                before, self.reading, self._fault = self.metrics, reading, ""
                if self.metrics != before:
                    self.post_message(self.MetricsRead(self.metrics))
        except ENGINE_ERRORS as error:
            self._fault = str(error)
        finally:
            self._busy = False
        self.refresh()
        if self._again:
            self._again = False
            self._read()

    def _load(self, source: SeriesSource, view: View) -> Reading:
        """In a thread."""
        ended, before = self._snapshot is not None and self._snapshot.ended, self.reading
        read_for = (source, replace(view, cursor=None), self.size, self._marks) if ended else ()
        if ended and before is not None and before.read_for == read_for:
            return replace(before, view=view, pictures=tuple(at_cursor(source, view, old) for old in before.pictures))
        source.refresh(ended=ended)
        metrics = tuple(source.metrics)
        if not metrics:
            return Reading(view)
        metric = view.metric if view.metric in metrics else metrics[0]
        extent = source.extent(metric, view.axis)
        if view.grid:
            across, down = self._grid()
            pages = math.ceil(len(metrics) / (across * down))
            first = view.page % pages * across * down
            names, width = metrics[first : first + across * down], self.size.width // across
        else:
            names, width = (metric,), self.size.width
        columns = max(1, width - 8) * 2
        pictures = (read_picture(source, view, name, columns, self._marks) for name in names)
        shown = tuple(at_cursor(source, view, new) for new in pictures)
        return Reading(view, metrics, metric, extent, shown, read_for)

    def read_pictures(self, columns: int) -> tuple[Picture, ...]:
        """Those that are shown, for a wider chart. In a thread."""
        if self._source is None or self.reading is None:
            return ()
        names = [shown.metric for shown in self.reading.pictures]
        return tuple(read_picture(self._source, self.view, name, columns, self._marks) for name in names)

    def _grid(self) -> tuple[int, int]:
        """Small charts across and down."""
        return max(1, self.size.width // _GRID_CELL[0]), max(1, self.size.height // _GRID_CELL[1])

    def render(self) -> RenderResult:
        width, height = self.size
        if self._fault:
            return Content.styled(f"the series cannot be read: {self._fault}", "$warning")
        if self.reading is None:
            return Content.styled("reading the series", FRAME)
        if not self.reading.pictures:
            return Content.styled("no figures yet", FRAME)
        if not self.reading.view.grid:
            return draw(self.reading.pictures[0], width, height, self.glyphs)
        across, _ = self._grid()
        down = math.ceil(len(self.reading.pictures) / across)
        cell, lines = (width - 2 * (across - 1)) // across, []
        for start in range(0, len(self.reading.pictures), across):
            row = self.reading.pictures[start : start + across]
            drawn = [draw(replace(shown, marks=()), cell, height // down, self.glyphs).split("\n") for shown in row]
            for number in range(height // down):
                parts = [small[number] if number < len(small) else Content("") for small in drawn]
                lines.append(Content("  ").join([part.pad_right(max(0, cell - part.cell_length)) for part in parts]))
        return Content("\n").join(lines)


CHART_ACTIONS: Final[Mapping[str, Callable[[Chart], None]]] = {
    "next_metric": Chart.next_metric,
    "metric_grid": lambda chart: chart.change(grid=not chart.view.grid, page=0),
    "chart_axis": Chart.next_axis,
    "chart_average": lambda chart: chart.change(smooth=not chart.view.smooth),
    "log_axis": lambda chart: chart.change(logarithmic=not chart.view.logarithmic),
    "zoom_in": lambda chart: chart.zoom(0.5),
    "zoom_out": lambda chart: chart.zoom(2.0),
    "pan_left": lambda chart: chart.pan(-1),
    "pan_right": lambda chart: chart.pan(1),
    "fit_chart": lambda chart: chart.change(span=None, right=None),
}
"""By the action that a chart does itself."""


def _values(at: dict[tuple[str, ...], float], metric: str, axis: str, x: float) -> str:
    """All values at the cursor, those of the shown metric first."""
    parts = [f"{axis.removesuffix('s')} {axis_text(axis)(x)}"]
    for (name, label), y in sorted(at.items(), key=lambda item: item[0][0] != metric):
        if name != "clock":
            title = label if name == metric and label else f"{name} {label}".strip()
            parts.append(f"{title} {figure_text(y, api.UNITS.get(name, ''))}")
    return "   ".join(parts)
