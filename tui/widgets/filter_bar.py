"""The prompt below a log: what to search for (`/`), or which lines to keep (`&`)."""

from __future__ import annotations

from typing import Final

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input, Static

from engine.runs.log_pattern import LogPattern

SEARCH: Final = "search"
FILTER: Final = "filter"
_PROMPTS: Final = {SEARCH: "/", FILTER: "&"}
_HINTS: Final = {
    SEARCH: "text, or re: and a regular expression",
    FILTER: "lines to keep; ! inverts; empty shows all",
}


class FilterBar(Horizontal):
    """Hidden until it is opened. Enter answers with Answered, escape (the app calls `close`) with nothing."""

    DEFAULT_CSS = """
    FilterBar { height: 1; display: none; }
    FilterBar.-open { display: block; }
    FilterBar .prompt { width: 2; color: $text-primary; text-style: bold; }
    FilterBar Input { width: 1fr; border: none; height: 1; padding: 0; background: $surface; }
    FilterBar .fault { width: auto; color: $text-error; padding: 0 1; }
    """

    class Answered(Message):
        """A pattern was entered: one that LogPattern takes, or nothing at all."""

        def __init__(self, kind: str, text: str) -> None:
            super().__init__()
            self.kind = kind
            """"search" or "filter"."""
            self.text = text

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.kind = SEARCH

    def compose(self) -> ComposeResult:
        yield Static("", classes="prompt", markup=False)
        yield Input(select_on_focus=True)
        yield Static("", classes="fault", markup=False)

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, kind: str, text: str = "") -> None:
        """Ask for a search or a filter, with what was asked for before."""
        self.kind = kind
        self.query_one(".prompt", Static).update(_PROMPTS[kind])
        entry = self.query_one(Input)
        entry.placeholder, entry.value = _HINTS[kind], text
        self._say("")
        self.add_class("-open")
        # At once, not with the next refresh: what is typed right behind the key belongs to the prompt.
        self.screen.set_focus(entry)

    def close(self) -> None:
        self.remove_class("-open")

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._say("")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            pattern = event.value.removeprefix("!") if self.kind == FILTER else event.value
            if event.value:
                LogPattern.parse(pattern)
        except ValueError as fault:
            self._say(str(fault))
            return
        self.close()
        self.post_message(self.Answered(self.kind, event.value))

    def _say(self, fault: str) -> None:
        self.query_one(".fault", Static).update(fault)
