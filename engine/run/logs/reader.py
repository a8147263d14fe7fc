"""Reads a run's logs, of one source or merged, through their line indices: any line of a log of any length at once;
and the lines that match a filter.

Nothing of a log is held in memory. Files that are not there yet are empty; what a program is still writing is shown
as far as it has come. Imports no numpy: the console reads with this."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

from engine.run.logs.line_index import GrowingFile, IndexEntry, LogIndex
from engine.run.logs.pattern import SHOWN_BYTES, LogPattern
from engine.security.redact import KEY_MARK, KeyLines, Redactor
from engine.security.sanitise import SgrSpan, sanitise, sgr_spans
from engine.store.layout import RunDir

_BLOCK_BYTES: Final = 4 << 20
_SEARCH_BYTES: Final = 1 << 20
_FIRST_WINDOW, _LAST_WINDOW = 1 << 6, 1 << 17
"""Lines. Backwards, all matches of a window are looked at for its last one: the first windows are small."""
_KEY_BYTES: Final = 1 << 15
"""A private key is shorter, with what a logger prints before its lines."""
_MORE_BYTES: Final = 1 << 12
_LONGEST_LINE: Final = 64 << 20
"""Searched as one line; a longer one in pieces."""


@dataclass(frozen=True)
class LogLine:
    number: int
    source: int
    """The rank, or LAUNCHER_SOURCE."""
    at: float
    """When its first byte reached the head, seconds since the epoch."""
    text: str
    """Sanitised, without secrets."""
    offset: int
    """Where it begins in its source's log, bytes."""
    partial: bool = False
    """Its newline is not there yet."""
    colours: tuple[SgrSpan, ...] = ()
    """The program's own, in `text`."""


class StoredLine(NamedTuple):
    number: int
    entry: IndexEntry
    raw: bytes
    """As much of it as is shown, SHOWN_BYTES and some more."""
    size: int
    """Bytes of the whole line."""
    partial: bool


