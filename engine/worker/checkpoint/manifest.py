"""The manifest: what a checkpoint consists of, and the only proof that it is whole. It is written last.

A checkpoint is a folder `step-<update>` with `manifest.json` and the files that it names. A manifest from anywhere is
read as if somebody had made it up: names that lead out of the folder, sizes that are none and types that were never
written are refused before anything is opened.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from .errors import Refused

FORMAT = 1
NAME = "manifest.json"
MANIFEST_BYTES = 1 << 22
"""More is none of ours."""
MOST_FILES = 1000
COMPRESSIONS = ("none", "gzip", "zstd")
_FILE = re.compile(r"[a-z][a-z0-9_-]{0,60}\.(safetensors|json)(\.gz|\.zst)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"step-(\d{9})")


@dataclass(frozen=True)
class Entry:
    """One file, as it lies on the disk."""

    name: str
    sha256: str
    stored_bytes: int
    bytes: int
    """Before compression."""
    compression: str = "none"


@dataclass(frozen=True)
class Manifest:
    """One checkpoint."""

    update: int
    """Optimizer updates that its state has seen."""
    config_hash: str
    """Of the job (worker.job.config_hash)."""
    world_size: int
    state: dict[str, Any]
    """Counters, positions, random states: whatever is no array."""
    versions: dict[str, str]
    """Package → version that wrote it."""
    files: tuple[Entry, ...] = ()
    format: int = field(default=FORMAT)

    @property
    def stored_bytes(self) -> int:
        return sum(entry.stored_bytes for entry in self.files)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, allow_nan=False).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Raises Refused for what is no manifest of ours."""
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused(f"its manifest is no JSON: {error}") from error
        if not isinstance(said, dict):
            raise Refused("its manifest is no object")
        if said.get("format") != FORMAT:
            raise Refused(f"its format is {_shown(said.get('format'))}, and this release reads {FORMAT}")
        files = said.get("files")
        if not isinstance(files, list) or not 0 < len(files) <= MOST_FILES:
            raise Refused("its manifest names no files, or too many")
        entries = tuple(_entry(file) for file in files)
        if len({entry.name for entry in entries}) < len(entries):
            raise Refused("its manifest names a file twice")
        state, versions = said.get("state"), said.get("versions")
        if not isinstance(state, dict) or not isinstance(versions, dict):
            raise Refused("its manifest has no state or no versions")
        return cls(
            update=_count(said, "update"),
            config_hash=_text(said, "config_hash"),
            world_size=_count(said, "world_size", least=1),
            state=state,
            versions={str(name): str(version) for name, version in versions.items()},
            files=entries,
        )


def folder_name(update: int) -> str:
    return f"step-{update:09d}"


def update_of(folder: str) -> int | None:
    """The update that a folder's name tells; None for a name that is none of ours."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found else None


def _entry(said: object) -> Entry:
    if not isinstance(said, dict):
        raise Refused("its manifest names a file that is none")
    name, sha256, compression = said.get("name"), said.get("sha256"), said.get("compression")
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise Refused(f"its manifest names {_shown(name)}, which is no file of a checkpoint")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise Refused(f"its manifest has no hash of {name}")
    if compression not in COMPRESSIONS:
        raise Refused(f"its manifest has {name} compressed by {_shown(compression)}")
    return Entry(name, sha256, _count(said, "stored_bytes"), _count(said, "bytes"), str(compression))


def _count(said: dict[str, Any], key: str, least: int = 0) -> int:
    value = said.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise Refused(f"its manifest says {key} = {_shown(value)}")
    return value


def _text(said: dict[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str) or len(value) > 1000:
        raise Refused(f"its manifest says {key} = {_shown(value)}")
    return value


def _shown(value: object) -> str:
    return ascii(value)[:80]
