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


class AlikeLines:
    """Such lines of a log, looked for within one block of BLOCK_LINES at a time: so they cost the same in a log of any
    length, and do not depend on what is shown. In a log of one source there are none."""

    def __init__(self, reader: LogReader) -> None:
        self._reader = reader
        self._firsts: OrderedDict[tuple[int, int], dict[int, int]] = OrderedDict()
        """By block (start, stop), the newest last."""
        self._unfinished: set[tuple[int, int]] = set()
        """Blocks in which the newline of a line is not there yet."""
        self._ranks: list[int] = []
        self.refresh()

    def refresh(self, *, replaced: bool = False) -> None:
        """Call it after the reader's `refresh`, with its answer."""
        sources = self._reader.run_dir.sources() if self._reader.source is None else []
        ranks, self._ranks = self._ranks, [source for source in sources if source != LAUNCHER_SOURCE]
        for block in [*self._firsts] if replaced or ranks != self._ranks else self._unfinished:
            self._firsts.pop(block, None)
        self._unfinished.clear()

    def first(self, number: int, stop: int | None = None) -> int | None:
        """The number of the first of the lines, one a rank, of which this is one; None where all ranks do not print it.
        Only lines before `stop` count."""
        start = number - number % BLOCK_LINES
        block = start, min(start + BLOCK_LINES, self._reader.line_count if stop is None else stop)
        if block not in self._firsts:
            self._firsts[block] = self._firsts_of(*block) if len(self._ranks) > 1 else {}
            if len(self._firsts) > _KEPT_BLOCKS:
                self._firsts.popitem(last=False)
        return self._firsts[block].get(number)

    def repeats(self, number: int, stop: int | None = None) -> bool:
        """It is not the first of them."""
        return self.first(number, stop) not in (None, number)

    def _firsts_of(self, start: int, stop: int) -> dict[int, int]:
        lines = sorted(self._reader.stored(start, stop))
        if any(line.partial for line in lines):
            self._unfinished.add((start, stop))
        texts = [None if line.partial or line.size > len(line.raw) else line.raw for line in lines]
        printed = [(line.entry.source, line.entry.centiseconds, text) for line, text in zip(lines, texts, strict=True)]
        firsts = alike(printed, self._ranks)
        return {lines[place].number: lines[first].number for place, first in firsts.items()}


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
