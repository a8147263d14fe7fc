"""The lines of a log on a screen: the place, the filter, the search, the rows; nothing about how they are drawn.

The place is the number of the line at the top: arriving lines, a filter that is still scanning, and another size of the
screen leave it where it is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from engine.api import ERRORS, LAUNCHER_SOURCE, AlikeLines, LogFilter, LogLine, LogPattern, LogReader, RunDir
from tui.widgets.log_rows import Row, height_of, rows_of
from tui.widgets.log_scan import LogScan, Seek

STEP_CHARACTERS: Final = 8
"""Sideways."""
CLOCK_CELLS: Final = 9
"""A timestamp and the space after it."""
ALL: Final = "all"
"""In front of a line that stands for those of all ranks."""


@dataclass(frozen=True)
class LogState:
    """The view's state, for titles and badges."""

    source: int | None = None
    """Whose log: a rank, LAUNCHER_SOURCE, or None for all merged."""
    following: bool = True
    frozen: bool = False
    new_lines: int = 0
    """Arrived since the view last showed the end."""
    lines: int = 0
    shown: int = 0
    """Lines that the filter lets through."""
    search: str | None = None
    match: int | None = None
    """The number of the current match, from 1."""
    matches: int = 0
    counted: bool = True
    """All lines have been scanned for the search and the filter."""
    filter: str | None = None
    wrap: bool = False
    timestamps: bool = False
    note: str = ""
    """The last key found nothing: "no match"."""


