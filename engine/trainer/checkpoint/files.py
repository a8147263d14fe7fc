"""The files of a checkpoint: the manifest, and files that are compressed and hashed while they are written, verified
and unpacked while they are read.

A checkpoint is a folder `step-<update>` with `manifest.json`, written last, and the files that it names; only the
manifest proves that it is complete. A manifest is untrusted input: names that lead out of the folder, impossible
sizes and unknown types are rejected before anything is opened. Hashes are of the bytes on disk: a file is verified
without unpacking it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import importlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import FileIO, UnsupportedOperation
from pathlib import Path
from typing import Any

from engine.protocol.safetensors import CheckpointError

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 22
MAX_FILES = 1000
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,60}\.(safetensors|json)(\.gz|\.zst)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"step-(\d{9})")
_MAX_TEXT = 1000


@dataclass(frozen=True)
class FileEntry:
    name: str
    sha256: str
    stored_bytes: int
    """On disk."""
    bytes: int
    """Before compression."""
    compression: str = "none"


@dataclass(frozen=True)
class Manifest:
    update: int
    """Optimizer updates that its state has seen."""
    config_hash: str
    """engine.protocol.job.config_hash"""
    world_size: int
    state: dict[str, Any]
    """Counters and positions: everything that is not an array."""
    versions: dict[str, str]
    """Package → version that wrote the checkpoint."""
    files: tuple[FileEntry, ...] = ()
    format: int = MANIFEST_FORMAT

    @property
    def stored_bytes(self) -> int:
        return sum(entry.stored_bytes for entry in self.files)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises CheckpointError."""
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"its manifest is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise CheckpointError("its manifest is not an object")
        if document.get("format") != MANIFEST_FORMAT:
            raise CheckpointError(
                f"its format is {_quoted(document.get('format'))}, and this release reads {MANIFEST_FORMAT}"
            )
        files = document.get("files")
        if not isinstance(files, list) or not 0 < len(files) <= MAX_FILES:
            raise CheckpointError("its manifest lists no files, or too many")
        entries = tuple(_entry(file) for file in files)
        if len({entry.name for entry in entries}) < len(entries):
            raise CheckpointError("its manifest lists a file twice")
        state, versions, job_hash = (document.get(key) for key in ("state", "versions", "config_hash"))
        if not isinstance(state, dict) or not isinstance(versions, dict):
            raise CheckpointError("its manifest has no state or no versions")
        if not isinstance(job_hash, str) or len(job_hash) > _MAX_TEXT:
            raise CheckpointError(f"its manifest has config_hash = {_quoted(job_hash)}")
        return cls(
            update=_count(document, "update"),
            config_hash=job_hash,
            world_size=_count(document, "world_size", least=1),
            state=state,
            versions={str(name): str(version) for name, version in versions.items()},
            files=entries,
        )


def folder_name(update: int) -> str:
    return f"step-{update:09d}"


def update_of(folder: str) -> int | None:
    """The update in a folder's name; None for a name that is not ours."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def _entry(document: object) -> FileEntry:
    if not isinstance(document, dict):
        raise CheckpointError("its manifest has a file entry that is not an object")
    name, sha256, compression = (document.get(key) for key in ("name", "sha256", "compression"))
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise CheckpointError(f"its manifest lists {_quoted(name)}, which is not a file of a checkpoint")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise CheckpointError(f"its manifest has no hash of {name}")
    if compression not in _SUFFIX:
        raise CheckpointError(f"its manifest has {name} compressed by {_quoted(compression)}")
    return FileEntry(name, sha256, _count(document, "stored_bytes"), _count(document, "bytes"), str(compression))


def _count(document: dict[str, Any], key: str, least: int = 0) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise CheckpointError(f"its manifest has {key} = {_quoted(value)}")
    return value


def _quoted(value: object) -> str:
    return ascii(value)[:80]


CHUNK_BYTES = 8 << 20
GZIP_LEVEL = 6
ZSTD_LEVEL = 1
_GZIP_WINDOW = 31
"""zlib's wbits for a gzip header and trailer."""
_SUFFIX = {"none": "", "gzip": ".gz", "zstd": ".zst"}


