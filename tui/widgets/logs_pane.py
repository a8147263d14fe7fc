"""The logs: every rank's lines merged, or one rank's, over the run's files."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Static

from tui.state import DeckState
from tui.widgets.pane import Pane


class LogsPane(Pane, can_focus=True):
    """Frame and keys of the log view."""

    NAME = "logs"
    HINTS = ("search", "filter", "next_rank", "follow")

    def compose(self) -> ComposeResult:
        yield Static("no log yet", id="no-log", markup=False)

    @property
    def full(self) -> bool:
        return False

    def draw(self, state: DeckState) -> None:
        pass

    def text(self) -> str:
        return ""

    def do(self, action: str) -> None:
        """A log action of the table."""

    def jump_to(self, source: int | None, offset: int) -> None:
        """Put the line at this byte offset of a source's log on the screen."""

    def back(self) -> bool:
        """Close the bar that is open; False when there is none."""
        return False

    def open(self, run: str | None) -> None:
        """Show the log of this run from now on."""

    def freeze(self, frozen: bool) -> None:
        """Hold the view still."""
