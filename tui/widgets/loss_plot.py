"""Train and validation loss against iteration, with checkpoints and restarts as marks on the axis.

Drawn at most twice a second and only while it is on the screen; the series is decimated to the width before drawing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, Final

from textual.app import RenderResult
from textual.content import Content
from textual.widget import Widget

from tui.glyphs import MUTED, Glyphs
from tui.widgets.axis import Axis, tick_text
from tui.widgets.braille import Canvas

if TYPE_CHECKING:
    from engine.events import Series

REDRAW_S: Final = 0.5
TRAIN: Final = "$text-primary"
VALIDATION: Final = "$text-accent"
FRAME: Final = MUTED
_MARK_STYLES: Final = {"checkpoint": "$success", "restart": "$warning"}

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
    rows = height - 3
    if rows < 2 or width < 24:
        return Content.styled("too small for the loss plot", FRAME)
    values = [loss for _, loss in (*train, *val)]
    loss_axis = Axis.of(values, rows * 4, logarithmic=logarithmic)
    ticks = _ticks(loss_axis, max(2, rows // 3))
    labels = {rows - 1 - loss_axis.position(tick) // 4: _tick(tick, ticks) for tick in ticks}
    margin = max([len(label) for label in labels.values()], default=0) + 1
    columns = width - margin - 1
    steps = [iteration for iteration, _ in (*train, *val)]
    step_axis = Axis(min(steps), max(*steps, min(steps) + 1), columns * 2)
    canvas = Canvas(columns, rows)
    _curve(canvas, val, step_axis, loss_axis, VALIDATION, dotted=True)
    _curve(canvas, train, step_axis, loss_axis, TRAIN)
    lines = [_legend(series, width, glyphs, loss_axis.logarithmic)]
    edge, ticked = ("|", "+") if glyphs.ascii else ("│", "┤")
    for row in range(rows):
        label = labels.get(row, "")
        frame = f"{label:>{margin - 1}} {ticked if label else edge}"
        lines.append(Content.assemble((frame, FRAME), canvas.row(row, ascii=glyphs.ascii)))
    lines += _foot(series, step_axis, margin, columns, glyphs)
    return Content("\n").join(lines)


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(iteration, loss) for iteration, loss in points if math.isfinite(loss)]


def _ticks(axis: Axis, count: int) -> list[float]:
    """At least two, which a scale needs, where round numbers allow it."""
    return next((found for more in range(4) if len(found := axis.ticks(count + more)) > 1), axis.ticks(count))


def _tick(value: float, ticks: Sequence[float]) -> str:
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    return tick_text(value, step)


def _curve(canvas: Canvas, points: Points, x: Axis, y: Axis, style: str, *, dotted: bool = False) -> None:
    from engine.runs.metrics import decimate  # after the first paint only

    top = canvas.height * 4 - 1
    dots = [(x.position(step), top - y.position(loss)) for step, loss in decimate(points, canvas.width * 2)]
    if len(dots) == 1:
        canvas.dot(*dots[0], style)
    for start, end in pairwise(dots):
        canvas.line(start, end, style, dotted=dotted)


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


def _foot(series: Series, x: Axis, margin: int, columns: int, glyphs: Glyphs) -> list[Content]:
    """The axis with its marks, and the iterations below it."""
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
    for mark in series.marks:
        if x.low <= mark.iteration <= x.high:
            style = _MARK_STYLES.get(mark.kind, FRAME)
            cells[x.position(mark.iteration) // 2] = (_mark(mark.kind, glyphs), style)
    axis = Content.assemble((" " * margin + corner, FRAME), *cells).simplify()
    return [axis, Content.styled(" " * (margin + 1) + "".join(numbers), FRAME)]