class LogReader:
    """A run's log: of one source, or (None) of all, in order of arrival. Line numbers count from 0 and stay, until
    `refresh` reports that they begin anew. Not thread safe; a thread that searches has one of its own."""

    def __init__(self, run_dir: RunDir, source: int | None = None) -> None:
        self.run_dir = run_dir
        self.source = source
        self._index = LogIndex(run_dir.merged_index if source is None else run_dir.index(source))
        self._sources: dict[int, LogIndex] = {}
        self._logs: dict[int, GrowingFile] = {}

    @property
    def line_count(self) -> int:
        return self._index.count

    def close(self) -> None:
        for index in (self._index, *self._sources.values()):
            index.close()
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def refresh(self) -> bool:
        """Read what has arrived. True when line numbers begin anew (an index was repaired after a crash)."""
        replaced = self._index.refresh()
        for index in self._sources.values():
            index.refresh()
        for log in self._logs.values():
            log.refresh()
        return replaced

    def line(self, number: int) -> LogLine:
        """Raises IndexError when there is no such line."""
        lines = self.lines(number, number + 1)
        if not lines or number < 0:
            raise IndexError(f"line {number} of {self.line_count}")
        return lines[0]

    def lines(self, start: int, stop: int) -> list[LogLine]:
        """Lines `start` to `stop`, as far as there are any."""
        lines, keys = [], dict[int, KeyLines]()
        for number, entry, raw, size, partial in self.stored(start, stop):
            if (source := entry.source) not in keys:
                keys[source] = KeyLines(inside=_within_key(self._log(source), entry.offset))
            at, text = self._index.at(entry.centiseconds), self._shown(raw, size, keys[source])
            lines.append(LogLine(number, source, at, text, entry.offset, partial, tuple(sgr_spans(raw, text))))
        return sorted(lines, key=lambda line: line.number)

    def stored(self, start: int, stop: int) -> Iterator[StoredLine]:
        """Lines `start` to `stop`, as far as there are any: all of one source, then those of the next."""
        entries = list(enumerate(self._index.entries(start, stop), max(0, start)))
        for source in {entry.source for _, entry in entries}:
            numbered = [(number, entry) for number, entry in entries if entry.source == source]
            raws = self._raw_lines(source, numbered[0][1], len(numbered))
            for (number, entry), raw in zip(numbered, raws, strict=False):
                yield StoredLine(number, entry, *raw)

    def number_of(self, source: int, offset: int) -> int | None:
        """The line that byte `offset` of a source's log belongs to, None while it is not in the index."""
        index = self._index_of(source)
        entries = index.entries((line := index.line_at(offset)), line + 1)
        if not entries or self.source is not None:
            return line if entries else None
        return self._index.position(entries[0])

    def growing(self) -> list[int]:
        """The lines whose newline is not there yet, at most one of each source."""
        numbers = []
        for source in self._sources_within():
            index, log = self._index_of(source), self._log(source)
            if (size := log.size()) and log.read(size - 1, 1) != b"\n" and index.count:
                numbers.append(self.number_of(source, size - 1))
        return [number for number in numbers if number is not None]

    def first_since(self, at: float) -> int:
        """The first line that arrived at or after a time, seconds since the epoch."""
        return self._index.first_since(max(0, int((at - self._index.began_at) * 100)))

    def sources_before(self, number: int, lines: int, centiseconds: int) -> set[int] | None:
        """The sources of the `lines` lines before one, and of what arrived in the `centiseconds` before it; None where
        the log begins later than that."""
        entries = self._index.entries(number - lines, number + 1)
        if number < lines or not entries:
            return None
        until = entries[-1].centiseconds
        since = min(entries[0].centiseconds, until - centiseconds)
        indices = {source: self._index_of(source) for source in self._sources_within()}
        printed = {at for at, index in indices.items() if index.first_since(since) < index.first_since(until + 1)}
        return None if since < 0 else printed

    def find(
        self, pattern: LogPattern, from_line: int, forward: bool = True, *, stop: Callable[[], bool] = lambda: False
    ) -> int | None:
        """The first line from `from_line` on, itself included, that matches, None when none does or `stop` returned
        True (called several times a second)."""
        count = self.line_count
        from_line = max(0, min(from_line, count - 1))
        low, high = (from_line, count) if forward else (0, min(from_line + 1, count))
        for begin, end in _windows(low, high, forward):
            if stop():
                return None
            match = self._find_within(pattern, begin, end, forward, stop)
            if match is not None:
                return match
        return None

    def matching(self, pattern: LogPattern, start: int, stop: int) -> list[int]:
        """The lines of `start` to `stop` that match, in order."""
        numbers: list[int] = []
        entries: list[IndexEntry] | None = None
        for source in self._sources_within():
            first, end = self._range_of(source, start, stop)
            positions = list(self._positions(source, first, end, pattern))
            if positions:
                entries = entries or self._index.entries(start, stop)
                of_source = [number for number, entry in enumerate(entries, start) if entry.source == source]
                offsets = self._index_of(source).offsets(first, end)
                numbers += [of_source[bisect_right(offsets, position) - 1] for position in positions]
        return sorted(numbers)

    def _find_within(
        self, pattern: LogPattern, start: int, stop: int, forward: bool, stopped: Callable[[], bool]
    ) -> int | None:
        best: int | None = None
        for source in self._sources_within():
            first, end = self._range_of(source, start, stop)
            positions = self._positions(source, first, end, pattern)
            position = next(positions, None) if forward else max(positions, default=None)
            number = None if position is None else self.number_of(source, position)
            if number is not None and (best is None or (number < best) == forward):
                best = number
            if stopped():
                return None
        return best

    def _positions(self, source: int, first: int, end: int, pattern: LogPattern) -> Iterator[int]:
        """A byte position in each matching line of a source's lines `first` to `end`."""
        low, high = self._bytes_of(source, first, end)
        while low < high:
            data = self._whole_lines(source, low, high)
            if not data:
                return
            for position in pattern.positions(data, self._redactor):
                yield low + position
            low += len(data)

    def _whole_lines(self, source: int, low: int, high: int) -> bytes:
        log, size = self._log(source), _SEARCH_BYTES
        while True:
            data = log.read(low, min(size, high - low))
            if len(data) == high - low or size >= _LONGEST_LINE or len(data) < min(size, high - low):
                return data
            if newline := data.rfind(b"\n") + 1:
                return data[:newline]
            size *= 4

    def _sources_within(self) -> Iterable[int]:
        return self.run_dir.sources() if self.source is None else (self.source,)

    def _range_of(self, source: int, start: int, stop: int) -> tuple[int, int]:
        """The range of a source's own lines among the lines `start` to `stop`."""
        if self.source is not None:
            return start, stop
        return self._lines_before(source, start), self._lines_before(source, stop)

    def _lines_before(self, source: int, number: int) -> int:
        """The number of a source's lines among the merged lines before `number`."""
        entry = self._index.entries(number - 1, number)
        if number <= 0 or not entry:
            return 0
        at = entry[0].centiseconds
        earlier = self._index_of(source).first_since(at)
        return earlier + self._index.count_of(source, self._index.first_since(at), number)

    def _bytes_of(self, source: int, first: int, end: int) -> tuple[int, int]:
        """From where to where a source's lines `first` to `end` lie in its log."""
        index = self._index_of(source)
        begin, after = index.entries(first, first + 1), index.entries(end, end + 1)
        if not begin or end <= first:
            return 0, 0
        return begin[0].offset, after[0].offset if after else self._log(source).size()

    def _raw_lines(self, source: int, first: IndexEntry, count: int) -> list[tuple[bytes, int, bool]]:
        """`count` lines of a source from an entry on: what is read of each, its whole size, whether it is partial."""
        index, log = self._index_of(source), self._log(source)
        size = log.size()
        line = index.line_at(first.offset)
        starts = index.offsets(line, line + count + 1)
        if len(starts) <= count:
            # The log may have more lines by now than its index.
            newline = log.read(starts[-1], _BLOCK_BYTES).find(b"\n") if starts else -1
            end = starts[-1] + newline + 1 if newline >= 0 else size
            starts.append(max(end, starts[-1] if starts else 0))
        whole = starts[-1] - starts[0] <= _BLOCK_BYTES
        block = log.read(starts[0], starts[-1] - starts[0]) if whole else b""
        raws = []
        for start, end in pairwise(starts):
            if end - start > SHOWN_BYTES:
                raw, newline = _shown_part(log, start, end), log.read(end - 1, 1) == b"\n"
            else:
                raw = block[start - starts[0] : end - starts[0]] if whole else log.read(start, end - start)
                newline = raw.endswith(b"\n")
            raws.append((raw, end - start, not newline and end == starts[-1] and end >= size))
        return raws

    @cached_property
    def _redactor(self) -> Redactor:
        # Late: a console paints before it loads pydantic.
        from engine.run.run_plan import redactor_of  # noqa: PLC0415

        return redactor_of(self.run_dir)

    def _shown(self, raw: bytes, size: int, keys: KeyLines) -> str:
        text = self._redactor(keys(sanitise(raw)))
        text = text if len(text) <= SHOWN_BYTES else text[:SHOWN_BYTES]
        return text if size <= SHOWN_BYTES else f"{text}… {size:,} bytes in all"

    def _index_of(self, source: int) -> LogIndex:
        if source == self.source:
            return self._index
        if source not in self._sources:
            self._sources[source] = LogIndex(self.run_dir.index(source))
        return self._sources[source]

    def _log(self, source: int) -> GrowingFile:
        if source not in self._logs:
            self._logs[source] = GrowingFile(self.run_dir.log(source))
        return self._logs[source]


