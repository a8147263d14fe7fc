"""The `storage` probe: where a training would save."""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import shutil
import zipfile
import zlib
from pathlib import Path
from typing import Any

from engine.node.probes import did_you_mean, is_withheld, nearest, reason_of
from engine.node.processes import with_nonce
from engine.node.source_files import MAGIC
from engine.protocol.attempt import read_regular, sync_file, write_atomic
from engine.protocol.safetensors import CheckpointError, Shape, check_header

_ADAPTER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.(.+)\.lora_(?:a|(A)\.weight)$")
"""The names of mlx-lm, and of peft."""
_OTHERS = {
    **MAGIC,
    b"PK\x03\x04": "a zip archive: call it *.npz if mlx-lm made it; if PyTorch, save it by safetensors.torch.save_file",
    b"GGUF": "GGUF, llama.cpp's format: name the adapters that it was made from",
}
_NPY_HEADER = 65_536
"""Bytes."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")


def safetensors_fault(path: Path) -> str | None:
    """Description of the damage; None when the file is whole."""
    try:
        check_header(path)
    except CheckpointError as refused:
        return str(refused)
    except OSError as error:
        return f"it cannot be read: {reason_of(error, path)}"
    return None


def shapes(path: Path) -> dict[str, Shape]:
    """The tensors of a file of weights, safetensors or NPZ by its name, as MLX reads it. Raises CheckpointError,
    OSError."""
    if path.suffix == ".npz":
        return _npz_shapes(path)
    with path.open("rb") as file:
        head = file.read(64)
    kind = next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), None)
    if kind is not None:
        raise CheckpointError(f"it is {kind}")
    return {name: shape for name, (_, shape) in check_header(path).tensors.items()}


def _npz_shapes(path: Path) -> dict[str, Shape]:
    """The arrays of an archive of numpy's, in which mlx-lm saved adapters; numpy.lib.format has the format of its
    members. Raises CheckpointError, OSError."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                with archive.open(name) as member:
                    magic, version = member.read(6), member.read(2)
                    size = int.from_bytes(member.read(2 if version[:1] == b"\1" else 4), "little")
                    described = ast.literal_eval(member.read(min(size, _NPY_HEADER)).decode("latin-1").strip())
                    if magic != b"\x93NUMPY" or not all(type(axis) is int and axis >= 0 for axis in described["shape"]):
                        raise ValueError("no array of numbers")
                    arrays[name.removesuffix(".npy")] = tuple(described["shape"])
    except (
        ValueError,
        KeyError,
        TypeError,
        SyntaxError,
        RuntimeError,
        RecursionError,
        zlib.error,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(f"its NPZ archive cannot be read: {error}") from error
    return arrays


def adapter(path: Path) -> dict[str, Any]:
    """Description of a file of trained weights: its `kind` (lora, dora, full), whether `peft` has written it and not
    mlx-lm, the adapters' `ranks`, the `layers` and the `modules` in them. Raises CheckpointError, OSError."""
    tensors = shapes(path)
    adapted = [(match, shape) for name, shape in tensors.items() if (match := _ADAPTER.search(name)) is not None]
    if not adapted:
        layers = {int(match[1]) for name in tensors if (match := _LAYER.search(name)) is not None}
        return {"kind": "full", "peft": False, "ranks": [], "layers": sorted(layers), "modules": []}
    magnitudes = any(name.endswith((".m", ".lora_magnitude_vector")) for name in tensors)
    return {
        "kind": "dora" if magnitudes else "lora",
        "peft": any(match[3] for match, _ in adapted),
        # Of an expert's stack the axes are others: its rank is not read here.
        "ranks": sorted({shape[0 if match[3] else 1] for match, shape in adapted if len(shape) == 2}),
        "layers": sorted({int(match[1]) for match, _ in adapted}),
        "modules": sorted({match[2] for match, _ in adapted}),
    }


FILES = 500
"""So many saved files are verified, the newest."""
CONFIGURATION = "adapter_config.json"
_LARGEST = 3


def probe_storage(request: str) -> dict[str, Any]:
    """The JSON request has `workdir` and `directory`; `roots`, one of which must hold that; `states`, another folder
    for states, or null; `runs`, where earlier runs' folders lie; `resume`, a file of trained weights to go on with, or
    null; `needed`, bytes. The answer is a CheckpointStorage of the head's."""
    question = json.loads(request)
    directory = Path(question["directory"]).expanduser()
    nothing = ("fault", "make", "permit", "own", "free", "not_durable", "resume", "resume_fault")
    report: dict[str, Any] = {**dict.fromkeys(nothing), "damaged": [], "largest": [], "directory": str(directory)}
    roots = [Path(root).expanduser().resolve() for root in question["roots"]]
    try:
        report["directory"] = str(directory.resolve())
        report |= _place(directory, roots)
        if report["fault"] is None and not (workdir := Path(question["workdir"]).expanduser()).is_dir():
            report |= {"fault": f"workdir {workdir} is not there{did_you_mean(workdir)}", "make": str(workdir)}
        if report["fault"] is None:
            if states := question["states"]:
                # Perhaps a volume that is not mounted: no fix for its folders would be right.
                place = _place(Path(states), [Path("/")])
                report |= {key: place[key] for key in ("fault", "not_durable") if place.get(key)}
            report["free"] = shutil.disk_usage(nearest(directory)).free
            report["damaged"] = _damaged(directory)
    except (OSError, RuntimeError) as error:
        why = reason_of(error, directory) if isinstance(error, OSError) else error
        report["fault"] = f"{directory} cannot be looked at: {why}"
    if question["resume"] is not None:
        report |= _resume(Path(question["resume"]).expanduser(), roots)
    if report["free"] is not None and report["free"] < question["needed"]:
        report["largest"] = _largest(Path(question["runs"]).expanduser())
    return report


def _place(directory: Path, roots: list[Path]) -> dict[str, Any]:
    """Try to keep files there: write, sync, rename, delete."""
    resolved = directory.resolve()
    if outside := _outside(directory, roots):
        return {"fault": outside}
    place = nearest(resolved)
    entered = os.access(place, os.X_OK)
    # A link to a disk that is not there, say: what makes folders makes none in its place.
    for path in (directory, *directory.parents) if entered else ():
        if path.is_symlink() and not path.exists():
            return {"fault": f"{path} leads to {path.resolve()}, which is not there", "make": str(path.resolve())}
    if not place.is_dir():
        return {"fault": f"{place} is a file"}
    try:
        durable = write(place)
    except OSError as error:
        fault = f"{place} cannot be {'written' if entered else 'entered'}: {reason_of(error, place)}"
        if error.errno in (errno.EACCES, errno.EPERM) and not is_withheld(error, place):
            key = "permit" if place.stat().st_uid == os.getuid() else "own"
            return {"fault": fault, key: str(place)}
        return {"fault": fault}
    return {} if durable else {"not_durable": str(place)}


def _outside(path: Path, roots: list[Path]) -> str | None:
    resolved = path.resolve()
    if any(resolved.is_relative_to(root) for root in roots):
        return None
    through = f" (through a symlink to {resolved})" if resolved != path else ""
    todo = "choose another, or name its folder in [preflight] roots"
    return f"{path} lies outside of the allowed directories{through}: {todo}"


def write(folder: Path) -> bool:
    """Write, sync and rename a file as saving does; then delete it. False where its bytes may stay in the drive's cache
    (attempt.sync_file). Raises OSError."""
    file = folder / f".flightdeck-{os.getpid()}"
    try:
        write_atomic(file, "Flight Deck was here to see whether a run can save.\n")
        with file.open("r+b") as written:
            return sync_file(written.fileno())
    finally:
        file.unlink(missing_ok=True)


def _damaged(directory: Path) -> list[list[str]]:
    if not directory.is_dir():
        return []
    # A name that begins with a dot is one that was being written.
    files = [path for path in directory.glob("*.safetensors") if not path.name.startswith(".")]
    newest = sorted(files, key=lambda path: path.lstat().st_mtime, reverse=True)[:FILES]
    damaged = [[str(path), why] for path in newest if (why := safetensors_fault(path)) is not None]
    configuration = directory / CONFIGURATION
    try:
        if not isinstance(json.loads(read_regular(configuration)), dict):
            damaged.append([str(configuration), "it is no JSON object"])
    except FileNotFoundError:
        pass
    except (ValueError, RecursionError):
        damaged.append([str(configuration), "it is no JSON"])
    return damaged


def _resume(path: Path, roots: list[Path]) -> dict[str, Any]:
    try:
        if path.is_dir():
            names = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".npz"))
            named = f"name the file in it: {', '.join(names[:8])}" if names else "it has no *.safetensors"
            return {"resume_fault": f"{path} is a folder: {named}"}
        if not path.is_file():
            return {"resume_fault": f"{path} is not there{did_you_mean(path)}"}
        if outside := _outside(path, roots):
            return {"resume_fault": outside}
        return {"resume": adapter(path)}
    except CheckpointError as refused:
        return {"resume_fault": f"{path} cannot be resumed from: {refused}"}
    except OSError as error:
        return {"resume_fault": f"{path} cannot be read: {reason_of(error, path)}"}