class HashedFile:
    """A new file that `mx.save_safetensors` can write to, append-only."""

    mode = "wb"

    def __init__(self, folder: Path, name: str, compression: str) -> None:
        """Raises OSError, and ValueError for a compression that this node lacks."""
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
            piece = view[start : start + CHUNK_BYTES]
            self._store(piece if self._packer is None else self._packer.compress(piece))
        self._bytes += len(view)
        return len(view)

    def tell(self) -> int:
        return self._bytes

    def seek(self, offset: int, whence: int = 0) -> int:
        """Not possible; MLX accepts no file without the method."""
        raise UnsupportedOperation("written from its beginning to its end")

    def commit(self) -> FileEntry:
        """Flush to disk and close. Raises OSError."""
        if self._packer is not None:
            self._store(self._packer.flush())
        sync_file(self._descriptor)
        self.close()
        return FileEntry(self.name, self._hash.hexdigest(), self._stored, self._bytes, self._compression)

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


def check_codec(compression: str) -> None:
    """Raises ValueError for a compression that this node lacks."""
    if compression not in _SUFFIX:
        raise ValueError(f"{compression!r}: must be one of {', '.join(_SUFFIX)}")
    _packer(compression)


def sync_file(descriptor: int) -> None:
    """Raises OSError."""
    if sys.platform == "darwin":
        # fsync alone leaves the bytes in the drive's own cache.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # F_FULLFSYNC is for files.
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; one that is already there is moved out of the way first, by one rename too."""
    replaced = move_aside(target) if target.exists() or target.is_symlink() else None
    folder.rename(target)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def move_aside(path: Path) -> Path:
    """One rename, so that a kill in the middle of a deletion leaves nothing that looks like a checkpoint; returns the
    folder that is to be deleted."""
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    path.rename(aside / "removed")
    return aside


def verify_file(folder: Path, entry: FileEntry) -> None:
    """Read the whole file. Raises CheckpointError when its hash is not the manifest's, OSError."""
    digest, left = hashlib.sha256(), entry.stored_bytes
    with _opened(folder, entry) as file:
        while left and (data := file.read(min(CHUNK_BYTES, left))):
            left -= len(data)
            digest.update(data)
    if left:
        raise CheckpointError(f"{entry.name} became shorter while it was read")
    if digest.hexdigest() != entry.sha256:
        raise CheckpointError(f"{entry.name} is damaged: its hash is not the manifest's")


def check_size(folder: Path, entry: FileEntry) -> None:
    """Raises CheckpointError when it is not a regular file of the manifest's size, OSError."""
    with _opened(folder, entry):
        pass


def unpacked(folder: Path, entry: FileEntry) -> Iterator[bytes]:
    """A compressed file's content, in pieces of at most CHUNK_BYTES, so that a zip bomb is noticed while it unpacks.
    Raises CheckpointError when it is more or less than the manifest says, OSError."""
    size = 0
    with _opened(folder, entry) as stored, _unpacker(entry.compression, stored) as file:
        while data := _read_packed(file):
            size += len(data)
            if size > entry.bytes:
                raise CheckpointError(f"{entry.name} holds more than its manifest says")
            yield data
    if size != entry.bytes:
        raise CheckpointError(f"{entry.name} holds {size:,} bytes, and its manifest says {entry.bytes:,}")


def _unpacker(compression: str, stored: FileIO) -> Any:
    return gzip.GzipFile(fileobj=stored) if compression == "gzip" else _zstd().ZstdFile(stored)


def _read_packed(file: Any) -> bytes:
    try:
        data: bytes = file.read(CHUNK_BYTES)
        return data
    except OSError as error:
        if error.errno is not None:
            raise
        raise CheckpointError(f"it cannot be unpacked: {error}") from error
    except Exception as error:  # the error types of the modules have no common base
        raise CheckpointError(f"it cannot be unpacked: {error}") from error


@contextlib.contextmanager
def _opened(folder: Path, entry: FileEntry) -> Iterator[FileIO]:
    try:
        descriptor = os.open(folder / entry.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{entry.name} is missing") from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{entry.name} is not a regular file")
        if status.st_size != entry.stored_bytes:
            raise CheckpointError(
                f"{entry.name} has {status.st_size:,} bytes, and its manifest says {entry.stored_bytes:,}"
            )
        yield file


def _packer(compression: str) -> Any:
    """An object with zlib's `compress` and `flush`; None for "none"."""
    if compression == "gzip":
        return zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_WINDOW)
    return _zstd().ZstdCompressor(level=ZSTD_LEVEL) if compression == "zstd" else None


def _zstd() -> Any:
    """The standard library's (Python 3.14) or its backport. Raises ValueError."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ValueError('zstd needs Python 3.14, or the package backports.zstd: install it, or use compression = "gzip"')
