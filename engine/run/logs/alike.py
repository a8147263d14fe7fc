"""Lines that all ranks of a run print alike: one of them can stand for all."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Sequence
from typing import Final

from engine.run.logs.reader import LATE_LINES, LogReader
from engine.store.layout import LAUNCHER_SOURCE

TOGETHER_CS: Final = 1_000
"""Centiseconds within which the ranks print such a line: what is further apart is not the same event."""
BLOCK_LINES: Final = LATE_LINES
_KEPT_BLOCKS: Final = 16


class _Block:
    """One block, as far as it has been read."""

    def __init__(self, start: int, before: set[int] | None) -> None:
        self.before = before
        """The sources that printed before it; None where that says nothing of the others: so soon after the log began.
        """
        self.lines: dict[int, tuple[int, int, int | None]] = {}
        """By number: source, arrival, and a hash of the text; None for one that has not ended or is not read whole."""
        self.read = start
        """The line to read from."""
        self.unfinished: list[int] = []
        """Lines whose newline is not there yet."""
        self.stop: int | None = None
        """The end of the lines of `firsts`; None: something has changed."""
        self.firsts: dict[int, int] = {}


class AlikeLines:
    """Such lines of a log, looked for within one block of BLOCK_LINES at a time: so they cost the same in a log of any
    length, and do not depend on what is shown. In a log of one source there are none. All ranks are those that print in
    the block or shortly before it (BLOCK_LINES and TOGETHER_CS): one that is lost is none of them from then on."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        """By first line, the newest last."""
        self._ranks: list[int] = []
        """Those that have a log."""
        self.refresh()

    def refresh(self, *, replaced: bool = False) -> bool:
        """Call it after the reader's `refresh`, with its answer. True when there are logs of other ranks than before:
        any earlier answer may have changed."""
        sources = self._reader.run_dir.sources() if self._reader.source is None else []
        before, self._ranks = self._ranks, [source for source in sources if source != LAUNCHER_SOURCE]
        if replaced or before != self._ranks:
            self._blocks.clear()
        for block in self._blocks.values():
            block.stop = None if block.unfinished else block.stop
        return before != self._ranks

    def first(self, number: int, stop: int | None = None) -> int | None:
        """The number of the first of the lines, one a rank, of which this is one; None where all ranks do not print it.
        Only lines before `stop` count."""
        start = number - number % BLOCK_LINES
        stop = min(start + BLOCK_LINES, self._reader.line_count if stop is None else stop)
        if start not in self._blocks:
            before = self._reader.sources_before(start, BLOCK_LINES, TOGETHER_CS)
            self._blocks[start] = _Block(start, before)
            if len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        block = self._blocks[start]
        if block.stop != stop:
            self._read(block, stop)
            self._compare(block, stop)
        return block.firsts.get(number)

    def repeats(self, number: int, stop: int | None = None) -> bool:
        """It is not the first of them."""
        return self.first(number, stop) not in (None, number)

    def _read(self, block: _Block, stop: int) -> None:
        """Read what is not read yet, and again what had not ended."""
        lines = [line for number in block.unfinished for line in self._reader.stored(number, number + 1)]
        lines += sorted(self._reader.stored(block.read, stop))
        for line in lines:
            text = None if line.partial or line.size > len(line.raw) else hash(line.raw)
            block.lines[line.number] = line.entry.source, line.entry.centiseconds, text
        block.unfinished = [line.number for line in lines if line.partial]
        block.read = max(block.read, stop)

    def _compare(self, block: _Block, stop: int) -> None:
        numbers = [number for number in block.lines if number < stop]
        lines = [block.lines[number] for number in numbers]
        ranks = self._ranks
        if block.before is not None:
            printing = block.before.union(source for source, _, _ in lines)
            ranks = [rank for rank in ranks if rank in printing]
        firsts = alike(lines, ranks) if len(ranks) > 1 else {}
        block.firsts = {numbers[place]: numbers[first] for place, first in firsts.items()}
        block.stop = stop


def alike(lines: Sequence[tuple[int, int, Hashable]], ranks: Collection[int]) -> dict[int, int]:
    """The places of lines that every one of `ranks` has printed within TOGETHER_CS, → the place of the first of them.
    `lines`: source, arrival (centiseconds, ascending) and text, None for one that has not ended. Of a text that is
    printed again, a rank's n-th line goes with the others' n-th, so that none stands for two of one rank."""
    texts: dict[int, set[Hashable]] = {rank: set() for rank in ranks}
    for source, _, text in lines:
        if source in texts:
            texts[source].add(text)
    groups: dict[Hashable, list[tuple[int, dict[int, int]]]] = {
        text: [] for text in set.intersection(*texts.values()) if text is not None
    }
    turns, firsts = Counter[tuple[int, Hashable]](), dict[int, int]()
    for place, (source, at, text) in enumerate(lines):
        if text not in groups or source not in texts:
            continue
        of_text, turn = groups[text], turns[source, text]
        while turn < len(of_text) and at - of_text[turn][0] > TOGETHER_CS:
            turn += 1
        if turn == len(of_text):
            of_text.append((at, {}))
        group = of_text[turn][1]
        group[source], turns[source, text] = place, turn + 1
        if len(group) == len(texts):
            firsts |= dict.fromkeys(group.values(), min(group.values()))
    return firsts