def _largest(runs: Path) -> list[list[Any]]:
    try:
        folders = [path for path in runs.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []
    sizes = sorted(((disk_usage(folder), str(folder)) for folder in folders), reverse=True)
    return [[folder, size] for size, folder in sizes[:_LARGEST] if size]


_ASIDE = ".deleted-"


def probe_run_folders(request_text: str) -> dict[str, Any]:
    """`bytes` that the JSON request's `folders` of a `run` take on the disk; with `remove` they are removed, unless
    processes with the run's `nonce` are `running`. A folder bears the run's id."""
    request = json.loads(request_text)
    run, folders = request["run"], [Path(folder) for folder in request["folders"]]
    running = [process.command[:200] for process in with_nonce(request["nonce"])]
    if running:
        return {"running": running}
    for folder in folders:
        if not run or folder.name != run or not folder.is_absolute() or folder.is_symlink():
            return {"problem": f"{folder} is no folder of the run"}
    taken, problem = sum(disk_usage(folder) for folder in folders), None
    for folder in folders if request["remove"] else ():
        aside = folder.with_name(f"{_ASIDE}{run}")
        try:
            shutil.rmtree(aside, ignore_errors=True)
            if folder.exists():
                # One rename: a removal that is killed leaves nothing that a resumption would take for a state.
                folder.rename(aside)
                shutil.rmtree(aside)
        except OSError as error:
            problem = f"{folder}: {reason_of(error, folder)}"
    return {"bytes": taken, "problem": problem}


def disk_usage(folder: Path) -> int:
    """Bytes on the disk, a file with several names once."""
    sizes = dict[tuple[int, int], int]()
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        # A run that goes on renames and removes some.
        with contextlib.suppress(OSError):
            entry = path.lstat()
            sizes[entry.st_dev, entry.st_ino] = entry.st_blocks * 512
    return sum(sizes.values())
