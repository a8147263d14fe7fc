"""Looks at where a training would save: `python -m worker.looks.storage QUESTION`.

QUESTION is JSON: `directory`; `roots`, one of which must hold it; `runs`, where earlier runs' folders lie; `resume`, a
file of trained weights to go on with, or null; `needed`, bytes. Prints `directory` resolved; `fault`, with a folder to
`make`, to `permit` or to `own`; `free`, bytes; `damaged`, [file, why] of what lies there; `resume`, what its weights
are, or `resume_fault`; `largest`, [folder, bytes] of earlier runs, when less than `needed` is free.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from ..checkpoint.errors import Refused
from . import safetensors
from .near import near
from .parent import end_with_parent

FILES = 500
"""So many saved files are verified, the newest."""
CONFIGURATION = "adapter_config.json"
_LARGEST = 3


def look(question: dict[str, Any]) -> dict[str, Any]:
    """The document for one question."""
    directory = Path(question["directory"]).expanduser()
    said: dict[str, Any] = {"fault": None, "make": None, "permit": None, "own": None, "free": None, "damaged": []}
    said |= {"resume": None, "resume_fault": None, "largest": []}
    said["directory"] = str(directory)
    roots = [Path(root).expanduser().resolve() for root in question["roots"]]
    try:
        said["directory"] = str(directory.resolve())
        said |= _place(directory, roots)
        if said["fault"] is None:
            said["free"] = shutil.disk_usage(_existing(directory)).free
            said["damaged"] = _damaged(directory)
    except (OSError, RuntimeError) as error:
        said["fault"] = f"{directory} cannot be looked at: {getattr(error, 'strerror', None) or error}"
    if question["resume"] is not None:
        said |= _resume(Path(question["resume"]).expanduser(), roots)
    if said["free"] is not None and said["free"] < question["needed"]:
        said["largest"] = _largest(Path(question["runs"]).expanduser())
    return said


def _place(directory: Path, roots: list[Path]) -> dict[str, Any]:
    """Whether files can be kept there: written, synced, renamed, deleted."""
    resolved = directory.resolve()
    if not any(resolved.is_relative_to(root) for root in roots):
        through = f" (through a symlink to {resolved})" if resolved != directory else ""
        return {"fault": f"{directory} lies outside of the allowed directories{through}"}
    # A link to a disk that is not there, say: what makes folders makes none in its place.
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            return {"fault": f"{path} leads to {path.resolve()}, which is not there", "make": str(path.resolve())}
    place = _existing(directory)
    if not place.is_dir():
        return {"fault": f"{place} is a file"}
    try:
        write(place)
    except OSError as error:
        fault = f"{place} cannot be written: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM):
            key = "permit" if place.stat().st_uid == os.getuid() else "own"
            return {"fault": fault, key: str(place)}
        return {"fault": fault}
    return {}


def write(folder: Path) -> None:
    """What saving does: write, sync, rename; and delete. Raises OSError."""
    temporary, file = (folder / f".flightdeck-{os.getpid()}.{name}" for name in ("part", "whole"))
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, b"Flight Deck was here to see whether a run can save.\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(file)
    finally:
        for path in (temporary, file):
            path.unlink(missing_ok=True)


def _existing(directory: Path) -> Path:
    """The directory, or what there is of the way to it."""
    return next(path for path in (directory, *directory.parents) if path.exists())


def _damaged(directory: Path) -> list[list[str]]:
    if not directory.is_dir():
        return []
    # A name that begins with a dot is one that was being written.
    files = [path for path in directory.glob("*.safetensors") if not path.name.startswith(".")]
    newest = sorted(files, key=lambda path: path.lstat().st_mtime, reverse=True)[:FILES]
    found = [[str(path), why] for path in newest if (why := safetensors.fault(path)) is not None]
    configuration = directory / CONFIGURATION
    try:
        if not isinstance(json.loads(configuration.read_bytes()), dict):
            found.append([str(configuration), "it is no JSON object"])
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError):
        found.append([str(configuration), "it is no JSON"])
    return found


def _resume(path: Path, roots: list[Path]) -> dict[str, Any]:
    try:
        if not path.is_file():
            return {"resume_fault": f"{path} is not there{near(path)}"}
        if not any(path.resolve().is_relative_to(root) for root in roots):
            return {"resume_fault": f"{path} lies outside of the allowed directories"}
        return {"resume": safetensors.adapter(path)}
    except Refused as refused:
        return {"resume_fault": f"{path} is damaged: {refused}"}
    except OSError as error:
        return {"resume_fault": f"{path} cannot be read: {error.strerror}"}


def _largest(runs: Path) -> list[list[Any]]:
    try:
        folders = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    sizes = sorted(((safetensors.size_of(folder), str(folder)) for folder in folders), reverse=True)
    return [[folder, size] for size, folder in sizes[:_LARGEST] if size]


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(look(json.loads(sys.argv[1]))))
