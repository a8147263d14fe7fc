"""The frame of every dialog: a title, a body of plain lines, buttons; the safe one has the focus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Button, Static

Answer = TypeVar("Answer")


WIDTH = 84
"""Of a dialog, in cells, where the terminal has them."""


FRAME = 6
"""Lines of a dialog that are not its body: border, padding, buttons and the line above them."""


def text_width(columns: int) -> int:
    """Cells of a line of a dialog's body on a terminal of `columns`; frame and padding are taken off."""
    return min(WIDTH, int(columns * 0.96)) - 6


class Dialog(ModalScreen[Answer]):
    """A modal box; `esc` always leaves it without doing anything."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "back", show=False),
        Binding("left,h,up,k", "app.focus_previous", show=False),
        Binding("right,l,down,j", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Content]) -> None:
        super().__init__()
        self._heading = title
        self._lines = list(lines)

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(self._heading)
            with VerticalScroll(id="dialog-body", can_focus=False):
                yield Static(Content("\n").join(self._lines), id="dialog-text", markup=False)
            with Horizontal(id="dialog-buttons"):
                yield from self.buttons()

    def buttons(self) -> Sequence[Button]:
        """The first one gets the focus: make it the safe one."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.query(Button).first().focus()
        self._fit()

    def on_resize(self, event: Resize) -> None:
        self._fit()

    def _fit(self) -> None:
        """Keep the buttons on the screen: a body that is too long scrolls."""
        self.query_one("#dialog-body").styles.max_height = max(3, self.app.size.height - FRAME)

    def say(self, lines: Sequence[Content]) -> None:
        """Replace the body."""
        self._lines = list(lines)
        self.query_one("#dialog-text", Static).update(Content("\n").join(self._lines))

    @property
    def body(self) -> str:
        """The body as plain text."""
        return "\n".join(line.plain for line in self._lines)

    def action_leave(self) -> None:
        self.dismiss(None)
