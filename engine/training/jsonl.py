"""JSON lines on a node, an example each, blank ones skipped; and an index on disk for files too large for memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.protocol.attempt import open_regular, read_regular, replacing, write_atomic
from engine.protocol.checksums import crc32
from engine.protocol.job import JobError
from engine.protocol.jsonl import is_blank, lines, parse

_VERSION = 1
_OFFSET = np.dtype("<i8")
_COUNTED = 500
"""Examples whose texts are in memory at once while all are counted."""


def parse_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The example in `line`, the `number`-th of `path` from 1. Raises JobError."""
    try:
        return parse(line)
    except ValueError as error:
        raise JobError(f"{path}, line {number} {error}") from error


def has_examples(path: Path, count: int) -> bool:
    """`path` has at least `count` lines that are not blank. Raises OSError."""
    with open_regular(path) as file:
        return any(number == count for number, _ in enumerate(itertools.filterfalse(is_blank, lines(file)), 1))


def line_number(path: Path, example: int) -> int:
    """The line of an example, both counted: lines from 1, examples from 0. Raises OSError."""
    with open_regular(path) as file:
        numbers = (number for number, line in enumerate(lines(file), 1) if not is_blank(line))
        return next(itertools.islice(numbers, example, None))


def _stamp(file: BinaryIO) -> list[int]:
    """Size, time and inode of a file: while they are unchanged, so is the content."""
    stat = os.fstat(file.fileno())
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


class JsonlRows:
    """The examples of a file, in memory."""

    def __init__(self, path: Path) -> None:
        """A missing file has none. Raises JobError for a bad line; OSError."""
        raw = read_regular(path) if path.exists() else b""
        self.checksum = zlib.crc32(raw)
        numbered = enumerate(raw.splitlines(), 1)
        self._rows = [parse_row(path, number, line) for number, line in numbered if not is_blank(line)]

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self._rows[index] for index in indices]


class JsonlIndex:
    """The offset of each example in a file, 8 bytes each on disk, not in memory. A file that changes afterwards is
    detected by its size, time and inode, and then by its CRC-32."""

    def __init__(self, path: Path, stamp: list[int], offsets: Path, checksum: int) -> None:
        self._path = path
        self._stamp = stamp
        self._offsets = offsets
        self.checksum = checksum
        """CRC-32 of the whole file."""
        self._examples = offsets.stat().st_size // _OFFSET.itemsize - 1

    @classmethod
    def of(cls, path: Path, directory: Path) -> JsonlIndex:
        """The index of `path` in `directory`, rebuilt from every line unless the one there is of the same file. Raises
        JobError for a bad line, a file that changes meanwhile, or an index that cannot be written."""
        document = directory / f"{blake2b(os.fsencode(path), digest_size=8).hexdigest()}.json"
        return _load_index(path, document) or _build_index(path, document)

    def __len__(self) -> int:
        return self._examples

    def rows(self, indices: list[int]) -> list[dict[str, Any]]:
        """The examples at `indices`. Raises JobError for those that cannot be read, or a file that has changed."""
        try:
            with open_regular(self._path) as file, open_regular(self._offsets) as stored:
                self._verify(file)
                return [self._row(file, index, *_read_offsets(stored, index, 2).tolist()) for index in indices]
        except OSError as error:
            raise JobError(f"{self._path} can no longer be read: {error}") from error

    def counts(self, start: int, end: int, key: int, count: Callable[[range], Iterable[int]]) -> NDArray[np.int64]:
        """A number of each example, from `start` to before `end`, as a file beside the index keeps them: `count` gives
        those of some, in order, the first time. `key`: 32 bits of what they depend on besides the examples."""
        path = self._offsets.with_name(f"{self._offsets.stem}-{start}-{end}-{key:08x}.counts")
        # What is damaged, too, is counted again.
        with contextlib.suppress(OSError, ValueError):
            stored = np.frombuffer(read_regular(path), _OFFSET)
            if len(stored) == end - start:
                return stored.astype(np.int64)
        pieces = (range(first, min(first + _COUNTED, end)) for first in range(start, end, _COUNTED))
        counted = np.asarray([number for piece in pieces for number in count(piece)], _OFFSET)
        # Without it they are counted again.
        with contextlib.suppress(OSError), replacing(path, 0o600) as file:
            file.write(counted.tobytes())
        return counted.astype(np.int64)

    def _row(self, file: BinaryIO, index: int, start: int, end: int) -> dict[str, Any]:
        file.seek(start)
        try:
            return parse(file.read(end - start))
        except ValueError as error:
            raise JobError(f"{self._path}, line {line_number(self._path, index)} {error}") from error

    def _verify(self, file: BinaryIO) -> None:
        stamp = _stamp(file)
        if stamp == self._stamp:
            return
        # An identical copy in its place, or a new time on the same bytes, is not a change.
        if stamp[0] != self._stamp[0] or _checksum(file) != self.checksum:
            raise JobError(
                f"{self._path} has changed since its examples were indexed: "
                "do not change the data during a training, and launch again"
            )
        self._stamp = stamp


