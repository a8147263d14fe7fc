"""Train and validation loss over iterations, drawn in braille dots (ASCII where that is all there is), with
checkpoints and restarts as marks on the axis.

Drawn at most twice a second and only while visible; the series is decimated to the width first. plotext (6.1) was not
used: it draws on one figure per process and returns escape codes over a background of its own, while here every cell
takes the theme's variables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Final

from textual.app import RenderResult
from textual.content import Content
from textual.widget import Widget

from engine import api
from tui.glyphs import MUTED, Glyphs

if TYPE_CHECKING:
    from engine.snapshots import Series, SeriesMark


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` (low < high; both > 0 when logarithmic) on `dots` dots, 0 at `low`."""

    low: float
    high: float
    dots: int
    logarithmic: bool = False

    @classmethod
    def of(cls, values: Sequence[float], dots: int, *, logarithmic: bool = False) -> Axis:
        """The axis on which all `values` (finite, at least one) fit; never of no height."""
        low, high = min(values), max(values)
        logarithmic = logarithmic and low > 0
        if high - low < 1e-9 * max(1.0, abs(high)):
            margin = abs(high) * 0.05 or 0.5
            low, high = low - margin, high + margin
        return cls(low, high, max(1, dots), logarithmic)

    def position(self, value: float) -> int:
        """The dot of `value`; values outside are clamped to the ends."""
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(max(0.0, min(1.0, share)) * (self.dots - 1))

    def ticks(self, count: int) -> list[float]:
        """About `count` round values within the axis, ascending."""
        if self.logarithmic and self.high / self.low > 20:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            multiples = (1, 2, 5) if (last - first) * 2 <= count else (1,)
            values = [m * 10.0**power for power in range(first, last + 1) for m in multiples]
        else:
            step = step_of((self.high - self.low) / max(1, count))
            start = math.ceil(self.low / step - 1e-9)
            values = [index * step for index in range(start, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in values if self.low <= value <= self.high]


def step_of(rough: float) -> float:
    """The next of 1, 2, 5 × a power of ten that is at least `rough` (> 0)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A tick's label, with as many decimals as tell neighbours `step` apart from each other."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(decimals, 6)}f}"


_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a dot by its row and column within the cell."""
_ASCII_ROWS: Final = ("'", "-", "-", ".")
_BLANK: Final = 0x2800


class Canvas:
    """`width` × `height` cells; dots count from the top left, (0, 0) to (2·width - 1, 4·height - 1)."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._masks = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot; outside the canvas nothing happens."""
        column, row = x >> 1, y >> 2
        if 0 <= column < self.width and 0 <= row < self.height:
            self._masks[row][column] |= _DOTS[y & 3][x & 1]
            self._styles[row][column] = style

    def line(self, start: tuple[int, int], end: tuple[int, int], style: str, *, dotted: bool = False) -> None:
        """A straight line, both ends set (Bresenham); `dotted` sets every third dot only."""
        (x, y), (end_x, end_y) = start, end
        run, rise = abs(end_x - x), -abs(end_y - y)
        step_x, step_y = (1 if end_x > x else -1), (1 if end_y > y else -1)
        error = run + rise
        while True:
            if not dotted or (x + y) % 3 == 0 or (x, y) in (start, end):
                self.dot(x, y, style)
            if (x, y) == (end_x, end_y):
                return
            doubled = 2 * error
            if doubled >= rise:
                error += rise
                x += step_x
            if doubled <= run:
                error += run
                y += step_y

    def curve(self, dots: Sequence[tuple[int, int]], style: str, *, dotted: bool = False) -> None:
        if len(dots) == 1:
            self.dot(*dots[0], style)
        for start, end in pairwise(dots):
            self.line(start, end, style, dotted=dotted)

    def row(self, number: int, *, ascii: bool = False) -> Content:
        parts: list[str | tuple[str, str]] = []
        for mask, style in zip(self._masks[number], self._styles[number], strict=True):
            text = _ascii(mask) if ascii else (chr(_BLANK + mask) if mask else " ")
            if parts and isinstance(parts[-1], tuple) and parts[-1][1] == style:
                parts[-1] = (parts[-1][0] + text, style)
            else:
                parts.append((text, style))
        return Content.assemble(*parts)


def _ascii(mask: int) -> str:
    if not mask:
        return " "
    rows = [index for index, (left, right) in enumerate(_DOTS) if mask & (left | right)]
    return "|" if len(rows) > 2 else _ASCII_ROWS[rows[0]]


REDRAW_S: Final = 0.5
TRAIN: Final = "$text-primary"
VALIDATION: Final = "$text-accent"
FRAME: Final = MUTED
_MARK_STYLES: Final = {"checkpoint": "$success", "restart": "$warning"}

LEAST_ROWS: Final = 4
"""Rows of a plot at least; one of so few has no legend."""

Points = Sequence[tuple[int, float]]


class LossPlot(Widget):
    """The plot; `show` hands it what there is, `log_axis` turns the loss axis logarithmic."""

    DEFAULT_CSS = "LossPlot { height: 1fr; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._series: Series | None = None
        self._glyphs = Glyphs()
        self._drawn_at = -REDRAW_S
        self._due = False
        self.log_axis = False

    def show(self, series: Series, glyphs: Glyphs) -> None:
        """Take a newer series; drawn when the last drawing is half a second old."""
        if series == self._series and glyphs == self._glyphs:
            return
        self._series, self._glyphs = series, glyphs
        wait = self._drawn_at + REDRAW_S - monotonic()
        if wait <= 0:
            self._draw()
        elif not self._due:
            self._due = True
            self.set_timer(wait, self._draw)

    def toggle_log_axis(self) -> None:
        self.log_axis = not self.log_axis
        self._draw()

    def _draw(self) -> None:
        self._due = False
        self._drawn_at = monotonic()
        self.refresh()

    def render(self) -> RenderResult:
        if self._series is None:
            return Content("")
        width, height = self.size
        return draw(self._series, width, height, glyphs=self._glyphs, logarithmic=self.log_axis)


def draw(series: Series, width: int, height: int, *, glyphs: Glyphs, logarithmic: bool) -> Content:
    """The whole plot as `height` lines of `width` cells; a plain sentence when there is nothing to draw."""
    train, val = _finite(series.train), _finite(series.val)
    if not train and not val:
        return Content.styled("no loss yet", FRAME)
    legend = height > LEAST_ROWS
    rows = height - 2 - legend
    if height < LEAST_ROWS or width < 24:
        return Content.styled("too small for the loss plot", FRAME)
    values = [loss for _, loss in (*train, *val)]
    loss_axis = Axis.of(values, rows * 4, logarithmic=logarithmic)
    labels = labels_of(loss_axis)
    columns = width - margin_of(labels) - 1
    steps = [iteration for iteration, _ in (*train, *val)]
    step_axis = Axis(min(steps), max(*steps, min(steps) + 1), columns * 2)
    canvas = Canvas(columns, rows)
    canvas.curve(_dots(val, step_axis, loss_axis), VALIDATION, dotted=True)
    canvas.curve(_dots(train, step_axis, loss_axis), TRAIN)
    lines = [_legend(series, width, glyphs, loss_axis.logarithmic)] if legend else []
    lines += framed(canvas, labels, step_axis, glyphs, series.marks)
    return Content("\n").join(lines)


def framed(
    canvas: Canvas, labels: Mapping[int, str], x: Axis, glyphs: Glyphs, marks: Sequence[SeriesMark] = ()
) -> list[Content]:
    """The canvas with both axes: `labels` by row, and whole numbers below, with marks at some of them."""
    margin = margin_of(labels)
    edge, ticked = ("|", "+") if glyphs.ascii else ("│", "┤")
    lines = []
    for row in range(canvas.height):
        label = labels.get(row, "")
        frame = f"{label:>{margin - 1}} {ticked if label else edge}"
        lines.append(Content.assemble((frame, FRAME), canvas.row(row, ascii=glyphs.ascii)))
    return lines + _foot(marks, x, margin, canvas.width, glyphs)


def labels_of(axis: Axis) -> dict[int, str]:
    """Ticks of an upright axis by the row of cells, from the top."""
    rows = axis.dots // 4
    ticks = _ticks(axis, max(2, rows // 3))
    return {rows - 1 - axis.position(tick) // 4: _tick(tick, ticks) for tick in ticks}


def margin_of(labels: Mapping[int, str]) -> int:
    """Cells left of an upright axis with these labels."""
    return max([len(label) for label in labels.values()], default=0) + 1


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(iteration, loss) for iteration, loss in points if math.isfinite(loss)]


def _ticks(axis: Axis, count: int) -> list[float]:
    """At least two, which a scale needs, where round numbers allow it."""
    return next((ticks for more in range(4) if len(ticks := axis.ticks(count + more)) > 1), axis.ticks(count))


def _tick(value: float, ticks: Sequence[float]) -> str:
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    return tick_text(value, step)


def _dots(points: Points, x: Axis, y: Axis) -> list[tuple[int, int]]:
    """Dots of a canvas as large as the axes."""
    return [(x.position(step), y.dots - 1 - y.position(loss)) for step, loss in api.decimate(points, x.dots)]


def _mark(kind: str, glyphs: Glyphs) -> str:
    if glyphs.ascii:
        return "v" if kind == "checkpoint" else "@"
    return "▾" if kind == "checkpoint" else "↻"


def _legend(series: Series, width: int, glyphs: Glyphs, logarithmic: bool) -> Content:
    parts: list[tuple[str, str]] = []
    if series.train:
        parts.append(("-- train" if glyphs.ascii else "── train", TRAIN))
    if series.val:
        parts.append((".. val" if glyphs.ascii else "⠒⠂ val", VALIDATION))
    for kind in dict.fromkeys(mark.kind for mark in series.marks):
        parts.append((f"{_mark(kind, glyphs)} {kind}", _MARK_STYLES.get(kind, FRAME)))
    if logarithmic:
        parts.append(("log axis", FRAME))
    gap = 3
    while parts and sum(len(text) + gap for text, _ in parts) - gap > width:
        parts.pop()
    return Content(" " * gap).join([Content.styled(text, style) for text, style in parts]).right(width)


def _foot(marks: Sequence[SeriesMark], x: Axis, margin: int, columns: int, glyphs: Glyphs) -> list[Content]:
    """The axis with its marks, and the numbers below it."""
    corner, flat, tick_shape = ("+", "-", "+") if glyphs.ascii else ("└", "─", "┬")
    cells = [(flat, FRAME)] * columns
    numbers = [" "] * columns
    whole = [int(tick) for tick in x.ticks(max(1, columns // 12)) if float(tick).is_integer()]
    for tick in whole:
        column = x.position(tick) // 2
        cells[column] = (tick_shape, FRAME)
        text = f"{tick:,}"
        start = min(max(0, column - len(text) // 2), columns - len(text))
        if start >= 0 and all(cell == " " for cell in numbers[max(0, start - 1) : start + len(text) + 1]):
            numbers[start : start + len(text)] = text
    for mark in marks:
        if x.low <= mark.iteration <= x.high:
            style = _MARK_STYLES.get(mark.kind, FRAME)
            cells[x.position(mark.iteration) // 2] = (_mark(mark.kind, glyphs), style)
    axis = Content.assemble((" " * margin + corner, FRAME), *cells).simplify()
    return [axis, Content.styled(" " * (margin + 1) + "".join(numbers), FRAME)]
