"""Parts of a plot in cells: axes with their ticks, a canvas of braille dots (ASCII where that is all there is), and the
frame with marks on its lower edge.

plotext (6.1) was not used: it draws on one figure per process and returns escape codes over a background of its own,
while here every cell takes the theme's variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from textual.content import Content

from tui.formatting import axis_text
from tui.glyphs import MUTED, Glyphs


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` (low < high; both > 0 when logarithmic) on `dots` dots, 0 at `low`."""

    low: float
    high: float
    dots: int
    logarithmic: bool = False
    kind: str = "iterations"
    """One of engine.api.AXES: how its ticks are counted and written."""

    @classmethod
    def across(cls, window: tuple[float, float], dots: int, *, kind: str = "iterations") -> Axis:
        """The axis of a window, which may be of no width."""
        low, high = window
        return cls(low, high if high > low else low + max(1.0, abs(low) * 1e-9), dots, kind=kind)

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
        return round(max(0.0, min(1.0, self.share(value))) * (self.dots - 1))

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        if self.logarithmic:
            low = math.log(self.low)
            return (math.log(max(value, self.low)) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        """About `count` round values within the axis, ascending."""
        if self.logarithmic and self.high / self.low > 20:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            multiples = (1, 2, 5) if (last - first) * 2 <= count else (1,)
            values = [m * 10.0**power for power in range(first, last + 1) for m in multiples]
        else:
            rough = (self.high - self.low) / max(1, count)
            steps = (step for step in _TIME_STEPS if self.kind == "time" and 1 < rough <= step)
            step = next(steps, 0.0) or step_of(rough)
            start = math.ceil(self.low / step - 1e-9)
            values = [index * step for index in range(start, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in values if self.low <= value <= self.high]


_TIME_STEPS: Final = (2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 43_200, 86_400, 172_800)


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


KINDS: Final[dict[str, Callable[[int, int], bool]]] = {
    "solid": lambda x, y: True,
    "dotted": lambda x, y: (x + y) % 3 == 0,
    "dashed": lambda x, y: x % 8 < 5,
    "mixed": lambda x, y: x % 10 < 5 or x % 10 == 7,
}
"""Kinds of lines: which of their dots are set."""
SAMPLES: Final = {"solid": "──", "dotted": "⠒⠂", "dashed": "╌╌", "mixed": "─·"}
_STRIPE: Final = 2
"""Every second dot of an area, both ways."""


class Canvas:
    """`width` × `height` cells; dots count from the top left, (0, 0) to (2·width - 1, 4·height - 1)."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._masks = [[0] * width for _ in range(height)]
        self._styles = [[""] * width for _ in range(height)]
        self._symbols = [[""] * width for _ in range(height)]
        """Stands for a cell's dots in ASCII, where their shape does not."""
        self._texts: dict[tuple[int, int], tuple[str, str]] = {}
        """Row and column → a character in place of the dots, and its style."""

    def dot(self, x: int, y: int, style: str, symbol: str = "") -> None:
        """Set one dot; outside the canvas nothing happens."""
        column, row = x >> 1, y >> 2
        if 0 <= column < self.width and 0 <= row < self.height:
            self._masks[row][column] |= _DOTS[y & 3][x & 1]
            self._styles[row][column] = style
            self._symbols[row][column] = symbol

    def line(
        self, start: tuple[int, int], end: tuple[int, int], style: str, kind: str = "solid", symbol: str = ""
    ) -> None:
        """A straight line (Bresenham) of one of KINDS; a dotted one has both its ends."""
        (x, y), (end_x, end_y) = start, end
        run, rise = abs(end_x - x), -abs(end_y - y)
        step_x, step_y = (1 if end_x > x else -1), (1 if end_y > y else -1)
        error, is_set = run + rise, KINDS[kind]
        while True:
            if is_set(x, y) or (kind == "dotted" and (x, y) in (start, end)):
                self.dot(x, y, style, symbol)
            if (x, y) == (end_x, end_y):
                return
            doubled = 2 * error
            if doubled >= rise:
                error += rise
                x += step_x
            if doubled <= run:
                error += run
                y += step_y

    def curve(self, dots: Sequence[tuple[int, int]], style: str, kind: str = "solid", symbol: str = "") -> None:
        if len(dots) == 1:
            self.dot(*dots[0], style, symbol)
        for start, end in pairwise(dots):
            self.line(start, end, style, kind, symbol)

    def fill(self, x: int, top: int, bottom: int, style: str) -> None:
        """A part of an area, thinly set: one column of dots."""
        if x % _STRIPE == 0:
            for y in range(top + top % _STRIPE, bottom + 1, _STRIPE):
                self.dot(x, y, style, ".")

    def write(self, column: int, row: int, text: str, style: str) -> None:
        """One character over what is there; outside the canvas nothing happens."""
        self._texts[row, column] = text, style

    def upright(self, column: int, text: str, style: str) -> None:
        """A line from top to bottom behind what is there."""
        for row in range(self.height):
            if not self._masks[row][column]:
                self._texts.setdefault((row, column), (text, style))

    def is_written(self, column: int, row: int) -> bool:
        return (row, column) in self._texts

    def row(self, number: int, *, ascii: bool = False) -> Content:
        masks, styles = self._masks[number], self._styles[number].copy()
        if ascii:
            symbols = zip(masks, self._symbols[number], strict=True)
            cells = [(symbol or _ascii(mask)) if mask else " " for mask, symbol in symbols]
        else:
            cells = [chr(_BLANK + mask) if mask else " " for mask in masks]
        for (row, column), (text, style) in self._texts.items():
            if row == number:
                cells[column], styles[column] = text, style
        # An empty cell looks the same in every style.
        starts = [0, *(place for place in range(1, self.width) if styles[place] and styles[place] != styles[place - 1])]
        runs = zip(starts, [*starts[1:], self.width], strict=True)
        return Content.assemble(*(("".join(cells[start:stop]), styles[start]) for start, stop in runs))


def _ascii(mask: int) -> str:
    if not mask:
        return " "
    rows = [index for index, (left, right) in enumerate(_DOTS) if mask & (left | right)]
    return "|" if len(rows) > 2 else _ASCII_ROWS[rows[0]]


TRAIN: Final = "$text-primary"
FRAME: Final = MUTED
MARKS: Final = {
    "checkpoint": ("▾", "v", "$success"),
    "best validation": ("★", "*", "$success"),
    "restart": ("↻", "@", "$warning"),
    "lost node": ("✗", "x", "$error"),
}
"""Marks on the lower edge, the weightiest last: shape, shape in ASCII, and style."""


@dataclass(frozen=True)
class ChartMark:
    x: float
    kind: str
    """A key of MARKS."""


def framed(
    canvas: Canvas, labels: Mapping[int, str], x: Axis, glyphs: Glyphs, marks: Sequence[ChartMark] = ()
) -> list[Content]:
    """The canvas with both axes: `labels` by row, and round values below, with marks at some of them."""
    margin = margin_of(labels)
    edge, ticked = ("|", "+") if glyphs.ascii else ("│", "┤")
    lines = []
    for row in range(canvas.height):
        label = labels.get(row, "")
        frame = f"{label:>{margin - 1}} {ticked if label else edge}"
        lines.append(Content.assemble((frame, FRAME), canvas.row(row, ascii=glyphs.ascii)))
    return lines + _foot(marks, x, margin, glyphs)


def labels_of(axis: Axis) -> dict[int, str]:
    """Ticks of an upright axis by the row of cells, from the top."""
    rows = axis.dots // 4
    return {rows - 1 - axis.position(tick) // 4: text for tick, text in tick_texts(axis, max(2, rows // 3))}


def tick_texts(axis: Axis, count: int) -> list[tuple[float, str]]:
    """About `count` ticks with their labels."""
    ticks = _ticks(axis, count)
    return [(tick, _tick(tick, ticks)) for tick in ticks]


def margin_of(labels: Mapping[int, str]) -> int:
    """Cells left of an upright axis with these labels."""
    return max([len(label) for label in labels.values()], default=0) + 1


def _ticks(axis: Axis, count: int) -> list[float]:
    """At least two, which a scale needs, where round numbers allow it."""
    return next((ticks for more in range(4) if len(ticks := axis.ticks(count + more)) > 1), axis.ticks(count))


def _tick(value: float, ticks: Sequence[float]) -> str:
    step = min((b - a for a, b in pairwise(ticks)), default=abs(value) or 1.0)
    return tick_text(value, step)


def mark_shape(kind: str, glyphs: Glyphs) -> str:
    return MARKS[kind][glyphs.ascii]


def _foot(marks: Sequence[ChartMark], x: Axis, margin: int, glyphs: Glyphs) -> list[Content]:
    """The axis with its marks, and the numbers below it."""
    columns, number = x.dots // 2, axis_text(x.kind)
    corner, flat, tick_shape = ("+", "-", "+") if glyphs.ascii else ("└", "─", "┬")
    cells = [(flat, FRAME)] * columns
    numbers = [" "] * columns
    whole = [tick for tick in x.ticks(max(1, columns // 12)) if float(tick).is_integer()]
    for tick in whole:
        column = x.position(tick) // 2
        cells[column] = (tick_shape, FRAME)
        text = number(tick)
        start = min(max(0, column - len(text) // 2), columns - len(text))
        if start >= 0 and all(cell == " " for cell in numbers[max(0, start - 1) : start + len(text) + 1]):
            numbers[start : start + len(text)] = text
    for mark in sorted(marks, key=lambda mark: list(MARKS).index(mark.kind)):
        if x.low <= mark.x <= x.high:
            cells[x.position(mark.x) // 2] = (mark_shape(mark.kind, glyphs), MARKS[mark.kind][2])
    axis = Content.assemble((" " * margin + corner, FRAME), *cells).simplify()
    return [axis, Content.styled(" " * (margin + 1) + "".join(numbers), FRAME)]
