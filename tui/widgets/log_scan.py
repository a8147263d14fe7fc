"""The thread behind a log view: it searches, filters and counts matches in a reader of its own, so that keys respond at
once whatever the log's length."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.api import AlikeLines, LogFilter, LogPattern, LogReader

SLICE_LINES: Final = 1 << 14
"""Lines scanned before a more urgent request is checked for."""


@dataclass(frozen=True)
class Seek:
    """A search for one line."""

    pattern: LogPattern
    from_line: int
    forward: bool
    wrap: bool = False


class LogScan:
    """One per opened log. `on_found` is called from the thread with the last seek and its line, None when there is
    none; an overtaken seek has no result."""

    def __init__(self, reader: LogReader, on_found: Callable[[Seek, int | None], object]) -> None:
        self._reader = reader
        self._alike = AlikeLines(reader)
        self._found = on_found
        self._event = threading.Event()
        self._closed = False
        self._seek: Seek | None = None
        self._thread: threading.Thread | None = None
        self.filter: LogFilter | None = None
        """The lines that are shown, growing while the thread scans; None: all."""
        self.matches: LogFilter | None = None
        """The lines that the search matches, likewise; None: no search."""
        self.alike_once = False
        """A search sees only the first of the lines that all ranks print alike."""

    def set_filter(self, text: str | None) -> None:
        """Show only lines that match (LogFilter's patterns). Raises ValueError."""
        self.filter = None if text is None else LogFilter.parse(self._reader, text)
        self.wake()

    def count(self, pattern: LogPattern | None) -> None:
        """Count the lines that match."""
        self.matches = None if pattern is None else self._counted(pattern)
        self.wake()

    def seek(self, seek: Seek) -> None:
        """Search for a line; an earlier search is given up."""
        self._seek = seek
        self.wake()

    def wake(self) -> None:
        """Scan what has arrived."""
        if self._seek is None and self.filter is None and self.matches is None:
            return
        self._event.set()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="log scan", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, soon."""
        self._closed = True
        self._event.set()

    def _run(self) -> None:
        while not self._closed:
            self._event.clear()
            replaced = self._reader.refresh()
            other_ranks = self._alike.refresh(replaced=replaced)
            if replaced:
                self._restart()
            elif other_ranks and self.matches is not None:
                self.matches = self._counted(self.matches.pattern)
            busy = True
            while busy and not self._closed:
                busy = self._answer() or self._advance(self.filter) or self._advance(self.matches)
            self._event.wait()
        self._reader.close()

    def _answer(self) -> bool:
        seek = self._seek
        if seek is None:
            return False
        number = self._find(seek)
        if self._seek is seek:
            self._seek = None
            self._found(seek, number)
        return True

    def _find(self, seek: Seek) -> int | None:
        """The line's number, only of lines that are shown."""
        shown, line, wrapped = self.filter, seek.from_line, not seek.wrap
        last = self._reader.line_count - 1
        while not self._overtaken(seek):
            match = None
            if 0 <= line <= last:
                match = self._reader.find(seek.pattern, line, seek.forward, stop=lambda: self._overtaken(seek))
            if match is not None:
                accepted = shown is None or shown.accepts(self._reader.line(match).text)
                if accepted and not (self.alike_once and self._alike.repeats(match)):
                    return match
                line = match + (1 if seek.forward else -1)
            elif wrapped:
                return None
            else:
                line, wrapped = 0 if seek.forward else last, True
        return None

    def _overtaken(self, seek: Seek) -> bool:
        return self._closed or self._seek is not seek

    def _advance(self, log_filter: LogFilter | None) -> bool:
        """Scan a slice; True when there is more."""
        return log_filter is not None and log_filter.advance(SLICE_LINES)

    def _counted(self, pattern: LogPattern) -> LogFilter:
        return LogFilter(self._reader, pattern, left_out=self._alike.repeats if self.alike_once else None)

    def _restart(self) -> None:
        if self.filter is not None:
            self.filter = LogFilter(self._reader, self.filter.pattern, inverted=self.filter.inverted)
        if self.matches is not None:
            self.matches = self._counted(self.matches.pattern)
