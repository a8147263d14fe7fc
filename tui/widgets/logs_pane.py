"""The log pane: all ranks' lines merged or one rank's, and the prompt for a search (`/`) or a filter (`&`)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.events import Key
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, Static

from engine.api import LAUNCHER_SOURCE, LogPattern
from engine.errors import plural
from tui.state import DeckState
from tui.widgets.log_view import REDRAW_S, LogState, LogView
from tui.widgets.pane import Pane

SEARCH: Final = "search"
FILTER: Final = "filter"
_TAKEN_S: Final = 2.0


class Entry(Input):
    """Takes enter itself, in its turn between what is typed before and behind it."""

    def key_enter(self, event: Key) -> None:
        event.stop()
        assert isinstance(self.parent, FilterBar)
        self.parent.enter(self.value)

    async def drained(self) -> None:
        """Wait until it has taken all keys that it was given."""
        done = asyncio.Event()
        # One that is taken down takes no more.
        if self.call_later(done.set):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), _TAKEN_S)


class FilterBar(Horizontal):
    """Hidden until it is opened. Enter hands `answer` the kind, a key of PROMPTS, and a text that `check` takes, or
    none; escape (the app calls `close`) nothing."""

    DEFAULT_CSS = """
    FilterBar { height: 1; display: none; }
    FilterBar.-open { display: block; }
    FilterBar .prompt { width: 2; color: $text-primary; text-style: bold; }
    FilterBar Input { width: 1fr; border: none; height: 1; padding: 0; background: $surface; }
    FilterBar .fault { width: auto; color: $text-error; padding: 0 1; }
    """

    PROMPTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        SEARCH: ("/", "text, or re: and a regular expression; up: earlier ones"),
        FILTER: ("&", "lines to keep; ! inverts; empty shows all"),
    }
    """Kind → what stands before the entry, and what it takes."""

    def __init__(self, answer: Callable[[str, str], object], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._answer = answer
        self.kind = SEARCH
        self._entered: dict[str, list[str]] = {kind: [] for kind in self.PROMPTS}
        """The patterns, oldest first, each once."""
        self._at = 0
        """The entry that up and down have come to; past the last: what is typed."""

    def compose(self) -> ComposeResult:
        yield Static("", classes="prompt", markup=False)
        yield Entry(select_on_focus=True)
        yield Static("", classes="fault", markup=False)

    @property
    def is_open(self) -> bool:
        return self.has_class("-open")

    def open(self, kind: str, text: str = "") -> None:
        self.kind = kind
        self._at = len(self._entered[kind])
        entry, (prompt, hint) = self.query_one(Input), self.PROMPTS[kind]
        self.query_one(".prompt", Static).update(prompt)
        entry.placeholder, entry.value = hint, text
        self._show_fault("")
        self.add_class("-open")
        # At once, not with the next refresh: what is typed right behind the key belongs to the prompt.
        self.screen.set_focus(entry)

    def close(self) -> None:
        self.remove_class("-open")
        if isinstance(self.parent, Pane):
            # At once, as when it is opened.
            self.screen.set_focus(self.parent.keys_go_to, scroll_visible=False)

    def on_key(self, event: Key) -> None:
        """Up and down go through what was entered before."""
        entered = self._entered[self.kind]
        if event.key not in ("up", "down"):
            return
        event.stop()
        self._at = max(0, min(len(entered), self._at + (1 if event.key == "down" else -1)))
        entry = self.query_one(Input)
        entry.value = entered[self._at] if self._at < len(entered) else ""
        entry.cursor_position = len(entry.value)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show_fault("")

    def enter(self, text: str) -> None:
        try:
            if text:
                self.check(text)
        except ValueError as fault:
            self._show_fault(str(fault))
            return
        if text:
            entered = self._entered[self.kind]
            entered[:] = [other for other in entered if other != text] + [text]
        self.close()
        self._answer(self.kind, text)

    def check(self, text: str) -> None:
        """Raises ValueError for what is not taken."""
        LogPattern.parse(text.removeprefix("!") if self.kind == FILTER else text)

    def _show_fault(self, fault: str) -> None:
        self.query_one(".fault", Static).update(fault)


class LogsPane(Pane):
    NAME = "logs"
    HINTS = ("search", "filter", "next_rank", "follow")
    UNSEEN = Pane.UNSEEN | {"now", "runs", "facts", "checks"}

    @dataclass
    class SearchChanged(Message):
        searching: bool

    def __init__(self, *, redraw_s: float | None = None) -> None:
        super().__init__()
        self._redraw_s = REDRAW_S if redraw_s is None else redraw_s

    def compose(self) -> ComposeResult:
        yield LogView(id="log", redraw_s=self._redraw_s)
        yield FilterBar(self._answer, id="prompt")

    @property
    def view(self) -> LogView:
        return self.query_one(LogView)

    @property
    def keys_go_to(self) -> Widget:
        return self.view

    @property
    def full(self) -> bool:
        return False

    def title(self, state: DeckState) -> str:
        return title(self.view.state, state)

    def draw(self, state: DeckState) -> None:
        """The view draws itself, but for what it cannot know."""
        no_run = "no run is shown: 5 lists them" if state.ready else "loading"
        self.view.tell(state.snapshot is not None and not state.active, no_run)

    def text(self) -> str:
        return self.view.text()

    def copy_text(self) -> str:
        return self.view.copy_text()

    def move(self, name: str) -> bool:
        self.view.move(name)
        return True

    def on_log_view_changed(self, event: LogView.Changed) -> None:
        # A message of its own: one does not bubble past the widget whose handler caused it.
        self.post_message(self.SearchChanged(event.state.search is not None))
        self.show(self.state)

    def _answer(self, kind: str, text: str) -> None:
        if kind == SEARCH:
            self.view.search(text)
        else:
            self.view.filter(text)

    def do(self, action: str) -> None:
        LOG_ACTIONS[action](self.view, self.query_one(FilterBar))

    def back(self) -> bool:
        """Close the prompt, end the search, end the filter: one of them; False when there is none."""
        prompt = self.query_one(FilterBar)
        if prompt.is_open:
            prompt.close()
        elif self.view.state.search is not None:
            self.view.search("")
        elif self.view.state.filter is not None:
            self.view.filter("")
        else:
            return False
        return True


LOG_ACTIONS: Final[Mapping[str, Callable[[LogView, FilterBar], None]]] = {
    "search": lambda view, prompt: prompt.open(SEARCH, view.state.search or ""),
    "filter": lambda view, prompt: prompt.open(FILTER, view.state.filter or ""),
    "next_match": lambda view, _: view.next_match(),
    "previous_match": lambda view, _: view.previous_match(),
    "follow": lambda view, _: view.follow(not view.state.following),
    "next_error": lambda view, _: view.next_error(),
    "previous_error": lambda view, _: view.previous_error(),
    "previous_rank": lambda view, _: view.next_source(-1),
    "next_rank": lambda view, _: view.next_source(),
    "all_ranks": lambda view, _: view.set_source(None),
    "wrap": lambda view, _: view.toggle_wrap(),
    "timestamps": lambda view, _: view.toggle_timestamps(),
    "alike": lambda view, _: view.toggle_alike(),
}
"""By action."""


def title(log: LogState, state: DeckState) -> str:
    """The source, whether the end is followed, new lines, the filter and the search."""
    if state.snapshot is None:
        return "logs"
    whose = {None: "all ranks", LAUNCHER_SOURCE: "launcher"}.get(log.source, f"rank {log.source}")
    parts = ["logs", whose]
    if log.frozen:
        parts.append("FROZEN")
    elif log.following and state.active:
        parts.append("TAIL")
    if log.new_lines:
        parts.append(f"+{plural(log.new_lines, 'line')}")
    if log.filter is not None:
        parts.append(f"filter {log.filter!r} {log.shown:,} of {log.lines:,}")
    if log.search is not None:
        dots = "" if log.counted else ".."
        parts.append(f"{log.match or 0:,}/{log.matches:,}{dots} {log.search!r}")
    if log.note:
        parts.append(log.note)
    return state.glyphs.separator.join(parts)
