"""JSON lines on this node: an example a line, blank lines left out; and an index of a file too large for memory."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from array import array
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .job import JobError
from .wire import write_atomic

_VERSION = 1
_OFFSET = np.dtype("<i8")
_FLUSH = 65_536
"""Offsets held before they are written."""
_BLOCK_BYTES = 2**20


def parse_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The example in `line`, the `number`-th of `path` from 1. Raises JobError."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise JobError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise JobError(f"{path}, line {number}: not a JSON object")
    return row


def has_examples(path: Path, count: int) -> bool:
    """Whether `path` has at least `count` lines that are not blank. Raises OSError."""
    with path.open("rb") as file:
        return any(number == count for number, _ in enumerate(filter(bytes.strip, file), 1))


@dataclass(frozen=True)
class _Stamp:
    """What a file looks like from outside: as long as it is the same, its content is taken to be."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, file: BinaryIO) -> _Stamp:
        stat = os.fstat(file.fileno())
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


class LineIndex:
    """Where each example of a file begins. The offsets are on disk, 8 bytes each, so that memory holds none of them.

    A file that changes afterwards is noticed by its size, time and inode, and then by its CRC-32.
    """

    def __init__(self, path: Path, stamp: _Stamp, offsets: Path, checksum: int) -> None:
        self._path = path
        self._stamp = stamp
        self._offsets = offsets
        self.checksum = checksum
        """CRC-32 of the whole file."""
        self._examples = offsets.stat().st_size // _OFFSET.itemsize - 1

    @classmethod
    def of(cls, path: Path, directory: Path) -> LineIndex:
        """The index of `path` that lies in `directory`, made anew unless the one there is of the same file.

        Making it reads and checks every line. Raises JobError for a bad line, a file that changes meanwhile, or an
        index that cannot be written.
        """
        document = directory / f"{blake2b(os.fsencode(path), digest_size=8).hexdigest()}.json"
        kept = _kept(path, document)
        return kept if kept is not None else _made(path, document)

    def __len__(self) -> int:
        return self._examples

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """The examples at `indices`. Raises JobError for those that cannot be read, or a file that has changed."""
        try:
            with self._path.open("rb", buffering=0) as file, self._offsets.open("rb", buffering=0) as offsets:
                self._verify(file)
                return [self._row(file, offsets, index) for index in indices]
        except OSError as error:
            raise JobError(f"{self._path} can no longer be read: {error}") from error

    def lengths(self, start: int, end: int) -> NDArray[np.int64]:
        """Bytes of the lines of the examples from `start` to before `end`. Raises JobError."""
        try:
            with self._offsets.open("rb", buffering=0) as offsets:
                return np.diff(_read_offsets(offsets, start, end - start + 1))
        except OSError as error:
            raise JobError(f"{self._offsets} can no longer be read: {error}") from error

    def _row(self, file: BinaryIO, offsets: BinaryIO, index: int) -> dict[str, Any]:
        start, end = _read_offsets(offsets, index, 2).tolist()
        line = os.pread(file.fileno(), end - start, start)
        try:
            return parse_row(self._path, 0, line)
        except JobError:
            # Counted only now: the number of a line is not worth 8 bytes of each.
            return parse_row(self._path, self._line_number(file, start), line)

    def _line_number(self, file: BinaryIO, offset: int) -> int:
        number, place = 1, 0
        while place < offset and (block := os.pread(file.fileno(), min(_BLOCK_BYTES, offset - place), place)):
            number += block.count(b"\n")
            place += len(block)
        return number

    def _verify(self, file: BinaryIO) -> None:
        stamp = _Stamp.of(file)
        if stamp == self._stamp:
            return
        # A copy that was put in its place, or a new time on the same bytes, is no change.
        if stamp.size != self._stamp.size or _checksum(file) != self.checksum:
            raise JobError(
                f"{self._path} has changed since its examples were counted: "
                "leave the data alone while a training reads it, and launch again"
            )
        self._stamp = stamp


def _kept(path: Path, document: Path) -> LineIndex | None:
    """The index that an earlier attempt or another rank of this node has left; None unless it is whole and fits."""
    try:
        found = json.loads(document.read_text())
        if found["version"] != _VERSION or found["path"] != str(path):
            return None
        stamp, offsets = _Stamp(**found["stamp"]), document.with_name(str(found["offsets"]))
        with path.open("rb") as file, offsets.open("rb") as stored:
            if _Stamp.of(file) != stamp or _checksum(stored) != found["offsets_checksum"]:
                return None
        return LineIndex(path, stamp, offsets, int(found["checksum"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made(path: Path, document: Path) -> LineIndex:
    temporary = document.with_suffix(f".{os.getpid()}")
    try:
        document.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.open("rb") as file, temporary.open("wb") as stored:
            stamp = _Stamp.of(file)
            checksum, offsets_checksum = _write_offsets(path, file, stored)
            if _Stamp.of(file) != stamp:
                raise JobError(f"{path} has changed while it was read: launch again when it is finished")
        # Named by what it indexes: another rank's index of another content never takes its place.
        offsets = document.with_name(f"{document.stem}-{checksum:08x}-{stamp.size}.offsets")
        os.replace(temporary, offsets)
        found = {
            "version": _VERSION,
            "path": str(path),
            "stamp": asdict(stamp),
            "checksum": checksum,
            "offsets": offsets.name,
            "offsets_checksum": offsets_checksum,
        }
        write_atomic(document, json.dumps(found))
        return LineIndex(path, stamp, offsets, checksum)
    except OSError as error:
        raise JobError(f"{path} could not be indexed in {document.parent}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_offsets(path: Path, file: BinaryIO, stored: BinaryIO) -> tuple[int, int]:
    """Write where each example begins, and the end of all; CRC-32 of the file and of what was written."""
    held, place, checksum, written = array("q"), 0, 0, 0

    def flush() -> None:
        nonlocal written
        raw = np.asarray(held, _OFFSET).tobytes()
        written = zlib.crc32(raw, written)
        stored.write(raw)
        del held[:]

    for number, line in enumerate(file, 1):
        checksum = zlib.crc32(line, checksum)
        if line.strip():
            parse_row(path, number, line)
            held.append(place)
            if len(held) == _FLUSH:
                flush()
        place += len(line)
    held.append(place)
    flush()
    return checksum, written


def _read_offsets(offsets: BinaryIO, first: int, count: int) -> NDArray[np.int64]:
    wanted = count * _OFFSET.itemsize
    raw = os.pread(offsets.fileno(), wanted, first * _OFFSET.itemsize)
    if len(raw) < wanted:
        raise OSError(f"{len(raw)} bytes in place of {wanted}")
    return np.frombuffer(raw, _OFFSET).astype(np.int64)


def _checksum(file: BinaryIO) -> int:
    """CRC-32 of the whole of `file`."""
    checksum, place = 0, 0
    while block := os.pread(file.fileno(), _BLOCK_BYTES, place):
        checksum = zlib.crc32(block, checksum)
        place += len(block)
    return checksum
