"""A log on the screen: any length, any line at once, bounded work per frame; only the rows on the screen are read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from time import localtime, monotonic, strftime
from typing import ClassVar, Final

from rich.segment import Segment
from rich.style import Style
from textual.events import MouseScrollDown, MouseScrollUp, Resize
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollDown, ScrollTo, ScrollUp
from textual.selection import Selection
from textual.strip import Strip

from engine.api import ERRORS, LAUNCHER_SOURCE, LogLine, LogPattern, RunDir
from tui.glyphs import RANK_STYLES
from tui.widgets.log_rows import Mark, Row, sgr_style, text_strip
from tui.widgets.log_scan import Seek
from tui.widgets.log_window import ALL, STEP_CHARACTERS, LogState, LogWindow

__all__ = ["LogState", "LogView"]

REDRAW_S: Final = 0.1
"""Between two refreshes."""
ENDED_S: Final = 1.0
"""Between two reads after the run's end."""
WHEEL_ROWS: Final = 3
COPIED_LINES: Final = 10_000
_SEARCHED_CHARACTERS: Final = 2_000
"""Characters of a line that are searched for an error."""


class LogView(ScrollView, can_focus=True, inherit_bindings=False):
    """Over a run's directory. It has no keys of its own: the app's actions call its methods."""

    ALLOW_SELECT = True
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "log-view--time",
        "log-view--error",
        "log-view--match",
        "log-view--current",
        "log-view--empty",
        *(f"log-view--rank{number}" for number in range(len(RANK_STYLES))),
    }
    DEFAULT_CSS = """
    LogView {
        height: 1fr; overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1; color: $foreground;
        & > .log-view--time { color: $text-muted; }
        & > .log-view--error { color: $text-error; }
        & > .log-view--match { background: $warning; color: $background; }
        & > .log-view--current { text-style: bold underline; }
        & > .log-view--empty { color: $text-muted; }
        RANK_STYLES
    }
    """.replace(
        "RANK_STYLES",
        "\n".join(f"& > .log-view--rank{number} {{ color: {style}; }}" for number, style in enumerate(RANK_STYLES)),
    )

    @dataclass
    class Changed(Message):
        """The view's state has changed; a newer message replaces a waiting one."""

        view: LogView
        state: LogState

        @property
        def control(self) -> LogView:
            return self.view

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, LogView.Changed) and message.view is self.view

    @dataclass
    class _Found(Message):
        seek: Seek
        number: int | None

    def __init__(self, *, redraw_s: float = REDRAW_S, id: str | None = None) -> None:
        super().__init__(id=id)
        self._window = LogWindow(self._post_found)
        self._redraw_s = redraw_s
        self.state = LogState()
        """The state of the last Changed message."""
        self._ended, self._no_run = False, ""
        self._seen = True
        """It is on the screen."""
        self._pointed = False
        """The mouse has been over it."""
        self._refreshed_at = float("-inf")
        self._drawn: tuple[object, ...] = ()
        self._marks: dict[int, list[Mark]] = {}
        self._selectable = False

    def on_mount(self) -> None:
        self.set_interval(self._redraw_s, self._refresh)

    def on_enter(self) -> None:
        self._pointed = True
        self._show()

    def on_hide(self) -> None:
        self._seen = False

    def on_show(self) -> None:
        self._seen = True
        self._refresh()

    def on_unmount(self) -> None:
        self._window.close()

    # Source and place

    def open(self, run_dir: RunDir | None, source: int | None = None) -> None:
        self._window.open(run_dir, source)
        self._show()

    @property
    def sources(self) -> list[int]:
        return self._window.sources

    def set_source(self, source: int | None) -> None:
        self._window.set_source(source)
        self._show()

    def next_source(self, step: int = 1) -> None:
        self._window.next_source(step)
        self._show()

    def follow(self, on: bool = True) -> None:
        if on:
            self._window.follow()
        else:
            self._window.stay()
        self._show()

    def tell(self, ended: bool, no_run: str) -> None:
        """The run has ended, or not: an empty log stays empty then. `no_run`: what is shown without any."""
        if (ended, no_run) != (self._ended, self._no_run):
            self._ended, self._no_run = ended, no_run
            self.refresh()

    def freeze(self, frozen: bool) -> None:
        self._window.freeze(frozen)
        self._show()

    def toggle_wrap(self) -> None:
        self._window.set_wrap(not self._window.wrap)
        self._show()

    def toggle_alike(self) -> None:
        """Show lines that all ranks print alike once, or each rank's."""
        self._window.set_alike_once(not self._window.alike_once)
        self._show()

    def toggle_timestamps(self) -> None:
        """Show when each line reached the head, local time."""
        self._window.timestamps = not self._window.timestamps
        self._window.settle()
        self._show()

    # Search, filter, errors

    def search(self, text: str) -> None:
        """Mark every match and go to the next one from here, the newest one while following; LogPattern's forms.
        Empty text ends the search. Raises ValueError for a pattern that is none."""
        pattern = LogPattern.parse(text) if text else None
        self._window.search(pattern)
        if pattern is not None:
            self._window.seek_first(pattern)
        self._show()

    def next_match(self) -> None:
        if self._window.pattern is not None:
            self._window.seek(self._window.pattern, 1, wrap=True)

    def previous_match(self) -> None:
        if self._window.pattern is not None:
            self._window.seek(self._window.pattern, -1, wrap=True)

    def filter(self, text: str) -> None:
        """Show only lines that match, with a leading "!" only those that do not; empty text shows all again.
        Raises ValueError for a pattern that is none."""
        self._window.set_filter(text or None)
        self._show()

    def next_error(self) -> None:
        self._window.seek(ERRORS, 1)

    def previous_error(self) -> None:
        self._window.seek(ERRORS, -1)

    def jump_to(self, source: int | None, offset: int) -> None:
        if source is not None:
            self._window.jump_to(source, offset)
        self._show()

    # Movement and copying

    def move(self, name: str) -> bool:
        """down, up, page_down, page_up, top, bottom, left or right; False when there is nothing that way."""
        window = self._window
        page = max(1, window.height - 1)
        moved = True
        match name:
            case "down" | "up":
                moved = window.scroll(1 if name == "down" else -1)
            case "page_down" | "page_up":
                moved = window.scroll(page if name == "page_down" else -page)
            case "top":
                window.top()
            case "bottom":
                window.follow()
            case "left" | "right":
                moved = window.sideways(STEP_CHARACTERS if name == "right" else -STEP_CHARACTERS)
        self._show()
        return moved

    def copy_text(self) -> str:
        """The selection, else the line that a search or jump went to, else the line at the top."""
        selection = self.text_selection
        if selection is not None and (selected := self.get_selection(selection)):
            return selected[0]
        line = self._window.current_line()
        return "" if line is None else line.text

    def text(self) -> str:
        """The lines on the screen, whole."""
        lines = (next(rows).line for _, rows in groupby(self._window.rows, key=lambda row: row.position))
        return "\n".join("".join(text for text, _ in self._gutter(line)) + line.text for line in lines)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        start = 0 if selection.start is None else selection.start.y
        stop = self._window.shown_count if selection.end is None else selection.end.y + 1
        texts = []
        for position, line in enumerate(self._window.lines(start, min(stop, start + COPIED_LINES)), start):
            if not self._window.repeats(line.number) and (span := selection.get_span(position)) is not None:
                texts.append(line.text[max(0, span[0]) : None if span[1] < 0 else span[1]])
        return "\n".join(texts), "\n"

    # Drawing

    def _refresh(self) -> None:
        # Nothing is written to the log of a run that has ended, or only what was late; and nobody sees a hidden one.
        calm = self._ended or not self._seen
        if not calm or self.state.search is not None or monotonic() - self._refreshed_at > ENDED_S:
            self._refreshed_at = monotonic()
            self._window.refresh()
        elif self.state.counted:
            return
        self._show()

    def _show(self) -> None:
        """Draw when the rows differ from those drawn, and post Changed when the state differs."""
        window = self._window
        self._place_scrollbar()
        state = window.state()
        if state != self.state:
            self.state = state
            self.post_message(self.Changed(self, state))
        nothing = "" if window.rows else self._nothing()
        labels = tuple(window.first_alike(row.line.number) for row in window.rows)
        drawn = (tuple(window.rows), labels, window.pattern, window.current, window.gutter_width, window.width, nothing)
        # A place in the log makes a style of its own for each line, and Textual keeps thousands of styles: rows that
        # run past are not worth it, nobody selects them; nor before the mouse has come.
        selectable = (drawn == self._drawn and self._pointed) or not window.following
        if drawn != self._drawn or selectable != self._selectable:
            self._drawn, self._selectable = drawn, selectable
            self._marks.clear()
            self.refresh()

    def _post_found(self, seek: Seek, number: int | None) -> None:
        if self.is_running:
            self.post_message(self._Found(seek, number))

    def on_log_view__found(self, message: _Found) -> None:
        message.stop()
        self._window.answer(message.seek, message.number)
        self._show()

    def _place_scrollbar(self) -> None:
        # Set on the scrollbar directly: the reactive would lay out the whole screen ten times a second.
        window = self._window
        size = Size(window.width, max(window.shown_count, window.height))
        if size != self.virtual_size:
            self.set_reactive(LogView.virtual_size, size)
            self.vertical_scrollbar.window_virtual_size = size.height
        # More lines than rows where some have none.
        at_end = window.following or not window.rows or len(window.rows) < window.height
        end = window.shown_count if at_end else window.rows[-1].position + 1
        self.vertical_scrollbar.window_size = max(window.height, end - window.position)
        if self.scroll_offset.y != window.position:
            self.scroll_target_y = self.scroll_y = window.position

    def _on_scroll_to(self, message: ScrollTo) -> None:
        message.prevent_default().stop()
        if message.y is not None:
            self._window.scroll_to(round(message.y))
            self._show()

    def _on_scroll_up(self, message: ScrollUp) -> None:
        message.prevent_default().stop()
        self.move("page_up")

    def _on_scroll_down(self, message: ScrollDown) -> None:
        message.prevent_default().stop()
        self.move("page_down")

    def on_resize(self, event: Resize) -> None:
        self._window.resize(self.scrollable_content_region.width, self.scrollable_content_region.height)
        self._show()

    def _on_mouse_scroll_down(self, event: MouseScrollDown) -> None:
        event.prevent_default()
        if self._window.scroll(WHEEL_ROWS):
            event.stop()
        self._show()

    def _on_mouse_scroll_up(self, event: MouseScrollUp) -> None:
        event.prevent_default()
        if self._window.scroll(-WHEEL_ROWS):
            event.stop()
        self._show()

    def render_line(self, y: int) -> Strip:
        base, window = self.rich_style, self._window
        if y < len(window.rows):
            row = window.rows[y]
            gutter = Strip.blank(window.gutter_width, base) if row.part else self._gutter_strip(row, base)
            return Strip.join([gutter, self._text_strip(row, base)])
        if y == 0:
            style = base + self.get_component_rich_style("log-view--empty", partial=True)
            return Strip([Segment(self._nothing(), style)]).adjust_cell_length(window.width, base)
        return Strip.blank(window.width, base)

    def _nothing(self) -> str:
        if self._window.run_dir is None:
            return self._no_run
        if self.state.filter is None or not self.state.lines:
            return "no output: no rank has printed anything" if self._ended else "no output yet"
        return f"no line passes the filter {self.state.filter}" + ("" if self.state.counted else " so far")

    def _gutter(self, line: LogLine) -> list[tuple[str, str]]:
        """The texts before a line, with the component classes of their styles."""
        parts = []
        if self._window.timestamps:
            parts.append((strftime("%H:%M:%S ", localtime(line.at)), "log-view--time"))
        if width := self._window.label_width:
            launcher, alike = line.source == LAUNCHER_SOURCE, self._window.first_alike(line.number) is not None
            label = ALL if alike else "L" if launcher else str(line.source)
            kind = "time" if launcher or alike else f"rank{line.source % len(RANK_STYLES)}"
            parts.append((f"{label:>{width}} ", f"log-view--{kind}"))
        return parts

    def _gutter_strip(self, row: Row, base: Style) -> Strip:
        return Strip(
            Segment(text, base + self.get_component_rich_style(style, partial=True))
            for text, style in self._gutter(row.line)
        )

    def _text_strip(self, row: Row, base: Style) -> Strip:
        line, style = row.line, base
        if ERRORS.expression.search(line.text, 0, _SEARCHED_CHARACTERS):
            style += self.get_component_rich_style("log-view--error", partial=True)
        if line.number == self._window.current:
            style += self.get_component_rich_style("log-view--current", partial=True)
        marks = [*self._colours_of(line, style), *self._marks_of(line)]
        selection = self.text_selection
        if selection is not None and (span := selection.get_span(row.position)) is not None:
            end = len(line.text) if span[1] < 0 else span[1]
            marks.append(Mark(span[0], end, self.screen.get_component_rich_style("screen--selection")))
        strip = text_strip(row, self._window.text_width, style, marks)
        return strip.apply_offsets(row.start, row.position) if self._selectable else strip

    def _colours_of(self, line: LogLine, base: Style) -> list[Mark]:
        if self.app.no_color:
            return []
        theme = self.app.ansi_theme
        return [Mark(start, end, sgr_style(parameters, base, theme)) for start, end, parameters in line.colours]

    def _marks_of(self, line: LogLine) -> list[Mark]:
        """The search's matches in a line; computed once per drawing, since a wrapped line has many rows."""
        if self._window.pattern is None:
            return []
        if line.number not in self._marks:
            style = self.get_component_rich_style("log-view--match", partial=True)
            self._marks[line.number] = [Mark(*span, style) for span in self._window.pattern.spans(line.text)]
        return self._marks[line.number]

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._marks.clear()
        self.refresh()
