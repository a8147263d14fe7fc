"""The line at the bottom: the keys that work here and now; a disabled one is greyed and says why when pressed."""

from __future__ import annotations

from textual.content import Content
from textual.events import Click
from textual.message import Message

from tui.actions import Action, bar, label
from tui.glyphs import DISABLED
from tui.state import DeckState
from tui.widgets.text import Text

GAP = 3


class KeyBar(Text):
    """Made from the action table; a click does what its key does."""

    class Pressed(Message):
        """An action of the bar was clicked."""

        def __init__(self, action: Action) -> None:
            super().__init__()
            self.action = action

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._spans: list[tuple[int, int, Action]] = []

    def show(self, state: DeckState) -> None:
        actions = bar(state)
        room = self.content_size.width
        # A short terminal first loses blanks, then the longer words.
        choices = [(gap, short) for short in (False, True) for gap in range(GAP, 0, -1)]
        gap, short = next((c for c in choices if _width(actions, state, *c) <= room), choices[-1])
        parts: list[Content] = []
        self._spans, place = [], 0
        for action in actions:
            words = label(action, state, short=short)
            possible = action.why_not(state) is None
            key_style, style = ("bold $text-primary", "") if possible else (DISABLED, DISABLED)
            part = Content.assemble((action.shown_key, key_style), (f" {words}", style))
            if place + part.cell_length > room:
                break
            self._spans.append((place, place + part.cell_length, action))
            place += part.cell_length + gap
            parts.append(part)
        self.put(Content(" " * gap).join(parts))

    def on_click(self, event: Click) -> None:
        for start, stop, action in self._spans:
            if start <= event.x - self.gutter.left < stop:
                self.post_message(self.Pressed(action))


def _width(actions: list[Action], state: DeckState, gap: int, short: bool) -> int:
    words = (len(action.shown_key) + 1 + len(label(action, state, short=short)) for action in actions)
    return sum(words) + gap * (len(actions) - 1)
