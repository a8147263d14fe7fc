"""Parts of a plot in cells: axes with their ticks, a canvas of braille dots (ASCII where that is all there is), and the
frame with marks on its lower edge.

plotext (6.1) was not used: it draws on one figure per process and returns escape codes over a background of its own,
while here every cell takes the theme's variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
        logarithmic = logarithmic and low > _LEAST
        size = max(abs(low), abs(high))
        if high - low <= max(1e-9 * size, _LEAST):
            margin = size * 0.05 if size > 100 * _LEAST else 0.5
            low, high = (low / 1.05, high * 1.05) if logarithmic else (low - margin, high + margin)
        return cls(low, high, max(1, dots), logarithmic)

    def position(self, value: float) -> int:
        """The dot of `value`; values outside are clamped to the ends."""
        return round(max(0.0, min(1.0, self.share(value))) * (self.dots - 1))

    def share(self, value: float) -> float:
        """0 at `low`, 1 at `high`."""
        return self.shares((value,))[0]

    def shares(self, values: Iterable[float]) -> list[float]:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, values = math.log(low), math.log(high), [math.log(max(value, self.low)) for value in values]
        span = high - low
        return [(value - low) / span for value in values]

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


_LEAST: Final = 1e-300
"""Near the least of all floats there are no powers of ten to count by."""
_TIME_STEPS: Final = (2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21_600, 43_200, 86_400, 172_800)


def step_of(rough: float) -> float:
    """The next of 1, 2, 5 × a power of ten that is at least `rough` (> 0)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A tick's label, with as many decimals as tell neighbours `step` apart from each other."""
    place = math.floor(math.log10(step) + 1e-9) if step > 0 else 0
    if place < -4 or place >= 8 or abs(value) >= 1e9:
        digits = math.floor(math.log10(abs(value)) + 1e-9) - place + 1 if value else 1
        return f"{value:.{max(1, digits)}g}"
    return f"{value:,.{max(0, -place)}f}"


