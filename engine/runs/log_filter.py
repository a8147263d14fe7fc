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

    def __init__(self, reader: LogReader, text: str) -> None:
        """`text` as LogPattern.parse takes it; a leading "!" keeps the lines that do not match. Raises ValueError."""
        self.text = text
        self.inverted = text.startswith("!")
        self.pattern = LogPattern.parse(text.removeprefix("!"))
        self.numbers: array[int] = array("Q")
        self.scanned = 0
        """Lines looked at."""
        self._reader = reader
        self._growing: list[int] = []

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
        found = self.pattern.expression.search(self._reader.line(number).text) is not None
        place = bisect_left(self.numbers, number)
        kept = place < len(self.numbers) and self.numbers[place] == number
        if (found != self.inverted) and not kept:
            self.numbers.insert(place, number)
        elif (found == self.inverted) and kept:
            del self.numbers[place]
