"""The lines of a log that match a pattern, or that do not, found in slices and kept up while lines arrive."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

from engine.runs.log_pattern import LogPattern
from engine.runs.log_reader import LogReader

SLICE_LINES: Final = 1 << 15


class LogFilter:
    """`numbers` are the matching lines' numbers in the reader's log, ascending; 8 bytes each is all that is held."""

    def __init__(self, reader: LogReader, pattern: LogPattern, *, inverted: bool = False) -> None:
        self.pattern = pattern
        self.inverted = inverted
        """They are the lines that do not match."""
        self.numbers: array[int] = array("Q")
        self.scanned = 0
        """Lines looked at."""
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
        """Whether a line with this shown text is among them."""
        return (self.pattern.expression.search(text) is not None) != self.inverted

    def advance(self, lines: int = SLICE_LINES) -> bool:
        """Look at the next `lines` lines; False when there are no more for now. The last line of a source, whose
        newline may be missing, is looked at again each time. Call `refresh` of the reader before."""
        for number in self._growing:
            self._judge_again(number)
        stop = min(self.scanned + lines, self._reader.line_count)
        if stop > self.scanned:
            matching = self._reader.matching(self.pattern, self.scanned, stop)
            if self.inverted:
                left_out = set(matching)
                self.numbers.extend(number for number in range(self.scanned, stop) if number not in left_out)
            else:
                self.numbers.extend(matching)
            self.scanned = stop
        if stop == self._reader.line_count:
            self._growing = self._reader.growing()
        return self.scanned < self._reader.line_count

    def _judge_again(self, number: int) -> None:
        if number >= self.scanned:
            return
        accepted = self.accepts(self._reader.line(number).text)
        place = bisect_left(self.numbers, number)
        kept = place < len(self.numbers) and self.numbers[place] == number
        if accepted and not kept:
            self.numbers.insert(place, number)
        elif kept and not accepted:
            del self.numbers[place]
