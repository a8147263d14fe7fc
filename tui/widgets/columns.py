"""Lays out a small table in plain cells: columns as wide as they need, the least important left out in short room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from tui.glyphs import MUTED

GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True)
class Column:
    """One column: its title, a cell a row, and how dear it is."""

    title: str
    cells: Sequence[Content | str]
    priority: int = 5
    """The lowest goes first when room is short; 9 never goes."""
    right: bool = False
    """Figures are aligned to the right."""
    grows: bool = False
    """Takes the room that is left over, and gives way first."""
    minimum: int = 6
    """A growing column is never squeezed below this, cells."""

    @property
    def width(self) -> int:
        return max([len(self.title), *(_content(cell).cell_length for cell in self.cells)])


def _content(cell: Content | str) -> Content:
    return Content(cell) if isinstance(cell, str) else cell


def lay_out(columns: Sequence[Column], width: int) -> tuple[Content, list[Content]]:
    """The header line and one line a row, each at most `width` cells."""
    kept = list(columns)
    while len(kept) > 1 and _needed(kept) > width:
        droppable = [column for column in kept if column.priority < 9]
        if not droppable:
            break
        kept.remove(min(droppable, key=lambda column: (column.priority, -columns.index(column))))
    widths = [column.width for column in kept]
    growing = next((index for index, column in enumerate(kept) if column.grows), None)
    if growing is not None:
        others = sum(widths) - widths[growing] + GAP * (len(kept) - 1)
        widths[growing] = max(kept[growing].minimum, width - others)
    header = _line([Content.styled(column.title, MUTED) for column in kept], kept, widths, width)
    count = len(columns[0].cells) if columns else 0
    rows = [_line([_content(column.cells[row]) for column in kept], kept, widths, width) for row in range(count)]
    return header, rows


def _needed(columns: Sequence[Column]) -> int:
    return sum(min(c.width, c.minimum) if c.grows else c.width for c in columns) + GAP * (len(columns) - 1)


def _line(cells: Sequence[Content], columns: Sequence[Column], widths: Sequence[int], width: int) -> Content:
    parts: list[Content | str] = []
    for cell, column, wide in zip(cells, columns, widths, strict=True):
        if parts:
            parts.append(" " * GAP)
        fitted = cell.truncate(wide, ellipsis=True)
        padding = wide - fitted.cell_length
        parts.append(fitted.pad_left(padding) if column.right else fitted.pad_right(padding))
    return Content.assemble(*parts).truncate(width)


def justify(left: Content, right: Content, width: int) -> Content:
    """One line with `left` at the left edge and `right` at the right; the left gives way."""
    room = width - right.cell_length - 1
    if room < 1:
        return left.truncate(width, ellipsis=True)
    return Content.assemble(left.truncate(room, ellipsis=True, pad=True), " ", right)
