"""Lines of a log as rows of cells: wrapped or cut, with the matches marked, in plain segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import get_character_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.api import LogLine

_SLACK = 4
"""Characters for each cell: it may hold a letter and three combining marks."""


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
    edges = {0, len(row.text)}
    for mark in marks:
        edges |= {min(max(0, at - row.start), len(row.text)) for at in (mark.start, mark.end)}
    cuts = sorted(edges)
    segments = []
    for start, end in pairwise(cuts):
        style = base
        for mark in marks:
            if mark.start - row.start <= start and end <= mark.end - row.start:
                style += mark.style
        segments.append(Segment(row.text[start:end], style))
    return Strip(segments).adjust_cell_length(width, base)
