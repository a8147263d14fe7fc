"""Lines of a log as rows of cells: wrapped or cut, with what is looked for marked, in plain segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import chop_cells
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from engine.runs.log_reader import LogLine

_SLACK = 4
"""Characters looked at for each cell: a cell may hold a letter and three combining marks."""


@dataclass(frozen=True)
class Row:
    """One row of the screen: a piece of a line."""

    position: int
    """Of the line, among those that are shown."""
    part: int
    """Which row of its line, from 0."""
    start: int
    """Where the piece begins in the line's text, characters."""
    text: str
    line: LogLine


@dataclass(frozen=True)
class Mark:
    """A style for part of a line's text, in characters."""

    start: int
    end: int
    style: Style


def rows_of(line: LogLine, position: int, width: int, *, wrap: bool, left: int = 0) -> list[Row]:
    """A line's rows of `width` cells: all of them when wrapped, else the one that begins at character `left`."""
    if not wrap:
        return [Row(position, 0, left, line.text[left : left + width * _SLACK], line)]
    text = line.text
    if len(text) * 2 <= width or (text.isascii() and len(text) <= width):
        return [Row(position, 0, 0, text, line)]
    pieces = [text[at : at + width] for at in range(0, len(text), width)] if text.isascii() else chop_cells(text, width)
    rows, start = [], 0
    for part, piece in enumerate(pieces):
        rows.append(Row(position, part, start, piece, line))
        start += len(piece)
    return rows


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
