"""Checkpoint integrity and version agreement, determined from the files alone.

A checkpoint is a safetensors file (adapters, weights), a manifest (a JSON document), or a directory with a
manifest.json. A manifest is {"version", "files": {name: SHA-256}}, or what the trainer writes beside its state (its
version is then the update): its files are beside it and must have those hashes. The version is `version` in the
manifest, or in the safetensors header's `__metadata__`. A file without one (mlx-lm writes none) has version None,
which agrees only with None."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from engine.protocol.attempt import open_regular, read_regular
from engine.protocol.safetensors import CheckpointError, check_header
from engine.security.identifiers import safe_repr
from engine.security.paths import validate_path
from engine.security.sanitise import json_or_none

MANIFEST: Final = "manifest.json"
_LARGEST_MANIFEST: Final = 16_000_000


@dataclass(frozen=True)
class CheckpointReport:
    version_consistency: bool
    """All that could be read have the same version, the expected one where one is given."""
    integrity_checks: Mapping[str, bool]
    """Path → it exists and is intact."""
    missing_files: tuple[str, ...]
    corrupted_files: tuple[str, ...]
    problems: Mapping[str, str]
    """Path → what is wrong with it, for the missing and the corrupted."""
    is_valid: bool


def validate_checkpoint_consistency(
    paths: Sequence[str | Path], expected_version: int | str | None = None, *, roots: Iterable[Path] | None = None
) -> bool:
    """All exist, are intact, and have one version, `expected_version` where that is given. Raises ValueError for an
    empty list and for a path that `validate_path` refuses (`roots` as there)."""
    return validate_checkpoint_layer(paths, expected_version, roots=roots).is_valid


def validate_checkpoint_layer(
    paths: Sequence[str | Path], expected_version: int | str | None = None, *, roots: Iterable[Path] | None = None
) -> CheckpointReport:
    """`validate_checkpoint_consistency` with details."""
    if isinstance(paths, str | bytes | Path) or not isinstance(paths, Sequence) or not paths:
        raise ValueError("checkpoints: must be a list with at least one path")
    if expected_version is not None and (
        isinstance(expected_version, bool) or not isinstance(expected_version, int | str)
    ):
        raise ValueError(f"expected_version = {safe_repr(expected_version)}: must be a number or a string")
    allowed = None if roots is None else tuple(roots)
    resolved = {str(path): validate_path(path, "checkpoint", roots=allowed) for path in paths}
    versions: set[str | None] = set()
    missing, problems = [], {}
    for name, file in resolved.items():
        try:
            versions.add(checkpoint_version(file))
        except FileNotFoundError:
            missing.append(name)
            problems[name] = "it does not exist"
        except CheckpointError as error:
            problems[name] = str(error)
        except OSError as error:
            problems[name] = f"it cannot be read: {error.strerror or error}"
    agreed = len(versions) == 1 and (expected_version is None or versions == {str(expected_version)})
    return CheckpointReport(
        version_consistency=agreed,
        integrity_checks=MappingProxyType({name: name not in problems for name in resolved}),
        missing_files=tuple(missing),
        corrupted_files=tuple(name for name in problems if name not in missing),
        problems=MappingProxyType(problems),
        is_valid=agreed and not problems,
    )


def checkpoint_version(path: Path) -> str | None:
    """The version of an intact checkpoint, None when it has none. Raises CheckpointError, OSError."""
    if path.is_dir():
        return _manifest_version(path / MANIFEST)
    if path.suffix == ".json":
        return _manifest_version(path)
    return _version(check_header(path).metadata.get("version"))


def _manifest_version(path: Path) -> str | None:
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise CheckpointError(f"{path.name} is too large for a manifest")
    manifest = json_or_none(read_regular(path))
    if not isinstance(manifest, dict):
        raise CheckpointError(f"{path.name} is not a JSON object")
    if "format" in manifest and isinstance(manifest.get("files"), list):
        # Written by the trainer beside its state: its version is the update.
        manifest = _convert_trainer_manifest(manifest, path.name)
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path.name}: files must be a table of names and SHA-256 sums, with at least one")
    for name, expected in files.items():
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise CheckpointError(f"{path.name} names {safe_repr(name)}, which is not a file beside it")
        try:
            with open_regular(path.parent / name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise CheckpointError(f"{safe_repr(name)} is missing") from None
        if not isinstance(expected, str) or digest != expected.lower():
            raise CheckpointError(f"{safe_repr(name)} does not have the SHA-256 that {path.name} gives")
    return _version(manifest.get("version"))


def _convert_trainer_manifest(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    """A manifest of engine.trainer.checkpoint in the form read here."""
    try:
        files = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        return {"version": manifest["update"], "files": files}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{name}: its list of files is malformed") from error


def _version(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise CheckpointError(f"its version {safe_repr(value)} is neither a number nor a string")
    return str(value)
