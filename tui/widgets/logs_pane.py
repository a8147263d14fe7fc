"""The logs: every rank's lines merged, or one rank's, over the run's files; with the bar for search and filter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from textual.app import ComposeResult
from textual.widget import Widget

from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from tui.state import DeckState
from tui.widgets.filter_bar import FILTER, SEARCH, FilterBar
from tui.widgets.log_view import REDRAW_S, LogState, LogView
from tui.widgets.pane import Pane

if TYPE_CHECKING:
    from tui.app import FlightDeckApp


SLOW_REDRAW_S: Final = 0.5
"""Over a slow link."""


class LogsPane(Pane):
    """Frame, title and keys of the log view."""

    NAME = "logs"
    HINTS = ("search", "filter", "next_rank", "follow")

    def compose(self) -> ComposeResult:
        slow = cast("FlightDeckApp", self.app).slow_link
        yield LogView(id="log", redraw_s=SLOW_REDRAW_S if slow else REDRAW_S)
        yield FilterBar(id="ask")

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
        self.view.end(state.snapshot is not None and not state.active)

    def text(self) -> str:
        return self.view.text()

    def copy_text(self) -> str:
        return self.view.copy_text()

    def move(self, name: str) -> bool:
        self.view.move(name)
        return True

    def open(self, run_dir: RunDir | None) -> None:
        """Show the log of this run from now on."""
        self.view.open(run_dir)

    def jump_to(self, source: int | None, offset: int) -> None:
        """Put the line at this byte offset of a source's log on the screen."""
        self.view.jump_to(source, offset)

    def freeze(self, frozen: bool) -> None:
        self.view.freeze(frozen)

    def on_log_view_changed(self, event: LogView.Changed) -> None:
        # Taken here and not on the screen: a message does not bubble past the widget whose handler caused it.
        cast("FlightDeckApp", self.app).change(searching=event.state.search is not None)
        self.show(self.state)

    def on_filter_bar_answered(self, event: FilterBar.Answered) -> None:
        self.view.focus()
        if event.kind == SEARCH:
            self.view.search(event.text)
        else:
            self.view.filter(event.text)

    def do(self, action: str) -> None:
        """A log action of the table."""
        view, ask = self.view, self.query_one(FilterBar)
        {
            "search": lambda: ask.open(SEARCH, view.state.search or ""),
            "filter": lambda: ask.open(FILTER, view.state.filter or ""),
            "next_match": view.next_match,
            "previous_match": view.previous_match,
            "follow": lambda: view.follow(not view.state.following),
            "next_error": view.next_error,
            "previous_error": view.previous_error,
            "previous_rank": lambda: view.next_source(-1),
            "next_rank": view.next_source,
            "all_ranks": lambda: view.set_source(None),
            "wrap": view.toggle_wrap,
            "timestamps": view.toggle_timestamps,
        }[action]()

    def back(self) -> bool:
        """Close the prompt, end the search, end the filter: one of them; False when there is none."""
        ask = self.query_one(FilterBar)
        if ask.is_open:
            ask.close()
            self.view.focus()
        elif self.view.state.search is not None:
            self.view.search("")
        elif self.view.state.filter is not None:
            self.view.filter("")
        else:
            return False
        return True


def title(log: LogState, state: DeckState) -> str:
    """Whose log, whether it follows, what has come since, and what is looked for."""
    if state.snapshot is None:
        return "logs"
    whose = {None: "all ranks", LAUNCHER_SOURCE: "launcher"}.get(log.source, f"rank {log.source}")
    parts = ["logs", whose]
    if log.frozen:
        parts.append("FROZEN")
    elif log.following and state.active:
        parts.append("TAIL")
    if log.new_lines:
        parts.append(f"+{log.new_lines:,} line{'s' if log.new_lines != 1 else ''}")
    if log.filter is not None:
        parts.append(f"filter {log.filter!r} {log.shown:,} of {log.lines:,}")
    if log.search is not None:
        dots = "" if log.counted else ".."
        parts.append(f"{log.match or 0:,}/{log.matches:,}{dots} {log.search!r}")
    if log.note:
        parts.append(log.note)
    return state.glyphs.separator.join(parts)
