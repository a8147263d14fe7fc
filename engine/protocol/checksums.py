"""Checksums of what a training begins with, and the versions of what it trains with: by these a later state, and a run
that repeats it, see whether they are the same."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import zlib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

from engine.protocol.attempt import open_regular

BASE_MODEL = "the base model"
_PIECE, _PIECES = 2**12, 2**9
"""Bytes of one read, and about how many reads per file."""
_BLOCK = 1 << 20


def model_checksum(model: Path, others: Iterable[Path] = ()) -> str:
    """16 hexadecimal digits of samples of the model's files, and of the `others`. Raises OSError."""
    digest = hashlib.blake2b(digest_size=8)
    for path in (model / "config.json", *sorted(model.glob("model*.safetensors")), *others):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open_regular(path) as file:
            for start in range(0, size, max(_PIECE, size // _PIECES)):
                file.seek(start)
                digest.update(file.read(_PIECE))
    return digest.hexdigest()


def crc32(file: BinaryIO) -> int:
    """That of the rest of a file. Raises OSError."""
    checksum = 0
    while block := file.read(_BLOCK):
        checksum = zlib.crc32(block, checksum)
    return checksum


def crc32_text(checksum: int) -> str:
    return f"crc32 {checksum:08x}"


def package_versions(*names: str) -> dict[str, str]:
    """The versions of Python and of those packages that this node has."""
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
