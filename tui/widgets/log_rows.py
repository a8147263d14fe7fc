"""Lines of a log as rows of cells: wrapped or cut, with the matches marked, in plain segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final

from rich.ansi import AnsiDecoder
from rich.cells import get_character_cell_size
from rich.color import Color
from rich.color_triplet import ColorTriplet
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from textual.strip import Strip

from engine.api import LogLine

_SLACK = 4
"""Characters for each cell: it may hold a letter and three combining marks."""
LEAST_CONTRAST: Final = 2.0
"""Between a text and its background: the ratio of WCAG 2, 1 to 21."""


@dataclass(frozen=True)
class Row:
    """One row of the screen: a piece of a line."""

    position: int
    """The line's place among the lines that are shown."""
    part: int
    """The row's number within its line, from 0."""
    start: int
    """Offset of the piece in the line's text, characters."""
    text: str
    line: LogLine


@dataclass(frozen=True)
class Mark:
    """A style for part of a line's text, in characters."""

    start: int
    end: int
    style: Style


def rows_of(line: LogLine, position: int, width: int, *, wrap: bool, left: int = 0) -> list[Row]:
    """A line's rows of `width` cells: all of them when wrapped, else the one from character `left` on."""
    if not wrap:
        return [Row(position, 0, left, line.text[left : left + width * _SLACK], line)]
    rows = []
    start = 0
    for part, end in enumerate(_ends(line.text, width)):
        rows.append(Row(position, part, start, line.text[start:end], line))
        start = end
    return rows


def _ends(text: str, width: int) -> Iterator[int]:
    """The end of each row of a text; an empty text has one row."""
    start = 0
    while True:
        end = min(start + width, len(text))
        if not text[start:end].isascii():
            cells, end = 0, start
            while end < len(text) and (cells := cells + get_character_cell_size(text[end])) <= width:
                end += 1
            end = max(end, start + 1)
        yield end
        if end >= len(text):
            return
        start = end


def height_of(line: LogLine, width: int, *, wrap: bool) -> int:
    """The number of rows of `rows_of`."""
    text = line.text
    if not wrap:
        return 1
    return max(1, -(-len(text) // width)) if text.isascii() else sum(1 for _ in _ends(text, width))


def text_strip(row: Row, width: int, base: Style, marks: Sequence[Mark]) -> Strip:
    """A row's text in exactly `width` cells; of overlapping marks the later ones lie above the earlier ones."""
    styles = [base] * len(row.text)
    for mark in marks:
        for at in range(max(0, mark.start - row.start), min(len(styles), mark.end - row.start)):
            styles[at] += mark.style
    segments, start = [], 0
    for _, run in groupby(styles, key=id):
        end = start + len(list(run))
        segments.append(Segment(row.text[start:end], styles[start]))
        start = end
    return Strip(segments).adjust_cell_length(width, base)


@lru_cache(maxsize=512)
def sgr_style(parameters: str, base: Style, theme: TerminalTheme) -> Style:
    """A program's colours and styles on a line's own style; no text that cannot be told from its background."""
    decoder = AnsiDecoder()
    decoder.decode_line(f"\x1b[{parameters}m")
    style = decoder.style
    front, back = (None if colour is None or colour.is_default else colour for colour in (style.color, style.bgcolor))
    dark, bright = sorted(
        _luminance((colour or Color.default()).get_truecolor(theme, foreground=place == 0))
        for place, colour in enumerate((front or base.color, back or base.bgcolor))
    )
    if (bright + 0.05) / (dark + 0.05) < LEAST_CONTRAST:
        front = back = None
    return style.without_color + Style(color=front, bgcolor=back)


def _luminance(colour: ColorTriplet) -> float:
    """Relative luminance (WCAG 2), 0 to 1."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
