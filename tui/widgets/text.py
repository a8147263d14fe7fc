"""Text laid out in cells: a Static that redraws only on change, a label beside its wrapped text, and tables that
drop their least important columns when room is short.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.widgets import Static

from tui.glyphs import MUTED


class Text(Static):
    """Plain content. Where its lines are broken already, one of the same number of lines takes the same room."""

    def __init__(self, *, id: str, classes: str | None = None, wraps: bool = False) -> None:
        """`wraps`: a line may be too long for the widget, which breaks it."""
        super().__init__("", id=id, classes=classes, markup=False)
        self._put: Content | None = None
        self._wraps = wraps

    def put(self, content: Content) -> None:
        """Show it."""
        before = self._put
        if before is not None and content.is_same(before):
            return
        self._put = content
        self.update(content, layout=self._wraps or before is None or _rows(before) != _rows(content))


def _rows(content: Content) -> int:
    return content.plain.count("\n") + 1 if content.plain else 0


def pair(label: str, text: str, width: int, *, style: str = "", indent: int = 14) -> Content:
    """`text` broken into lines of at most `width` cells with the label's `indent` taken off; never mid-word
    unless a word alone is longer."""
    room = max(16, width - indent)
    lines = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, room) or [""]]
    first = Content.assemble((f"{label:<{indent}}", MUTED), (lines[0], style))
    return Content("\n").join([first, *(Content.assemble(" " * indent, (line, style)) for line in lines[1:])])


GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True)
class Column:
    """One column: its title, a cell a row, and its priority."""

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


@dataclass(frozen=True)
class ColumnSpec:
    """A column of a `Table`; its fields are those of `Column`."""

    title: str
    priority: int = 5
    right: bool = False
    optional: bool = False
    """Left out while no row has anything in it."""


class Table:
    """A table that is laid out again and again: a row whose cells are the same objects and whose columns are as wide as
    before is the same line as before. Of 64 rows one that changes costs one."""

    def __init__(self) -> None:
        self._widths: dict[str, tuple[Sequence[Content], list[int]]] = {}
        self._lines: dict[str, tuple[Sequence[Content], object, Content]] = {}

    def lay_out(
        self, heads: Sequence[ColumnSpec], rows: Mapping[str, Sequence[Content]], width: int, *, none: str = ""
    ) -> tuple[Content, list[tuple[str, Content]]]:
        """The header line, and (id, line) of each row, every line at most `width` cells; `none` is an empty cell."""
        measured = [self._measured(row, cells) for row, cells in rows.items()]
        widest = [max((len(head.title), *(w[i] for w in measured))) for i, head in enumerate(heads)]
        kept = [
            i
            for i, head in enumerate(heads)
            if not head.optional or any(cells[i].plain not in ("", none) for cells in rows.values())
        ]
        while len(kept) > 1 and sum(widest[i] for i in kept) + GAP * (len(kept) - 1) > width:
            droppable = [i for i in kept if heads[i].priority < 9]
            if not droppable:
                break
            kept.remove(min(droppable, key=lambda i: (heads[i].priority, -i)))
        columns = [Column(heads[i].title, (), heads[i].priority, heads[i].right) for i in kept]
        widths = [widest[i] for i in kept]
        form = (tuple(kept), tuple(widths), width)
        header = _line([Content.styled(column.title, MUTED) for column in columns], columns, widths, width)
        lines = []
        for row, cells in rows.items():
            known = self._lines.get(row)
            if known is None or known[0] is not cells or known[1] != form:
                line = _line([cells[i] for i in kept], columns, widths, width)
                known = self._lines[row] = (cells, form, line)
            lines.append((row, known[2]))
        return header, lines

    def _measured(self, row: str, cells: Sequence[Content]) -> list[int]:
        known = self._widths.get(row)
        if known is None or known[0] is not cells:
            known = self._widths[row] = (cells, [cell.cell_length for cell in cells])
        return known[1]


def _needed(columns: Sequence[Column]) -> int:
    return sum(min(c.width, c.minimum) if c.grows else c.width for c in columns) + GAP * (len(columns) - 1)


def _line(cells: Sequence[Content], columns: Sequence[Column], widths: Sequence[int], width: int) -> Content:
    parts: list[Content | str] = []
    for cell, column, wide in zip(cells, columns, widths, strict=True):
        if parts:
            parts.append(" " * GAP)
        # What fits, which is nearly all, is taken as it is: truncating and padding each cost a new Content.
        fitted = cell if cell.cell_length <= wide else cell.truncate(wide, ellipsis=True)
        blank = " " * (wide - fitted.cell_length)
        parts += [blank, fitted] if column.right else [fitted, blank]
    line = Content.assemble(*parts)
    return line if line.cell_length <= width else line.truncate(width)


def justify(left: Content, right: Content, width: int) -> Content:
    """One line with `left` at the left edge and `right` at the right; the left gives way."""
    room = width - right.cell_length - 1
    if room < 1:
        return left.truncate(width, ellipsis=True)
    return Content.assemble(left.truncate(room, ellipsis=True, pad=True), " ", right)
