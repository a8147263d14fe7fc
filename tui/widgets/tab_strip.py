"""The views and the logs as tabs, for terminals too small for the panes side by side."""

from __future__ import annotations

from textual.content import Content

from tui.glyphs import MUTED
from tui.state import VIEWS, DeckState
from tui.widgets.text import Text


class TabStrip(Text):
    """One line: every view with its number key, the logs behind the run; the current one lit."""

    def __init__(self) -> None:
        super().__init__(id="tabs")

    def show(self, state: DeckState) -> None:
        view = "run" if state.view == "dashboard" else state.view
        current = "logs" if view == "run" and state.pane == "logs" else view
        parts: list[Content] = []
        for number, name in enumerate(VIEWS[1:], start=1):
            parts.append(_tab(f"{number} {name}", lit=name == current))
            if name == "run":
                parts.append(_tab("logs", lit=current == "logs"))
        self.put(Content(" ").join(parts))


def _tab(text: str, *, lit: bool) -> Content:
    return Content.styled(f" {text} ", "bold reverse" if lit else MUTED)