class LogWindow:
    """A window of `width` × `height` cells on a run's log. `on_found` is called from another thread when a search has
    an answer, which goes to `answer`."""

    def __init__(self, on_found: Callable[[Seek, int | None], object]) -> None:
        self._found = on_found
        self.width, self.height = 0, 0
        self.wrap = self.timestamps = False
        self.alike_once = True
        """Lines that all ranks print alike are shown once, while those of all ranks are shown."""
        self._reader: LogReader | None = None
        self._scan: LogScan | None = None
        self._frozen_at: int | None = None
        """Lines there were when the window was frozen, or when another log was shown in it since."""
        self._begin(None, None)

    def _begin(self, run_dir: RunDir | None, source: int | None) -> None:
        self.close()
        self.run_dir = run_dir
        self.source = source
        self._reader = None if run_dir is None else LogReader(run_dir, source)
        self._alike = None if self._reader is None else AlikeLines(self._reader)
        self._scan = None if run_dir is None else LogScan(LogReader(run_dir, source), self._found)
        if self._scan is not None:
            self._scan.alike_once = self.alike_once
        self.sources = [] if self._reader is None else self._reader.run_dir.sources()
        """Logs that there are, ranks first, then LAUNCHER_SOURCE."""
        self.following = True
        self.pattern: LogPattern | None = None
        self.current: int | None = None
        """The line that a search or a jump went to."""
        self.note = ""
        self.rows: list[Row] = []
        """The rows of the screen, at most `height`."""
        self._top = (0, 0)
        """The place: the number of the line at the top, and which of its rows."""
        self._left = 0
        self._seen = 0
        """Lines there were when the end was last shown."""
        self._settled: tuple[object, ...] = ()
        """The inputs of `rows`."""
        if self._frozen_at is not None:
            self._frozen_at = self.line_count

    def open(self, run_dir: RunDir | None, source: int | None = None) -> None:
        """Show this run's log, following; None: nothing."""
        self._begin(run_dir, source)
        self.settle()

    def close(self) -> None:
        if self._scan is not None:
            self._scan.close()
        if self._reader is not None:
            self._reader.close()
        self._scan = self._reader = None

    def resize(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.settle()

    def refresh(self) -> None:
        """Read what has arrived."""
        if self._reader is None:
            return
        top, current = self._top_line(), self.line(self.current)
        replaced = self._reader.refresh()
        if self._alike is not None:
            self._alike.refresh(replaced=replaced)
        if replaced:
            # The index was repaired after a crash: the same lines have other numbers now.
            same = None if current is None else self._same_line(current)
            self._place(0 if top is None else self._same_place(top), self._top[1], same)
            self._seen = min(self._seen, self.line_count)
            self._settled = ()
        self.sources = self._reader.run_dir.sources()
        if self._scan is not None:
            self._scan.wake()
        self.settle()

    def state(self) -> LogState:
        matches = None if self._scan is None else self._scan.matches
        count, match = self.line_count, None
        if matches is not None and self.current is not None:
            place = bisect_right(matches.numbers, self.current)
            match = place if place and matches.numbers[place - 1] == self.current else None
        return LogState(
            source=self.source,
            following=self.following,
            frozen=self._frozen_at is not None,
            new_lines=max(0, count - self._seen),
            lines=count,
            shown=self.shown_count,
            search=None if self.pattern is None else self.pattern.text,
            match=match,
            matches=0 if matches is None else len(matches.numbers),
            counted=all(scan is None or scan.scanned >= count for scan in (matches, self._kept)),
            filter=None if self._kept is None else self._kept.text,
            wrap=self.wrap,
            timestamps=self.timestamps,
            note=self.note,
        )

    # Source and filter

    def set_source(self, source: int | None) -> None:
        """Show one source's log, or (None) all merged, at the same moment; search and filter stay."""
        if self._reader is None or source == self.source:
            return
        following, pattern, new_lines = self.following, self.pattern, self.line_count - self._seen
        kept = None if self._kept is None else self._kept.text
        top, current = self._top_line(), self.line(self.current)
        self._begin(self.run_dir, source)
        if top is not None and not following:
            self._place(self._same_place(top), 0, None if current is None else self._same_line(current))
        self.following = following
        self._seen = max(0, self.line_count - new_lines)
        self.search(pattern)
        self.set_filter(kept)

    def next_source(self, step: int) -> None:
        choices: list[int | None] = [None, *self.sources]
        here = choices.index(self.source) if self.source in choices else 0
        self.set_source(choices[(here + step) % len(choices)])

    def follow(self) -> None:
        """Show the end, and what arrives."""
        self.following, self.note = True, ""
        self.settle()

    def stay(self) -> None:
        """Stay where it is, whatever arrives."""
        if self.following and self.rows:
            self._top = (self.rows[0].line.number, self.rows[0].part)
        self.following, self.note = False, ""

    def freeze(self, frozen: bool) -> None:
        """Show nothing new; arriving lines are counted."""
        self._frozen_at = self.line_count if frozen else None
        self.settle()

    def set_wrap(self, wrap: bool) -> None:
        self.wrap, self._left, self._top = wrap, 0, (self._top[0], 0)
        self.settle()

    def set_alike_once(self, once: bool) -> None:
        self.alike_once, self._settled = once, ()
        if self._scan is not None:
            self._scan.alike_once = once
            self._scan.count(self.pattern)
        self._place(*self._top, self.current)
        self.settle()

    def set_filter(self, text: str | None) -> None:
        """Show only the lines that LogFilter's pattern keeps; None: all. Raises ValueError."""
        if self._scan is not None:
            self._scan.set_filter(text)
            self.note, self._settled = "", ()
            self.settle()

    # Search

    def search(self, pattern: LogPattern | None) -> None:
        """Count and mark what matches; None ends that."""
        self.pattern, self.note = pattern, ""
        if self._scan is not None:
            self._scan.count(pattern)
        self.settle()

    def seek_first(self, pattern: LogPattern) -> None:
        """The next match from here, itself included; the newest while following."""
        self.current = None
        if self.following:
            self._seek(pattern, self.line_count - 1, -1, wrap=True)
        else:
            self._seek(pattern, self._top_number(), 1, wrap=True)

    def seek(self, pattern: LogPattern, step: int, *, wrap: bool = False) -> None:
        """The next match after (step 1) or before (-1) the current line when it can be seen, else the screen's top."""
        on_screen = {row.line.number for row in self.rows}
        if self.current is not None and self.current in on_screen:
            self._seek(pattern, self.current + step, step, wrap)
        else:
            self._seek(pattern, self._top_number() - (step < 0), step, wrap)

    def _seek(self, pattern: LogPattern, from_line: int, step: int, wrap: bool = False) -> None:
        if self._scan is not None:
            self._scan.seek(Seek(pattern, from_line, step > 0, wrap))

    def answer(self, seek: Seek, number: int | None) -> None:
        if number is not None:
            self.go_to(number)
            return
        what = "error" if seek.pattern is ERRORS else "match"
        self.note = f"no {what}" if seek.wrap else f"no {what} {'below' if seek.forward else 'above'}"

    def jump_to(self, source: int, offset: int) -> None:
        """Show the line that byte `offset` of a source's log belongs to."""
        if self._reader is None:
            return
        if self.source not in (None, source):
            self.set_source(source)
        if self._kept is not None:
            self.set_filter(None)
        self._reader.refresh()
        if (number := self._reader.number_of(source, offset)) is not None:
            if self._frozen_at is not None:
                self._frozen_at = max(self._frozen_at, number + 1)
            self.go_to(number)

    def go_to(self, number: int) -> None:
        """Make a line, or the one that stands for it, the current one, with some earlier lines above it."""
        self.current = number = self._standing_for(number)
        self.stay()
        if number not in {row.line.number for row in self.rows if row.part == 0}:
            self._top = (self._number(max(0, self._position(number) - self.height // 3)), 0)
        self.settle()

    # Movement

    def top(self) -> None:
        self.stay()
        self._top = (self._number(0), 0)
        self.settle()

    def scroll_to(self, position: int, part: int = 0) -> None:
        """Put the line at a position at the top; at the end, follow."""
        if (position, part) >= self._end():
            self.follow()
            return
        self.stay()
        self._top = (self._number(position), part)
        self.settle()

    def scroll(self, rows: int) -> bool:
        """Move by rows of the screen; the end, reached, is followed. False when there is nothing that way."""
        if not self.rows:
            return False
        start = position, part = self.rows[0].position, self.rows[0].part
        if not self.wrap and not self._merges:
            position += rows
        elif rows > 0:
            below = self._rows_from(position, part, rows + 1)
            position, part = below[-1].position, below[-1].part
        else:
            part += rows
            while part < 0 < position:
                position -= 1
                part += self._height_of(position)
        place = min(max((0, 0), (position, max(0, part))), self._end())
        if place == start and (self.following or rows < 0):
            return False
        self.scroll_to(*place)
        return True

    def sideways(self, characters: int) -> bool:
        """Show what is further right or left; False when there is nothing that way."""
        room = max((len(row.line.text) for row in self.rows), default=0) - self.text_width // 2
        left = max(0, min(self._left + characters, room))
        if self.wrap or left == self._left:
            return False
        self._left = left
        self.settle()
        return True

    # Lines

    @property
    def line_count(self) -> int:
        return 0 if self._reader is None else self._reader.line_count

    @property
    def shown_count(self) -> int:
        """Lines that the filter keeps, while frozen of those that had arrived by then."""
        if self._kept is not None:
            count = len(self._kept.numbers)
            return count if self._frozen_at is None else min(count, bisect_left(self._kept.numbers, self._frozen_at))
        return self.line_count if self._frozen_at is None else min(self.line_count, self._frozen_at)

    @property
    def position(self) -> int:
        return self.rows[0].position if self.rows else 0

    @property
    def label_width(self) -> int:
        """Cells for the rank's number in front of a line; 0 when all lines are of one source."""
        if self.source is not None:
            return 0
        if self._merges:
            return len(ALL)
        return max((len(str(source)) for source in self.sources if source != LAUNCHER_SOURCE), default=1)

    @property
    def gutter_width(self) -> int:
        label = self.label_width
        return (CLOCK_CELLS if self.timestamps else 0) + (label + 1 if label else 0)

    @property
    def text_width(self) -> int:
        return max(1, self.width - self.gutter_width)

    def lines(self, start: int, stop: int) -> list[LogLine]:
        """The lines that are shown at positions `start` to `stop`."""
        start, stop = max(0, start), min(stop, self.shown_count)
        if self._reader is None or start >= stop:
            return []
        if self._kept is None:
            return self._reader.lines(start, stop)
        lines: list[LogLine] = []
        for _, run in groupby(enumerate(self._kept.numbers[start:stop]), key=lambda pair: pair[1] - pair[0]):
            together = [number for _, number in run]
            lines += self._reader.lines(together[0], together[-1] + 1)
        return lines

    def line(self, number: int | None) -> LogLine | None:
        if self._reader is None or number is None:
            return None
        return next(iter(self._reader.lines(number, number + 1)), None)

    def current_line(self) -> LogLine | None:
        """The current line, else the one at the top."""
        return self.line(self.current) or self._top_line()

    @property
    def _merges(self) -> bool:
        return self.alike_once and self.source is None and sum(source != LAUNCHER_SOURCE for source in self.sources) > 1

    def first_alike(self, number: int) -> int | None:
        """The line that stands for those of all ranks, itself included; None where each rank's are shown."""
        if self._alike is None or not self._merges:
            return None
        return self._alike.first(number, self._frozen_at)

    def repeats(self, number: int) -> bool:
        return self._standing_for(number) != number

    def _standing_for(self, number: int) -> int:
        """The line that is shown for this one: the first of all ranks', else itself."""
        first = self.first_alike(number)
        return number if first is None else first

    def _place(self, top: int, part: int, current: int | None) -> None:
        """Put these lines, or those that stand for them, at the top and as the current one."""
        self._top = self._standing_for(top), part
        self.current = None if current is None else self._standing_for(current)

    @property
    def _kept(self) -> LogFilter | None:
        return None if self._scan is None else self._scan.filter

    def _number(self, position: int) -> int:
        """The line that is shown at a position."""
        if self._kept is None:
            return position
        return self._kept.numbers[position] if 0 <= position < len(self._kept.numbers) else 0

    def _position(self, number: int) -> int:
        """The place of a line, or of the next one that is shown."""
        return number if self._kept is None else bisect_left(self._kept.numbers, number)

    def _top_number(self) -> int:
        return self.rows[0].line.number if self.rows else self._top[0]

    def _top_line(self) -> LogLine | None:
        return self.rows[0].line if self.rows else None

    def _same_line(self, line: LogLine) -> int | None:
        if self._reader is None or self.source not in (None, line.source):
            return None
        return self._reader.number_of(line.source, line.offset)

    def _same_place(self, line: LogLine) -> int:
        """The number that a line of another log has here, or what arrived next."""
        number = self._same_line(line)
        if number is None and self._reader is not None:
            number = self._reader.first_since(line.at)
        return number or 0

    # The rows

    def settle(self) -> None:
        """Compute the rows of the screen."""
        if self.width < 1 or self.height < 1:
            return
        shape = (self.width, self.height, self.gutter_width, self.wrap, self._left, self.following, self._top)
        settled = (*shape, self.shown_count, self.line_count if self.following else None)
        if settled == self._settled and not any(row.line.partial for row in self.rows):
            return
        self._settled = settled
        end = self._end()
        place = end if self.following else min((self._position(self._top[0]), self._top[1]), end)
        self.rows = self._rows_from(*place, self.height)
        if self.following and self._frozen_at is None:
            self._seen = self.line_count

    def _end(self) -> tuple[int, int]:
        """Position and row at the top when the last row of the last line is at the bottom."""
        position = self.shown_count
        if not self.wrap and not self._merges:
            return max(0, position - self.height), 0
        rows = 0
        while position > 0 and rows < self.height:
            position -= 1
            rows += self._height_of(position)
        return position, max(0, rows - self.height)

    def _height_of(self, position: int) -> int:
        if self.repeats(self._number(position)):
            return 0
        if not self.wrap:
            return 1
        return sum(height_of(line, self.text_width, wrap=True) for line in self.lines(position, position + 1))

    def _rows_from(self, position: int, part: int, height: int) -> list[Row]:
        rows: list[Row] = []
        part = 0 if self.repeats(self._number(position)) else part
        while len(rows) < height + part and (lines := self.lines(position, position + height)):
            for place, line in enumerate(lines, position):
                rows += [] if self.repeats(line.number) else self._rows_of(line, place)
                if len(rows) >= height + part:
                    break
            position += height
        return rows[part : part + height]

    def _rows_of(self, line: LogLine, position: int) -> list[Row]:
        return rows_of(line, position, self.text_width, wrap=self.wrap, left=self._left)
