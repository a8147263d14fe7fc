"""Keeps the line indices while lines arrive. An index that is there already is repaired first, with
engine.run.logs.index_repair, which is imported only then since it needs numpy: 0.2 s of a supervisor's start.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Final

from engine.run.logs.line_index import HEADER, MAGIC, OFFSET_BITS, RECORD, read_header

_NEWLINE: Final = re.compile(b"\n")
_SCAN_BYTES: Final = 1 << 20


class IndexFile:
    """One index file, appended to. A full disk is no error: what could not be written waits for the next `flush`."""

    def __init__(self, path: Path, began_at: float) -> None:
        """Opens or makes the file; a torn last record is dropped. Raises OSError."""
        self.path = path
        self.waiting = bytearray()
        """Records that are not written yet."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        kept = read_header(os.pread(self._descriptor, HEADER.size, 0))
        if kept is None:
            os.ftruncate(self._descriptor, 0)
            self.waiting += HEADER.pack(MAGIC, began_at)
        size = os.fstat(self._descriptor).st_size
        self.began_at = began_at if kept is None else kept
        if kept is not None and (torn := (size - HEADER.size) % RECORD.size):
            os.ftruncate(self._descriptor, size - torn)

    def count(self) -> int:
        """Records in the file."""
        return max(0, (os.fstat(self._descriptor).st_size - HEADER.size) // RECORD.size)

    def keep(self, count: int) -> None:
        """Drop all records after the first `count`. Raises OSError."""
        os.ftruncate(self._descriptor, HEADER.size + count * RECORD.size)

    def append(self, records: bytes) -> None:
        self.waiting += records

    def flush(self) -> None:
        """Write what waits. Raises OSError; what was not written goes on waiting."""
        while self.waiting:
            written = os.write(self._descriptor, self.waiting)
            del self.waiting[:written]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)


class SourceIndex:
    """The lines of one log, found as its bytes arrive."""

    def __init__(self, source: int, log: Path, path: Path, began_at: float) -> None:
        """Repairs the index at `path` after whatever happened to it: what is left is true, and `scan_log` adds the
        lines that it lacks. Raises OSError."""
        self.file = IndexFile(path, began_at)
        self._source = source
        self._log = log
        self.scanned = 0
        """Bytes of the log that have been scanned for lines."""
        self.last_at = 0
        """Arrival of the last line, centiseconds."""
        self._line_begins = True
        self._mend(log.stat().st_size if log.exists() else 0)

    def begin_line(self) -> None:
        """The next byte begins a line, also when the one before it was no newline (a new attempt)."""
        self._line_begins = True

    def feed(self, data: bytes, at: int) -> bytes:
        """Enter the lines that begin in `data`, the log's next bytes, arrived at `at` centiseconds. Their records."""
        if not data:
            return b""
        base = (self._source << OFFSET_BITS) + self.scanned
        places = [base] if self._line_begins else []
        places += [base + newline.end() for newline in _NEWLINE.finditer(data)]
        self._line_begins = data.endswith(b"\n")
        if self._line_begins:
            places.pop()
        self.scanned += len(data)
        if places:
            self.last_at = at
        added = b"".join(map(RECORD.pack, places, repeat(at)))
        self.file.append(added)
        return added

    def scan_log(self, at: int, limit: int | None = None) -> bytes:
        """Enter what the log itself holds beyond `scanned`, at most `limit` bytes of it. Their records."""
        added = bytearray()
        try:
            with self._log.open("rb", buffering=0) as log:
                log.seek(self.scanned)
                while limit is None or limit > 0:
                    data = log.read(_SCAN_BYTES if limit is None else min(limit, _SCAN_BYTES))
                    if not data:
                        break
                    added += self.feed(data, at)
                    limit = None if limit is None else limit - len(data)
        except FileNotFoundError:
            pass
        return bytes(added)

    def _mend(self, log_size: int) -> None:
        """Keep the records that can be true: of this source, in order, inside the log."""
        written = self.file.count()
        if not written:
            return
        from engine.run.logs.index_repair import sound_records

        count, last = sound_records(self.file.path, self._source, log_size)
        if last is not None:
            # The last line's own bytes are scanned again: its newline may be there, its successors not yet in.
            self.scanned = last.offset + 1
            self.last_at = last.centiseconds
            self._line_begins = self._byte_before(self.scanned) == b"\n"
        if count < written:
            self.file.keep(count)

    def _byte_before(self, offset: int) -> bytes:
        with self._log.open("rb", buffering=0) as log:
            log.seek(offset - 1)
            return log.read(1)


def reconcile(merged: IndexFile, sources: Sequence[IndexFile]) -> IndexFile:
    """Make the merged index hold exactly the sources' records: append what it lacks, or, when it contradicts them,
    put one rebuilt by time of arrival in its place. The file to go on with. Raises OSError."""
    if any(file.count() for file in (merged, *sources)):
        from engine.run.logs.index_repair import all_records, missing_records

        paths = [source.path for source in sources]
        missing = missing_records(merged.path, paths)
        if missing is None:
            return _rebuilt(merged, all_records(paths))
        merged.append(missing)
    merged.flush()
    return merged


def _rebuilt(merged: IndexFile, records: bytes) -> IndexFile:
    fresh = merged.path.with_name(f".{merged.path.name}.new")
    fresh.write_bytes(HEADER.pack(MAGIC, merged.began_at) + records)
    merged.close()
    fresh.replace(merged.path)
    return IndexFile(merged.path, merged.began_at)
