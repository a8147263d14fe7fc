"""The frame of every pane, drawn from the state, and the list of one-line rows with a cursor that most panes hold.
The list draws only its visible lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.events import Click, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.visual import Visual
from textual.widget import Widget

from tui.actions import hint
from tui.state import DeckState


class RowList(ScrollView, can_focus=True):
    """Rows are (id, content)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-list--row", "row-list--cursor"}
    DEFAULT_CSS = """
    RowList { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1; }
    RowList > .row-list--cursor { color: $foreground; }
    RowList > .row-list--row { color: $foreground; }
    RowList:focus > .row-list--cursor { background: $boost; }
    """

    @dataclass
    class Moved(Message):
        """The cursor is on another row."""

        rows: RowList

    class Chosen(Message):
        """The row under the cursor was clicked again."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ids: Sequence[str] = []
        self._line: Callable[[int], Content] = lambda _: Content("")
        self._cursor: int | None = None
        self._drawn: dict[int, Content] = {}
        """Lines as they were drawn last, by place."""

    @property
    def selected(self) -> str | None:
        return self._ids[self._cursor] if self._cursor is not None else None

    @property
    def in_sight(self) -> range | None:
        """Numbers of the rows that can be seen; None while the list has no size yet."""
        height = self.container_size.height
        return range(self.scroll_offset.y, self.scroll_offset.y + height) if height else None

    @property
    def texts(self) -> list[str]:
        return [self._line(index).plain for index in range(len(self._ids))]

    def move(self, name: str) -> bool:
        """Move the cursor: down, up, page_down, page_up, top, bottom; False for any other direction."""
        page = max(1, self.size.height - 1)
        steps = {"down": 1, "up": -1, "page_down": page, "page_up": -page, "top": -(10**9), "bottom": 10**9}
        if name not in steps:
            return False
        if self._cursor is not None:
            self._put_cursor(max(0, min(len(self._ids) - 1, self._cursor + steps[name])))
        return True

    def select(self, row: str) -> None:
        if row in self._ids:
            self._put_cursor(self._ids.index(row))

    def set_rows(self, rows: Sequence[tuple[str, Content]]) -> None:
        """Show these rows; the cursor stays on the row of the same id, else goes to the first."""
        self.show_rows([row for row, _ in rows], [line for _, line in rows].__getitem__)

    def show_rows(self, ids: Sequence[str], line: Callable[[int], Content]) -> None:
        """As `set_rows`, with a function for the line of a row, which is asked for those in sight alone."""
        chosen, same, self._line = self.selected, ids == self._ids, line
        if same:
            # Textual would draw a row again that is the same, and all that lies between it and another one.
            self._drawn = {index: self._drawn[index] for index in self.in_sight or () if index in self._drawn}
            for index, drawn in self._drawn.items():
                if not line(index).is_same(drawn):
                    self.refresh_line(index)
            return
        self._ids, self._drawn = ids, {}
        self._cursor = ids.index(chosen) if chosen in ids else (0 if ids else None)
        size = Size(max(1, self.container_size.width), len(ids))
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
        if 0 <= index < len(self._ids):
            again = index == self._cursor
            self._put_cursor(index)
            if again:
                self.post_message(self.Chosen())

    def render_line(self, y: int) -> Strip:
        index, width = y + self.scroll_offset.y, self.size.width
        if index >= len(self._ids):
            return Strip.blank(width, self.rich_style)
        part = "row-list--cursor" if index == self._cursor else "row-list--row"
        style = self.get_visual_style(part)
        line = self._drawn[index] = self._line(index)
        strips = Visual.to_strips(self, line, width, 1, style)
        return strips[0].adjust_cell_length(width, style.rich_style) if strips else Strip.blank(width, style.rich_style)


class Pane(Vertical):
    """A bordered part of the deck. Subclasses fill `draw`; it is called only while the pane is on the screen."""

    @dataclass
    class Selected(Message):
        pane: str
        row: str | None

    NAME: ClassVar[str]
    """The pane's id in DeckState.pane and in the action table."""
    NUMBER: ClassVar[str] = ""
    HINTS: ClassVar[tuple[str, ...]] = ()
    """Actions named on the lower border."""
    UNSEEN: ClassVar[frozenset[str]] = frozenset({"telemetry", "unanswered", "node", "listening"})
    """Parts of the state that the pane does not show: when nothing else has changed it is not drawn again."""

    def __init__(self) -> None:
        super().__init__(id=self.NAME)
        self.state = DeckState()
        self._behind = True
        self._border: tuple[Content, Content] | None = None

    def show(self, state: DeckState) -> None:
        """Take the state; drawn at once when the pane can be seen."""
        before, self.state = self.state, state
        if not (self.display and self.size.width):
            self._behind = True
            return
        changed = changes(before, state)
        if self._behind or not changed or not changed <= self.UNSEEN:
            self._behind = False
            self.refresh_pane()

    def refresh_pane(self) -> None:
        """Draw the last state again."""
        self.set_class(self.full, "-full")
        self._put_border()
        self.draw(self.state)

    def _put_border(self) -> None:
        """The title, and the keys when the pane has them. Setting either repaints the whole pane, so only another one
        is set."""
        keys, hints = "", [name for name in self.HINTS if name != "enter" or self.opens]
        while self.state.pane == self.NAME:
            keys = hint(self.state, self.state.glyphs.separator, *hints)
            if len(keys) <= self.size.width - 6 or len(hints) < 3:
                break
            # The outer ones matter most.
            del hints[(len(hints) - 1) // 2]
        border = Content(f"{self.NUMBER} {self.title(self.state)}".strip()), Content(keys)
        if self._border is None or not all(map(Content.is_same, border, self._border)):
            self._border = border
            self.border_title, self.border_subtitle = border

    @property
    def full(self) -> bool:
        """The pane has the screen (nearly) to itself: it shows details."""
        return self.state.view == self.NAME

    @property
    def opens(self) -> bool:
        """`enter` leads further from here."""
        return not self.full

    @property
    def room(self) -> int:
        """Cells in a line of the pane."""
        return self.content_size.width

    def title(self, state: DeckState) -> str:
        return self.NAME

    def draw(self, state: DeckState) -> None:
        raise NotImplementedError

    @property
    def keys_go_to(self) -> Widget:
        """The focused widget of a pane without a list."""
        return self

    def move(self, name: str) -> bool:
        """Move the list's cursor, or scroll (by pages: the details); False when nothing moves in that direction."""
        if name in ("left", "right"):
            return False
        rows = next(iter(self.query(RowList)), None)
        detail = next((part for part in self.query(".detail") if part.display and part.max_scroll_y), None)
        if rows is not None and not (detail is not None and name.startswith("page")):
            return rows.move(name)
        return self.scroll_text(detail or self, name)

    def scroll_text(self, scrolled: Widget, name: str) -> bool:
        """Scroll a text; False when all of it is in sight."""
        if not scrolled.max_scroll_y:
            return False
        scroll = {
            "down": scrolled.scroll_down,
            "up": scrolled.scroll_up,
            "page_down": scrolled.scroll_page_down,
            "page_up": scrolled.scroll_page_up,
            "top": scrolled.scroll_home,
            "bottom": scrolled.scroll_end,
        }[name]
        scroll(animate=False)
        return True

    def copy_text(self) -> str:
        """The text of `y`: the selection, else everything."""
        return self.text()

    def copy_parts(self) -> dict[str, str]:
        """The texts of `y`, by name: it asks where there is more than one."""
        return {self.NAME: self.copy_text()}

    def text(self) -> str:
        """The text of ctrl+s: the whole pane."""
        raise NotImplementedError

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.refresh_pane)


def changes(before: DeckState, now: DeckState) -> set[str]:
    """The parts of the state that are another object than before."""
    return {part.name for part in fields(DeckState) if getattr(before, part.name) is not getattr(now, part.name)}
