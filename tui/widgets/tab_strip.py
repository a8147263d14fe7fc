"""The views as tabs, for terminals too small for the panes side by side."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from tui.glyphs import MUTED
from tui.state import VIEWS, DeckState


class TabStrip(Static):
    """One line: every view with its number key, the current one lit."""

    def __init__(self) -> None:
        super().__init__("", id="tabs", markup=False)

    def show(self, state: DeckState) -> None:
        current = "run" if state.view == "dashboard" else state.view
        parts: list[Content] = []
        for number, view in enumerate(VIEWS[1:], start=1):
            style = "bold reverse" if view == current else MUTED
            parts.append(Content.styled(f" {number} {view} ", style))
        self.update(Content(" ").join(parts))
