"""Text laid out in cells: a Static that redraws only on change, a label beside its wrapped text, and tables that
drop their least important columns when room is short.
"""

from __future__ import annotations

import textwrap
from collections.abc import Container, Mapping, Sequence
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
        rows = _rows(content)
        # More rows than its own: `before` was broken, in a widget that was narrower than it was made for.
        broken = self.size.height > rows
        # Textual (8.2.8) keeps the size that it computed since the last idle event, whatever was put in meanwhile.
        self._box_model_cache.clear()
        self.update(content, layout=self._wraps or before is None or _rows(before) != rows or broken)


def _rows(content: Content) -> int:
    return content.plain.count("\n") + 1 if content.plain else 0


def pair(label: str, text: str, width: int, *, style: str = "", indent: int = 14) -> Content:
    """`text` broken into lines of at most `width` cells with the label's `indent` taken off; never mid-word
    unless a word alone is longer."""
    room = max(16, width - indent)
    lines = [part for line in text.splitlines() or [""] for part in textwrap.wrap(line, room) or [""]]
    first = Content.assemble((f"{label:<{indent}}", MUTED), (lines[0], style))
    return Content("\n").join([first, *(Content.assemble(" " * indent, (line, style)) for line in lines[1:])])


FOLDED = 3
"""Lines of a long command that are shown."""


def folded(text: str, width: int, *, indent: int = 14) -> str:
    """A command in at most FOLDED lines, and how many more it has."""
    room = max(16, width - indent)
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, room) or [""]]
    more = len(lines) - FOLDED
    return "\n".join([*lines[:FOLDED], *([f"… and {more} more line{'s' * (more > 1)}"] if more > 0 else [])])


GAP = 2
"""Cells between two columns."""


@dataclass(frozen=True)
class Column:
    """One column: its title, a cell a row (none for a `Table`, which has its rows apart), and its priority."""

    title: str
    cells: Sequence[Content | str] = ()
    priority: int = 5
    """The lowest goes first when room is short; 9 never goes."""
    right: bool = False
    """Figures are aligned to the right."""
    grows: bool = False
    """Takes the room that is left over, and gives way first."""
    minimum: int = 6
    """A growing column is never squeezed below this, cells."""
    optional: bool = False
    """Left out while no row has anything in it."""
    reserved: int = 0
    """Cells that it takes at least, so that those behind it keep their places when a text grows."""

    def least(self, width: int) -> int:
        """Cells that a column as wide as `width` cannot do without."""
        return min(width, self.minimum) if self.grows else width


def lay_out(columns: Sequence[Column], width: int) -> tuple[Content, list[Content]]:
    """The header line and one line a row, each at most `width` cells."""
    cells = [[Content(cell) if isinstance(cell, str) else cell for cell in column.cells] for column in columns]
    rows = {str(number): row for number, row in enumerate(zip(*cells, strict=True))}
    header, lines = Table().lay_out(columns, rows, width)
    return header, [line for _, line in lines]


@dataclass(frozen=True)
class TableForm:
    """The columns of a table that are shown, and how wide each is."""

    columns: Sequence[Column]
    shown: tuple[int, ...]
    widths: tuple[int, ...]
    width: int
    """A line has at most so many cells."""

    @classmethod
    def fit(cls, columns: Sequence[Column], widest: Sequence[int], empty: Container[int], width: int) -> TableForm:
        """`widest`: cells that each column's title and texts take. `empty`: places of columns with nothing in them."""
        shown, dropped = [i for i, column in enumerate(columns) if not column.optional or i not in empty], list[int]()
        least = [column.least(wide) + GAP for column, wide in zip(columns, widest, strict=True)]
        while len(shown) > 1 and sum(least[i] for i in shown) - GAP > width:
            droppable = [i for i in shown if columns[i].priority < 9]
            if not droppable:
                break
            dropped.append(min(droppable, key=lambda i: (columns[i].priority, -i)))
            shown.remove(dropped[-1])
        for i in reversed(dropped):
            # The last one to go may have been so wide that others have room in its place.
            if sum(least[j] for j in (*shown, i)) - GAP <= width:
                shown = sorted([*shown, i])
        kept, widths = [columns[i] for i in shown], [widest[i] for i in shown]
        growing = next((place for place, column in enumerate(kept) if column.grows), None)
        if growing is not None:
            others = sum(widths) - widths[growing] + GAP * (len(kept) - 1)
            widths[growing] = max(kept[growing].minimum, width - others)
        return cls(columns, tuple(shown), tuple(widths), width)

    @property
    def header(self) -> Content:
        return self.line([Content.styled(column.title, MUTED) for column in self.columns])

    def line(self, cells: Sequence[Content]) -> Content:
        kept = [self.columns[i] for i in self.shown]
        return _line([cells[i] for i in self.shown], kept, self.widths, self.width)

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, TableForm) and (other.shown, other.widths, other.width)
        return same == (self.shown, self.widths, self.width)

    __hash__ = None  # type: ignore[assignment]


class Table:
    """A table that is laid out again and again: a row whose cells are the same objects and whose columns are as wide as
    before is the same line as before. Of 64 rows one that changes costs one."""

    def __init__(self) -> None:
        self._widths: dict[str, tuple[Sequence[Content], list[int]]] = {}
        self._lines: dict[str, tuple[Sequence[Content], object, Content]] = {}
        self._place: tuple[object, ...] = ()
        self._widest: list[int] = []
        self._empty: set[int] = set()

    def lay_out(
        self, columns: Sequence[Column], rows: Mapping[str, Sequence[Content]], width: int, *, none: str = ""
    ) -> tuple[Content, list[tuple[str, Content]]]:
        """The header line, and (id, line) of each row, every line at most `width` cells; `none` is an empty cell."""
        measured = [self._measured(row, cells) for row, cells in rows.items()]
        widest = [
            max((len(column.title), column.reserved, *(w[i] for w in measured))) for i, column in enumerate(columns)
        ]
        empty = {i for i in range(len(columns)) if all(cells[i].plain in ("", none) for cells in rows.values())}
        place = (width, tuple(column.title for column in columns), tuple(rows))
        if place == self._place:
            # A column never gives back what it once took: those behind it keep their places.
            widest, empty = list(map(max, widest, self._widest)), empty & self._empty
        self._place, self._widest, self._empty = place, widest, empty
        form = TableForm.fit(columns, widest, empty, width)
        lines = []
        for row, cells in rows.items():
            drawn = self._lines.get(row)
            if drawn is None or drawn[0] is not cells or drawn[1] != form:
                drawn = self._lines[row] = (cells, form, form.line(cells))
            lines.append((row, drawn[2]))
        return form.header, lines

    def _measured(self, row: str, cells: Sequence[Content]) -> list[int]:
        measured = self._widths.get(row)
        if measured is None or measured[0] is not cells:
            measured = self._widths[row] = (cells, [cell.cell_length for cell in cells])
        return measured[1]


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
