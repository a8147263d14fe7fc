"""A list of one-line rows with a cursor that stays on its row while the rows change under it. Draws the lines that can
be seen and no other, so that a thousand rows cost what a screenful does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.content import Content
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual


class RowList(ScrollView, can_focus=True):
    """Rows are (id, content)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-list--row", "row-list--cursor"}
    DEFAULT_CSS = """
    RowList { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    RowList > .row-list--cursor { color: $foreground; }
    RowList > .row-list--row { color: $foreground; }
    RowList:focus > .row-list--cursor { background: $boost; }
    """

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, rows: RowList) -> None:
            super().__init__()
            self.rows = rows

    class Chosen(Message):
        """The row under the cursor was clicked again."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: list[tuple[str, Content]] = []
        self._cursor: int | None = None

    @property
    def selected(self) -> str | None:
        """Id of the row under the cursor."""
        return self._rows[self._cursor][0] if self._cursor is not None else None

    @property
    def in_sight(self) -> range | None:
        """Numbers of the rows that can be seen; None while the list has no size yet."""
        height = self.container_size.height
        return range(self.scroll_offset.y, self.scroll_offset.y + height) if height else None

    @property
    def texts(self) -> list[str]:
        """All rows as plain text."""
        return [content.plain for _, content in self._rows]

    def move(self, name: str) -> bool:
        """Move the cursor: down, up, page_down, page_up, top, bottom; False for any other direction."""
        page = max(1, self.size.height - 1)
        steps = {"down": 1, "up": -1, "page_down": page, "page_up": -page, "top": -(10**9), "bottom": 10**9}
        if name not in steps:
            return False
        if self._cursor is not None:
            self._put_cursor(max(0, min(len(self._rows) - 1, self._cursor + steps[name])))
        return True

    def select(self, row: str) -> None:
        """Put the cursor on the row of this id, where there is one."""
        index = next((index for index, (known, _) in enumerate(self._rows) if known == row), None)
        if index is not None:
            self._put_cursor(index)

    def set_rows(self, rows: Sequence[tuple[str, Content]]) -> None:
        """Show these rows; the cursor stays on the row of the same id, else goes to the first."""
        before, chosen = self._rows, self.selected
        self._rows = list(rows)
        if len(before) == len(rows) and all(old[0] == new[0] for old, new in zip(before, rows, strict=True)):
            for index, ((_, old), (_, new)) in enumerate(zip(before, rows, strict=True)):
                if new is not old and not new.is_same(old):
                    self.refresh_line(index)
            return
        ids = [row for row, _ in rows]
        self._cursor = ids.index(chosen) if chosen in ids else (0 if ids else None)
        size = Size(max(1, self.container_size.width), len(rows))
        if size.height != self.virtual_size.height:
            self.virtual_size = size
            self.refresh(layout=True)
        else:
            self.refresh()
        if self.selected != chosen:
            self._reveal()
            self.post_message(self.Moved(self))

    def _put_cursor(self, index: int) -> None:
        before = self._cursor
        if before == index:
            return
        self._cursor = index
        if before is not None:
            self.refresh_line(before)
        self.refresh_line(index)
        self._reveal()
        self.post_message(self.Moved(self))

    def _reveal(self) -> None:
        """Scroll as little as brings the cursor into sight."""
        if self._cursor is None or not self.size.height:
            return
        top, height = self.scroll_offset.y, self.size.height
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False)

    def on_resize(self) -> None:
        self.call_after_refresh(self._reveal)

    def on_click(self, event: Click) -> None:
        index = event.y + self.scroll_offset.y
        if 0 <= index < len(self._rows):
            again = index == self._cursor
            self._put_cursor(index)
            if again:
                self.post_message(self.Chosen())

    def render_line(self, y: int) -> Strip:
        index, width = y + self.scroll_offset.y, self.size.width
        if index >= len(self._rows):
            return Strip.blank(width, self.rich_style)
        part = "row-list--cursor" if index == self._cursor else "row-list--row"
        style = self.get_visual_style(part)
        strips = Visual.to_strips(self, self._rows[index][1], width, 1, style)
        return strips[0].adjust_cell_length(width, style.rich_style) if strips else Strip.blank(width, style.rich_style)
