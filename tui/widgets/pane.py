"""The frame all panes share: a title, a hint of its keys, and one `show` that makes it a function of the state."""

from __future__ import annotations

from dataclasses import fields
from typing import ClassVar

from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.widget import Widget

from tui.actions import hint
from tui.state import DeckState
from tui.widgets.row_list import RowList


class Pane(Vertical):
    """A bordered part of the deck. Subclasses fill `draw`; it is called only while the pane is on the screen."""

    NAME: ClassVar[str]
    """The pane's id in DeckState.pane and in the action table."""
    NUMBER: ClassVar[str] = ""
    HINTS: ClassVar[tuple[str, ...]] = ()
    """Actions named on the lower border."""
    UNSEEN: ClassVar[frozenset[str]] = frozenset({"telemetry", "asked", "node", "listening"})
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
        hints = [name for name in self.HINTS if name != "enter" or self.opens]
        keys = hint(self.state, self.state.glyphs.separator, *hints) if self.state.pane == self.NAME else ""
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
        """Whether `enter` leads further from here."""
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
        """What is focused with the pane, when it has no list of its own."""
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
        """What `y` copies: what is selected, else everything."""
        return self.text()

    def text(self) -> str:
        """What ctrl+s saves: the whole pane as plain text."""
        raise NotImplementedError

    def on_resize(self, event: Resize) -> None:
        self.call_after_refresh(self.refresh_pane)


def changes(before: DeckState, now: DeckState) -> set[str]:
    """The parts of the state that are another object than before."""
    return {part.name for part in fields(DeckState) if getattr(before, part.name) is not getattr(now, part.name)}
