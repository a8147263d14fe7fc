"""Where each line of a log begins and when it arrived: a file beside the log, so that any line is two reads away.

Format, little-endian: a header of 16 bytes (magic, f64 seconds since the epoch at which the index's time begins), then
12 bytes per line: u64 source (upper 16 bits) and byte offset of the line's start in that source's log (lower 48),
u32 centiseconds from the header's time to the line's arrival, never less than the line's before. A line is added
when its first byte arrives. `rank<k>.idx` and `launcher.idx` hold one source in the order of the log; `merged.idx`
holds the same records of all sources in the order of arrival. An index only grows, or is replaced as a whole.

Reads by offset, not by memory map: a file cut short under a map would kill the process that reads it."""

from __future__ import annotations

import os
import struct
from array import array
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final, NamedTuple

from engine.protocol.attempt import regular_descriptor
from engine.run.json_lines import DescriptorOwner

MAGIC: Final = b"FDLX1\0\0\0"
HEADER: Final = struct.Struct("<8sd")
RECORD: Final = struct.Struct("<QI")
OFFSET_BITS: Final = 48
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
LAST_CENTISECOND: Final = 2**32 - 1
_BLOCK_RECORDS: Final = 1 << 17


class IndexEntry(NamedTuple):
    """One record: a line's log, the byte where it begins there, and when it arrived."""

    source: int
    offset: int
    centiseconds: int


class GrowingFile(DescriptorOwner):
    """A file that another process appends to, read by offset; empty while it is not there or cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.refresh()

    def refresh(self) -> bool:
        """Open it when it is there by now, or is another file. True when it is not the same file as before."""
        try:
            status = self._path.stat()
            if self._descriptor >= 0:
                here = os.fstat(self._descriptor)
                if (here.st_ino, here.st_dev) == (status.st_ino, status.st_dev):
                    return False
            self.close()
            self._descriptor = regular_descriptor(self._path, os.O_RDONLY)
        except OSError:
            self.close()
        return True

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size if self._descriptor >= 0 else 0

    def read(self, offset: int, size: int) -> bytes:
        if self._descriptor < 0 or size <= 0:
            return b""
        try:
            return os.pread(self._descriptor, size, offset)
        except OSError:
            return b""


class LogIndex:
    """A reader of one index file. It changes only by `refresh`. A file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self.began_at = 0.0
        """Seconds since the epoch from which the records count."""
        self.count = 0
        """Lines in the index."""
        self.refresh()

    def refresh(self) -> bool:
        """Take notice of lines that have arrived. True when the file is another one: line numbers begin anew."""
        another, before = self._file.refresh(), self.count
        began_at = read_header(self._file.read(0, HEADER.size))
        self.began_at = began_at or 0.0
        self.count = 0 if began_at is None else (self._file.size() - HEADER.size) // RECORD.size
        return before > 0 and (another or self.count < before)

    def close(self) -> None:
        self._file.close()
        self.count = 0

    def entries(self, start: int, stop: int) -> list[IndexEntry]:
        """Records `start` to `stop`, as far as there are any."""
        block = self._read(max(0, start), min(stop, self.count))
        return [IndexEntry(place >> OFFSET_BITS, place & OFFSET_MASK, at) for place, at in RECORD.iter_unpack(block)]

    def offsets(self, start: int, stop: int) -> list[int]:
        """In an index of one source: where the lines `start` to `stop` begin, as far as there are any."""
        block = self._read(max(0, start), min(stop, self.count))
        return [place & OFFSET_MASK for place, _ in RECORD.iter_unpack(block)]

    def at(self, centiseconds: int) -> float:
        """Seconds since the epoch."""
        return self.began_at + centiseconds / 100

    def line_at(self, offset: int) -> int:
        """In an index of one source: the line that byte `offset` of the log belongs to; -1 before the first."""
        return bisect_right(range(self.count), offset, key=self._offset) - 1

    def first_since(self, centiseconds: int) -> int:
        """The first line that arrived at or after a time, `count` when there is none."""
        return bisect_left(range(self.count), centiseconds, key=self._arrival)

    def position(self, entry: IndexEntry) -> int | None:
        """In a merged index: the line number of an entry, None while it is not there."""
        wanted = RECORD.pack(entry.source << OFFSET_BITS | entry.offset, entry.centiseconds)
        stop = self.first_since(entry.centiseconds + 1)
        for begin in range(self.first_since(entry.centiseconds), stop, _BLOCK_RECORDS):
            block = self._read(begin, min(begin + _BLOCK_RECORDS, stop))
            place = block.find(wanted)
            while place >= 0 and place % RECORD.size:
                place = block.find(wanted, place + 1)
            if place >= 0:
                return begin + place // RECORD.size
        return None

    def count_of(self, source: int, start: int, stop: int) -> int:
        """The number of records of `source` from `start` to `stop`."""
        counted = 0
        for begin in range(start, stop, _BLOCK_RECORDS):
            block = self._read(begin, min(begin + _BLOCK_RECORDS, stop))
            pairs = bytearray(2 * (len(block) // RECORD.size))
            pairs[0::2], pairs[1::2] = block[6 :: RECORD.size], block[7 :: RECORD.size]
            counted += array("H", bytes(pairs)).count(source)
        return counted

    def _offset(self, line: int) -> int:
        place = self._file.read(HEADER.size + line * RECORD.size, 8)
        return int.from_bytes(place, "little") & OFFSET_MASK if place else OFFSET_MASK

    def _arrival(self, line: int) -> int:
        at = self._file.read(HEADER.size + line * RECORD.size + 8, 4)
        return int.from_bytes(at, "little") if at else LAST_CENTISECOND

    def _read(self, start: int, stop: int) -> bytes:
        block = self._file.read(HEADER.size + start * RECORD.size, (stop - start) * RECORD.size)
        return block[: len(block) // RECORD.size * RECORD.size]


def read_header(header: bytes) -> float | None:
    """The time that an index begins with; None when these bytes are not an index's header."""
    if len(header) < HEADER.size:
        return None
    magic, began_at = HEADER.unpack_from(header)
    return float(began_at) if magic == MAGIC else None