def _within_key(log: GrowingFile, offset: int) -> bool:
    """A private key that was printed before may go on here."""
    begin = max(0, offset - _KEY_BYTES)
    before, keys = log.read(begin, offset - begin), KeyLines()
    if KEY_MARK.encode() in before:
        for line in before.decode(errors="replace").split("\n")[:-1]:
            keys(line)
    return keys.inside


def _shown_part(log: GrowingFile, start: int, end: int) -> bytes:
    """The part of a long line that is shown: its beginning, or of a progress bar its current state."""
    tail = log.read(end - SHOWN_BYTES, SHOWN_BYTES)
    # Some more of it, so that no secret is cut before it is recognised.
    return tail if b"\r" in tail.rstrip(b"\r\n") else log.read(start, min(end - start, SHOWN_BYTES + _MORE_BYTES))


def _windows(low: int, high: int, forward: bool) -> Iterator[tuple[int, int]]:
    """`low` to `high` in growing windows, from the end that a search begins at."""
    width = _FIRST_WINDOW
    while low < high:
        if forward:
            yield low, min(low + width, high)
            low += width
        else:
            yield max(low, high - width), high
            high -= width
        width = min(2 * width, _LAST_WINDOW)


SLICE_LINES: Final = 1 << 15
LATE_LINES: Final = 1 << 10


