"""The head and the tail of a log as lines of text: what is read of a log of any size to say why its program ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.security.sanitise import sanitise

HEAD_BYTES: Final = 64 * 1024
"""Of a log, from its attempt's beginning: what failed at the start may have been followed by any amount of noise."""
TAIL_BYTES: Final = 512 * 1024
"""Of a log, from its end."""
LINE_BYTES: Final = 4096
"""Of one line, half from its beginning and half from its end: an error may follow on a line of dots."""


@dataclass(frozen=True)
class LogEnds:
    """Lines of one log, with what lies between its head and its tail left out."""

    lines: list[str]
    """Sanitised. A line that the tail begins in the middle of is there from that place on."""
    offsets: list[int]
    """Where each begins in the log's file, bytes."""

    @classmethod
    def of(cls, path: Path, base: int) -> LogEnds:
        """Of the log from offset `base` on. A log that cannot be read is empty."""
        try:
            with path.open("rb") as log:
                size = os.fstat(log.fileno()).st_size
                split = max(base, min(base + HEAD_BYTES, size - TAIL_BYTES))
                log.seek(base)
                head = _lines(log.read(split - base), base)
                start = max(split, size - TAIL_BYTES)
                log.seek(start)
                tail = _lines(log.read(TAIL_BYTES), start)
        except OSError:
            return cls([], [])
        kept = [*head, *tail]
        return cls([_text(line) for _, line in kept], [offset for offset, _ in kept])

    @property
    def last_spoken(self) -> int | None:
        """Where the last line that says anything begins."""
        pairs = zip(reversed(self.offsets), reversed(self.lines), strict=True)
        return next((offset for offset, line in pairs if line.strip()), None)


def _lines(block: bytes, start: int) -> list[tuple[int, bytes]]:
    if not block:
        return []
    lines = []
    for line in block.removesuffix(b"\n").split(b"\n"):
        lines.append((start, line))
        start += len(line) + 1
    return lines


def _text(line: bytes) -> str:
    if len(line) > LINE_BYTES:
        line = line[: LINE_BYTES // 2] + b" \xe2\x80\xa6 " + line[-LINE_BYTES // 2 :]
    return sanitise(line)
