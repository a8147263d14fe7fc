"""Keeps the line indices while lines arrive, and completes them after a crash: what is missing is read from the logs.

Only the supervisor imports this (and with it numpy); frontends read with engine.run.logs.line_index."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.protocol.attempt import open_regular, regular_descriptor
from engine.run.json_lines import DescriptorOwner
from engine.run.logs.line_index import HEADER, MAGIC, OFFSET_BITS, OFFSET_MASK, RECORD, read_header

RECORD_TYPE: Final = np.dtype([("place", "<u8"), ("at", "<u4")])
_NEWLINE: Final = ord("\n")
_SCAN_BYTES: Final = 1 << 20

Records = npt.NDArray[Any]
"""A vector of RECORD_TYPE."""


class IndexFile(DescriptorOwner):
    """One index file, appended to. A full disk is no error: what could not be written waits for the next `flush`."""

    def __init__(self, path: Path, began_at: float) -> None:
        """Opens or makes the file; a torn last record is dropped. Raises OSError."""
        self.path = path
        self.waiting = bytearray()
        """Records that are not written yet."""
        self._descriptor = regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        kept = read_header(os.pread(self._descriptor, HEADER.size, 0))
        if kept is None:
            os.ftruncate(self._descriptor, 0)
            self.waiting += HEADER.pack(MAGIC, began_at)
        size = os.fstat(self._descriptor).st_size
        self.began_at = began_at if kept is None else kept
        if kept is not None and (torn := (size - HEADER.size) % RECORD.size):
            os.ftruncate(self._descriptor, size - torn)

    def records(self) -> Records:
        count = max(0, (os.fstat(self._descriptor).st_size - HEADER.size) // RECORD.size)
        if not count:
            return np.empty(0, RECORD_TYPE)
        return np.memmap(self.path, RECORD_TYPE, "r", HEADER.size, (count,))

    def flush(self) -> None:
        """Write what waits. Raises OSError; what was not written goes on waiting."""
        while self.waiting:
            written = os.write(self._descriptor, self.waiting)
            del self.waiting[:written]


class SourceIndex(IndexFile):
    """The lines of one log, found as its bytes arrive."""

    def __init__(self, source: int, log: Path, path: Path, began_at: float) -> None:
        """Repairs the index at `path` after whatever happened to it: what is left is true, and `scan_log` adds the
        lines that it lacks. Raises OSError."""
        super().__init__(path, began_at)
        self._source = source
        self._log = log
        self.scanned = 0
        """Bytes of the log that have been scanned for lines."""
        self.last_at = 0
        """Arrival of the last line, centiseconds."""
        self.line_begins = True
        """The next byte begins a line, also when the one before it was no newline (a new attempt)."""
        self._repair(log.stat().st_size if log.exists() else 0)

    def feed(self, data: bytes, at: int) -> bytes:
        """Enter the lines that begin in `data`, the log's next bytes, arrived at `at` centiseconds. Their records."""
        starts = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE) + 1
        ends_line = starts.size > 0 and starts[-1] == len(data)
        if ends_line:
            starts = starts[:-1]
        if self.line_begins and data:
            starts = np.concatenate(([0], starts))
        records = np.empty(starts.size, RECORD_TYPE)
        records["place"] = starts.astype(np.uint64) + np.uint64(self._source << OFFSET_BITS | self.scanned)
        records["at"] = at
        self.scanned += len(data)
        self.line_begins = bool(ends_line) or (self.line_begins and not data)
        if starts.size:
            self.last_at = at
        added = records.tobytes()
        self.waiting += added
        return added

    def scan_log(self, at: int, limit: float = math.inf) -> bytes:
        """Enter what the log itself holds beyond `scanned`, at most `limit` bytes of it. Their records."""
        added = bytearray()
        with contextlib.suppress(FileNotFoundError), open_regular(self._log) as log:
            log.seek(self.scanned)
            while limit > 0 and (data := log.read(int(min(limit, _SCAN_BYTES)))):
                added += self.feed(data, at)
                limit -= len(data)
        return bytes(added)

    def _repair(self, log_size: int) -> None:
        """Keep the records that can be true: of this source, in order, inside the log."""
        records = self.records()
        if records.size:
            offsets = records["place"] & np.uint64(OFFSET_MASK)
            sound = (records["place"] >> np.uint64(OFFSET_BITS) == self._source) & (offsets < log_size)
            sound[1:] &= (offsets[1:] > offsets[:-1]) & (records["at"][1:] >= records["at"][:-1])
            count = records.size if sound.all() else int(np.argmin(sound))
            if count:
                # The last line's own bytes are scanned again: its newline may be there, its successors not yet in.
                self.scanned = int(offsets[count - 1]) + 1
                self.last_at = int(records["at"][count - 1])
                with open_regular(self._log) as log:
                    log.seek(self.scanned - 1)
                    self.line_begins = log.read(1) == b"\n"
            if count < records.size:
                os.ftruncate(self._descriptor, HEADER.size + count * RECORD.size)


def complete_merged(merged: IndexFile, sources: Iterable[IndexFile]) -> IndexFile:
    """Make the merged index hold exactly the sources' records by time of arrival: append what it lacks, or, when it
    contradicts them, put another one in its place. The file to go on with. Raises OSError."""
    together = np.concatenate([np.empty(0, RECORD_TYPE), *(source.records() for source in sources)])
    # A stable sort, and all records of one time are added in the order of their sources.
    expected = together[np.argsort(together["at"], kind="stable")]
    added = merged.records()
    if not np.array_equal(added, expected[: added.size]):
        fresh = merged.path.with_name(f".{merged.path.name}.new")
        with fresh.open("wb") as file:
            file.write(HEADER.pack(MAGIC, merged.began_at))
            file.write(expected.tobytes())
        merged.close()
        fresh.replace(merged.path)
        return IndexFile(merged.path, merged.began_at)
    merged.waiting += expected[added.size :].tobytes()
    merged.flush()
    return merged