_BITS: Final = (0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80)
"""Bits of a braille character: those of its left dots from the top, then of its right ones."""
_BRAILLE: Final = (
    " ",
    *(chr(0x2800 + sum(bit for at, bit in enumerate(_BITS) if dots >> at & 1)) for dots in range(1, 256)),
)
"""By the dots of a cell, in the order of _BITS."""
_ASCII: Final = tuple(" '-'-'-|.'-|-|||"[left | right] for right in range(16) for left in range(16))
"""The same in ASCII: the first row with a dot, or a stroke where more than two have one."""
_MOST_DOTS: Final = 4096
_THIRDS: Final = int("1" * (_MOST_DOTS // 3), 8)
_HALVES: Final = int("1" * (_MOST_DOTS // 2), 4)
_FIRSTS: Final = int("1" * (_MOST_DOTS // 4), 16)
"""Numbers as columns of dots, a bit each: every third one, every second one, the first one of each cell."""


KINDS: Final[dict[str, Callable[[int], int]]] = {
    "solid": lambda x: -1,
    "dotted": lambda x: _THIRDS << -x % 3,
    "dashed": lambda x: -(x % 8 < 5),
    "mixed": lambda x: -(x % 10 < 5 or x % 10 == 7),
}
"""Kinds of lines: which dots of a column are set, a bit each."""
SAMPLES: Final = {"solid": "──", "dotted": "⠒⠂", "dashed": "╌╌", "mixed": "─·"}


class Canvas:
    """`width` × `height` cells; dots count from the top left, (0, 0) to (2·width - 1, 4·height - 1). What is drawn
    first stays on top: it gives a cell its style."""

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._inside = (1 << 4 * height) - 1
        self._dots = [0] * (2 * width)
        """By column of dots: a bit each, the topmost first."""
        self._styled = [0] * width
        """By column of cells: a bit for each cell that has a style, that of its topmost dot."""
        self._styles = [[("", "")] * width for _ in range(height)]
        """With the symbol that stands for a cell's dots in ASCII, where their shape does not."""
        self._texts: dict[tuple[int, int], tuple[str, str]] = {}
        """Row and column → a character in place of the dots, and its style."""

    def _set(self, spans: Iterable[tuple[int, int]], style: str, symbol: str) -> None:
        """Set the dots of columns; outside the canvas nothing happens."""
        inside, columns, styled, styles = self._inside, self._dots, self._styled, self._styles
        for x, span in spans:
            if not 0 <= x < len(columns):
                continue
            column, dots = x >> 1, span & inside
            columns[x] |= dots
            cells = dots | dots >> 1
            cells = (cells | cells >> 2) & _FIRSTS & ~styled[column]
            if cells:
                styled[column] |= cells
                while cells:
                    place = cells.bit_length() - 1
                    styles[place >> 2][column] = style, symbol
                    cells ^= 1 << place

    def dot(self, x: int, y: int, style: str) -> None:
        """Set one dot; outside the canvas nothing happens."""
        if y >= 0:
            self._set([(x, 1 << y)], style, "")

    def curve(self, dots: Sequence[tuple[int, int]], style: str, kind: str = "solid", symbol: str = "") -> None:
        """Straight lines (Bresenham) of one of KINDS between dots, x ascending; a dotted one has all of them."""
        pattern = KINDS[kind]
        spans = _spans(dots)
        self._set(spans if kind == "solid" else ((x, span & pattern(x)) for x, span in spans), style, symbol)
        if kind == "dotted":
            self._set(((x, 1 << y) for x, y in dots), style, symbol)

    def fill(self, x: int, top: int, bottom: int, style: str) -> None:
        """A part of an area, every second dot both ways: one column of dots."""
        if x % 2 == 0:
            self._set([(x, (2 << bottom) - (1 << top) & _HALVES)], style, ".")

    def write(self, column: int, row: int, text: str, style: str) -> None:
        """One character over what is there; outside the canvas nothing happens."""
        self._texts[row, column] = text, style

    def upright(self, column: int, text: str, style: str) -> None:
        """A line from top to bottom behind what is there."""
        for row in range(self.height):
            if not self._styled[column] >> 4 * row & 1:
                self._texts.setdefault((row, column), (text, style))

    def is_written(self, column: int, row: int) -> bool:
        return (row, column) in self._texts

    def row(self, number: int, *, ascii: bool = False) -> Content:
        shift, styles = 4 * number, [style for style, _ in self._styles[number]]
        pairs = zip(self._dots[::2], self._dots[1::2], strict=True)
        masks = [left >> shift & 15 | (right >> shift & 15) << 4 for left, right in pairs]
        if ascii:
            symbols = zip(masks, self._styles[number], strict=True)
            cells = [(symbol or _ASCII[mask]) if mask else " " for mask, (_, symbol) in symbols]
        else:
            cells = [_BRAILLE[mask] for mask in masks]
        for (row, column), (text, style) in self._texts.items():
            if row == number:
                cells[column], styles[column] = text, style
        # An empty cell looks the same in every style.
        starts = [0, *(place for place in range(1, self.width) if styles[place] and styles[place] != styles[place - 1])]
        runs = zip(starts, [*starts[1:], self.width], strict=True)
        return Content.assemble(*(("".join(cells[start:stop]), styles[start]) for start, stop in runs))


def _spans(dots: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The lines between dots, a column after the other: x, and a bit for each dot. However steep, each is one span."""
    if not dots:
        return
    before, y = dots[0]
    low = high = y
    for x, end in dots[1:]:
        run, rise, step = x - before, abs(end - y), 1 if end > y else -1
        for column in range(run):
            # Where the line is steep, it goes on to the next column half-way between both.
            if rise > run:
                last = y + step * (((2 * column + 1) * rise - 1) // (2 * run))
                first = last + step
            else:
                last = y + step * ((2 * column * rise + run) // (2 * run))
                first = y + step * ((2 * (column + 1) * rise + run) // (2 * run))
            yield before + column, (2 << (last if last > high else high)) - (1 << (last if last < low else low))
            low = high = first
        low, high = end if end < low else low, end if end > high else high
        before, y = x, end
    yield before, (2 << high) - (1 << low)


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