def _read_offsets(stored: BinaryIO, first: int, count: int) -> NDArray[np.int64]:
    stored.seek(first * _OFFSET.itemsize)
    raw = stored.read(count * _OFFSET.itemsize)
    if len(raw) < count * _OFFSET.itemsize:
        raise OSError(f"{len(raw) // _OFFSET.itemsize} offsets instead of {count}")
    return np.frombuffer(raw, _OFFSET).astype(np.int64)


def _load_index(path: Path, document: Path) -> JsonlIndex | None:
    """The index of an earlier attempt or another rank on this node; None unless it is complete and of this file."""
    try:
        index = json.loads(read_regular(document))
        offsets = document.with_name(index["offsets"])
        with open_regular(path) as file, open_regular(offsets) as stored:
            stamp = _stamp(file)
            recorded = (index["version"], index["stamp"], index["offsets_checksum"])
            if recorded != (_VERSION, stamp, _checksum(stored)):
                return None
        return JsonlIndex(path, stamp, offsets, int(index["checksum"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build_index(path: Path, document: Path) -> JsonlIndex:
    temporary = document.with_suffix(f".{os.getpid()}")
    try:
        document.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open_regular(path) as file, temporary.open("w+b") as stored:
            stamp = _stamp(file)
            checksum = _write_offsets(path, file, stored)
            if _stamp(file) != stamp:
                raise JobError(f"{path} changed while it was read: launch again when it is finished")
            offsets_checksum = _checksum(stored)
        # Named by the content: another rank's index of other content never replaces it.
        offsets = document.with_name(f"{document.stem}-{checksum:08x}-{stamp[0]}.offsets")
        os.replace(temporary, offsets)
        index = {"version": _VERSION, "stamp": stamp, "checksum": checksum}
        index |= {"offsets": offsets.name, "offsets_checksum": offsets_checksum}
        write_atomic(document, json.dumps(index))
        return JsonlIndex(path, stamp, offsets, checksum)
    except OSError as error:
        raise JobError(f"{path} could not be indexed in {document.parent}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_offsets(path: Path, file: BinaryIO, stored: BinaryIO) -> int:
    """Write the offset of each example, and of the end; returns the CRC-32 of the file."""
    position = checksum = 0
    for number, line in enumerate(lines(file), 1):
        checksum = zlib.crc32(line, checksum)
        if not is_blank(line):
            parse_row(path, number, line)
            stored.write(position.to_bytes(_OFFSET.itemsize, "little"))
        position += len(line)
    stored.write(position.to_bytes(_OFFSET.itemsize, "little"))
    return checksum


def _checksum(file: BinaryIO) -> int:
    file.seek(0)
    return crc32(file)
