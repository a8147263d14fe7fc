"""Files that are compressed and hashed while they are written, and checked and unpacked while they are read.

The hash is of the bytes on the disk: a file is verified without unpacking it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import os
import stat
import sys
import zlib
from collections.abc import Iterator
from io import FileIO, UnsupportedOperation
from pathlib import Path
from typing import Any, Protocol

from .errors import Refused
from .manifest import Entry

CHUNK_BYTES = 8 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 1
_GZIP_WINDOW = 31
"""zlib's wbits for a gzip header and trailer."""
_SUFFIX = {"none": "", "gzip": ".gz", "zstd": ".zst"}
_F_FULLFSYNC = 51
"""macOS: fsync alone leaves the bytes in the drive's own cache."""


class _Packer(Protocol):
    def compress(self, data: Any, /) -> bytes: ...

    def flush(self) -> bytes: ...


class _Plain:
    def compress(self, data: Any, /) -> Any:
        return data

    def flush(self) -> bytes:
        return b""


class HashedFile:
    """A new file that `mx.save_safetensors` can write to: only ever at its end."""

    mode = "wb"

    def __init__(self, folder: Path, name: str, compression: str) -> None:
        """Raises OSError, and ValueError for a compression that is not there."""
        self.name = name + _SUFFIX[compression]
        self._compression = compression
        self._packer = _packer(compression)
        self._hash = hashlib.sha256()
        self._bytes = self._stored = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(folder / self.name, flags, 0o600)
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            self._store(self._packer.compress(view[start : start + CHUNK_BYTES]))
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        """Nowhere: it is there because MLX takes nothing for a file that lacks it."""
        raise UnsupportedOperation("written from its beginning to its end")

    def commit(self) -> Entry:
        """Everything is on the disk when this returns. Raises OSError."""
        self._store(self._packer.flush())
        to_disk(self._descriptor)
        self.close()
        return Entry(self.name, self._hash.hexdigest(), self._stored, self._bytes, self._compression)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def _store(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._stored += len(view)
        while len(view):
            view = view[os.write(self._descriptor, view) :]


def check(compression: str) -> None:
    """Raises ValueError for one that is not there."""
    if compression not in _SUFFIX:
        raise ValueError(f"{compression!r}: must be one of {', '.join(_SUFFIX)}")
    _packer(compression)


def to_disk(descriptor: int) -> None:
    """Raises OSError."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, _F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def folder_to_disk(folder: Path) -> None:
    """The names in a folder. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # F_FULLFSYNC is for files.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def verify(folder: Path, entry: Entry) -> None:
    """Read the whole file. Raises Refused when it is not the one that was written, OSError."""
    digest = hashlib.sha256()
    for data in _stored(folder, entry):
        digest.update(data)
    if digest.hexdigest() != entry.sha256:
        raise Refused(f"{entry.name} is damaged: its hash is not the manifest's")


def verify_size(folder: Path, entry: Entry) -> None:
    """Raises Refused when it is not a plain file of the manifest's size, OSError."""
    with _opened(folder, entry):
        pass


def unpacked(folder: Path, entry: Entry) -> Iterator[bytes]:
    """The content of a file, in pieces. Raises Refused when it is more or less than the manifest says, OSError."""
    unpack = _unpacker(entry.compression)
    seen = 0
    for stored in _stored(folder, entry):
        for data in unpack(stored):
            seen += len(data)
            if seen > entry.bytes:
                raise Refused(f"{entry.name} holds more than its manifest says")
            yield data
    if seen != entry.bytes:
        raise Refused(f"{entry.name} holds {seen:,} bytes, and its manifest says {entry.bytes:,}")


@contextlib.contextmanager
def _opened(folder: Path, entry: Entry) -> Iterator[FileIO]:
    try:
        descriptor = os.open(folder / entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Refused(f"{entry.name} is missing") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):
            raise Refused(f"{entry.name} is no plain file")
        if there.st_size != entry.stored_bytes:
            raise Refused(f"{entry.name} has {there.st_size:,} bytes, and its manifest says {entry.stored_bytes:,}")
        yield file


def _stored(folder: Path, entry: Entry) -> Iterator[bytes]:
    with _opened(folder, entry) as file:
        left = entry.stored_bytes
        while left and (data := file.read(min(CHUNK_BYTES, left))):
            left -= len(data)
            yield data
        if left:
            raise Refused(f"{entry.name} became shorter while it was read")


def _packer(compression: str) -> _Packer:
    if compression == "gzip":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    if compression == "zstd":
        packer: _Packer = _zstd().ZstdCompressor(level=ZSTD_LEVEL)
        return packer
    return _Plain()


def _unpacker(compression: str) -> Any:
    """A function from stored bytes to pieces of at most CHUNK_BYTES, so that a bomb is noticed while it unpacks."""
    if compression == "none":
        return lambda data: (data,)
    if compression == "zstd":
        return _zstd_pieces(_zstd().ZstdDecompressor())
    return _gzip_pieces(zlib.decompressobj(_GZIP_WINDOW))


def _gzip_pieces(unpacker: Any) -> Any:
    def pieces(data: bytes) -> Iterator[bytes]:
        try:
            while data:
                yield unpacker.decompress(data, CHUNK_BYTES)
                data = unpacker.unconsumed_tail
        except zlib.error as error:
            raise Refused(f"it cannot be unpacked: {error}") from error

    return pieces


def _zstd_pieces(unpacker: Any) -> Any:
    def pieces(data: bytes) -> Iterator[bytes]:
        try:
            yield unpacker.decompress(data, max_length=CHUNK_BYTES)
            while not unpacker.needs_input and not unpacker.eof:
                yield unpacker.decompress(b"", max_length=CHUNK_BYTES)
        except Exception as error:  # the module's own error type, whichever of the two modules it is
            raise Refused(f"it cannot be unpacked: {error}") from error

    return pieces


def _zstd() -> Any:
    """The standard library's from Python 3.14 on, or its backport where a node has that. Raises ValueError."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ValueError('zstd needs Python 3.14, or the package backports.zstd: install it, or use compression = "gzip"')
