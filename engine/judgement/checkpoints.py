"""Whether checkpoints are whole and of one version, from their own bytes alone.

A checkpoint is a safetensors file (adapters, weights), a manifest (a JSON document), or a directory with a
manifest.json. A manifest is {"version", "files": {name: SHA-256}}, or what the trainer writes beside its state (its
version is then the update): its files lie beside it and must have those hashes.
Its version is what it says of itself: `version` in the manifest, or in the safetensors header's `__metadata__`. A file
that says none (mlx-lm writes none) has the version None, and agrees with others that say none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine.security.identifiers import shown
from engine.security.paths import validate_path
from engine.worker.checkpoint.errors import Refused
from engine.worker.checkpoint.safetensors import check_header

MANIFEST: Final = "manifest.json"
_LARGEST_MANIFEST: Final = 16_000_000


class CorruptCheckpoint(ValueError):
    """A checkpoint that is not whole: one line that says what is wrong."""


@dataclass(frozen=True)
class CheckpointReport:
    """The verdict on some checkpoints."""

    version_consistency: bool
    """All that could be read say the same version (the expected one, where one is expected)."""
    integrity_checks: Mapping[str, bool]
    """By path: whether it is there and whole."""
    missing_files: tuple[str, ...]
    corrupted_files: tuple[str, ...]
    problems: Mapping[str, str]
    """By path: what is wrong with one that is missing or corrupted."""
    is_valid: bool


def validate_checkpoint_consistency(
    paths: Sequence[str | Path], expected_version: int | str | None = None, *, roots: Iterable[Path] | None = None
) -> bool:
    """Whether all checkpoints are there, whole, and of one version, which is `expected_version` where that is given.

    Raises ValueError for an empty list and for a path that `validate_path` refuses (`roots` as there).
    """
    return validate_checkpoint_layer(paths, expected_version, roots=roots).is_valid


def validate_checkpoint_layer(
    paths: Sequence[str | Path], expected_version: int | str | None = None, *, roots: Iterable[Path] | None = None
) -> CheckpointReport:
    """The same, with what is wrong where. Raises ValueError as `validate_checkpoint_consistency` does."""
    if isinstance(paths, str | bytes | Path) or not isinstance(paths, Sequence) or not paths:
        raise ValueError("checkpoints: must be a list with at least one path")
    if expected_version is not None and (
        isinstance(expected_version, bool) or not isinstance(expected_version, int | str)
    ):
        raise ValueError(f"expected_version = {shown(expected_version)}: must be a number or a text")
    allowed = None if roots is None else tuple(roots)
    places = {str(path): validate_path(path, "checkpoint", roots=allowed) for path in paths}
    versions: set[str | None] = set()
    missing, corrupted, problems = [], [], {}
    for name, place in places.items():
        try:
            versions.add(checkpoint_version(place))
        except FileNotFoundError:
            missing.append(name)
            problems[name] = "it is not there"
        except CorruptCheckpoint as fault:
            corrupted.append(name)
            problems[name] = str(fault)
        except OSError as fault:
            corrupted.append(name)
            problems[name] = f"it cannot be read: {fault.strerror or fault}"
    agreed = len(versions) == 1 and (expected_version is None or versions == {str(expected_version)})
    return CheckpointReport(
        version_consistency=agreed,
        integrity_checks=MappingProxyType({name: name not in problems for name in places}),
        missing_files=tuple(missing),
        corrupted_files=tuple(corrupted),
        problems=MappingProxyType(problems),
        is_valid=agreed and not problems,
    )


def checkpoint_version(path: Path) -> str | None:
    """The version that a whole checkpoint says it has, None when it says none. Raises CorruptCheckpoint, OSError."""
    if path.is_dir():
        return _of_manifest(path / MANIFEST)
    return _of_manifest(path) if path.suffix == ".json" else _of_safetensors(path)


def _of_manifest(path: Path) -> str | None:
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise CorruptCheckpoint(f"{path.name} is too large for a manifest")
    manifest = _object(path.read_bytes(), path.name)
    if "format" in manifest and isinstance(manifest.get("files"), list):
        # What the trainer writes of its state: its version is the update.
        manifest = _states_manifest(manifest, path.name)
    files = manifest.get("files", {})
    if not isinstance(files, dict):
        raise CorruptCheckpoint(f"{path.name}: files must be a table of names and SHA-256 sums")
    for name, expected in files.items():
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise CorruptCheckpoint(f"{path.name} names {shown(name)}, which is no file beside it")
        try:
            with (path.parent / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{shown(name)} is missing") from None
        if not isinstance(expected, str) or found != expected.lower():
            raise CorruptCheckpoint(f"{shown(name)} has another SHA-256 than {path.name} says")
    return _version(manifest.get("version"))


def _states_manifest(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """A manifest of worker.checkpoint in the form that is read here."""
    try:
        files = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        return {"version": manifest["update"], "files": files}
    except (KeyError, TypeError) as fault:
        raise CorruptCheckpoint(f"{name}: its files are not described as such") from fault


def _of_safetensors(path: Path) -> str | None:
    """The header is checked as the format asks (worker.checkpoint.safetensors)."""
    try:
        metadata = check_header(path).metadata
    except Refused as refused:
        raise CorruptCheckpoint(str(refused)) from refused
    return _version(metadata.get("version"))


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{what} is no JSON object")
    return found


def _version(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise CorruptCheckpoint(f"its version {shown(value)} is neither a number nor a text")
    return str(value)