class LogFilter:
    """`numbers` are the matching lines' numbers in the reader's log, ascending; 8 bytes each is all that is held, 16
    with `left_out`."""

    def __init__(
        self,
        reader: LogReader,
        pattern: LogPattern,
        *,
        inverted: bool = False,
        left_out: Callable[[int], bool] | None = None,
    ) -> None:
        self.pattern = pattern
        self.inverted = inverted
        """They are the lines that do not match."""
        self.left_out = left_out
        """Lines that are not among them although they match; that of one may depend on the LATE_LINES after it."""
        self._matching: array[int] = array("Q")
        """Also those that are left out."""
        self.numbers = self._matching if left_out is None else array("Q")
        self.scanned = 0
        self._reader = reader
        self._growing: list[int] = []

    @classmethod
    def parse(cls, reader: LogReader, text: str) -> LogFilter:
        """`text` as LogPattern.parse takes it; a leading "!" inverts. Raises ValueError."""
        return cls(reader, LogPattern.parse(text.removeprefix("!")), inverted=text.startswith("!"))

    @property
    def text(self) -> str:
        """As it was typed."""
        return f"!{self.pattern.text}" if self.inverted else self.pattern.text

    def accepts(self, text: str) -> bool:
        """A line with this shown text is among them."""
        return (self.pattern.expression.search(text) is not None) != self.inverted

    def advance(self, lines: int = SLICE_LINES) -> bool:
        """Look at the next `lines` lines; False when there are no more for now. The last line of a source, whose
        newline may be missing, is scanned again each time. Call `refresh` of the reader before."""
        before, growing = self.scanned, self._growing
        for number in growing:
            self._judge_again(number)
        stop = min(before + lines, self._reader.line_count)
        if stop > before:
            matching = self._reader.matching(self.pattern, before, stop)
            if self.inverted:
                matching = sorted(set(range(before, stop)).difference(matching))
            self._matching.extend(matching)
            self.scanned = stop
        if stop == self._reader.line_count:
            self._growing = self._reader.growing()
        changed = [*set(growing).difference(self._growing), *([before] if stop > before else [])]
        if self.left_out is not None and changed:
            unsure = max(0, min(changed) - LATE_LINES)
            late = self._matching[bisect_left(self._matching, unsure) :]
            kept = array("Q", [number for number in late if not self.left_out(number)])
            self.numbers[bisect_left(self.numbers, unsure) :] = kept
        return self.scanned < self._reader.line_count

    def _judge_again(self, number: int) -> None:
        if number >= self.scanned:
            return
        accepted = self.accepts(self._reader.line(number).text)
        place = bisect_left(self._matching, number)
        kept = place < len(self._matching) and self._matching[place] == number
        if accepted and not kept:
            self._matching.insert(place, number)
        elif kept and not accepted:
            del self._matching[place]
