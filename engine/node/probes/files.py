"""The `hashes` and `tree` probes: whether files are the same on every node; `inputs`: what a training would begin with;
`program`: where a job's own program is; and `write`, which puts the files of an attempt in place."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.node.bootstrap import bundle_hash
from engine.node.probes import did_you_mean, is_withheld, reason_of
from engine.node.probes.model_files import HASHED, file_hash, sha256
from engine.node.processes import abandoned_locks, find_program
from engine.node.source_files import DataError
from engine.node.standard_data import standard_data
from engine.protocol.attempt import open_regular, write_atomic
from engine.protocol.checksums import BASE_MODEL, crc32, crc32_text, model_checksum, package_versions
from engine.protocol.job import config_hash
from engine.protocol.launchers import nested_launcher

PACKAGE = Path(__file__).resolve().parents[2]


def probe_hashes(request_text: str) -> dict[str, Any]:
    """`hashes`: SHA-256 of each of the JSON request's `files` by its name, of the model's small files, of the job as
    this python reads it, and of the bundle that runs this."""
    request = json.loads(request_text)
    hashes = {name: file_hash(Path(path).expanduser()) for name, path in request["files"].items()}
    if request["model"] is not None:
        model = Path(request["model"]).expanduser()
        hashes |= {f"model {name}": value for name in HASHED if (value := file_hash(model / name)) is not None}
    if request["job"] is not None:
        hashes["job"] = config_hash(request["job"])
    hashes["node bundle"] = bundle_hash(PACKAGE)
    return {"hashes": hashes}


def probe_inputs(request_text: str) -> dict[str, Any]:
    """An InputsReport of the head's: the JSON request's `files` of `data`, its `model` and `packages`, as a trainer
    reports them when it starts."""
    request = json.loads(request_text)
    data, model = (Path(request[name]).expanduser() for name in ("data", "model"))
    with contextlib.suppress(DataError):
        data = standard_data(data, request["options"]).folder
    inputs = {name: _or_reason(_file_checksum, data / name) for name in request["files"]}
    inputs[BASE_MODEL] = _or_reason(model_checksum, model)
    return {"inputs": inputs, "versions": package_versions(*request["packages"])}


def _or_reason(checksum: Callable[[Path], str], path: Path) -> str:
    try:
        return checksum(path)
    except OSError as error:
        return f"none, {reason_of(error, path)}"


def _file_checksum(path: Path) -> str:
    if path.name == "valid.jsonl" and path.parent.is_dir() and not path.exists():
        # No examples, to a trainer.
        return crc32_text(0)
    with open_regular(path) as file:
        return crc32_text(crc32(file))


LINK = -1
ENVIRONMENT = "pyvenv.cfg"
"""A folder that holds it is a virtual environment, whatever it is called: made on each machine, for that machine."""


def probe_tree(folder_path: str, request_text: str) -> dict[str, Any]:
    """The manifest of a folder. The JSON request has `without`, names (or patterns) that are left out wherever they
    are; `apart`, paths that are left out; `files`, how many are read at most; `whole_bytes`, up to which size a file is
    hashed; `all_bytes`, how much is hashed in all. The answer is a WorkdirTree of the head's, its entries in the paths'
    order."""
    folder, request = Path(folder_path), json.loads(request_text)
    try:
        if not folder.is_dir():
            return {"absent": True, "problem": f"{folder} is not there{did_you_mean(folder)}"}
        if folder.resolve() == Path.home().resolve():
            return {"home": True}
        os.listdir(folder)  # noqa: PTH208
    except OSError as error:
        return {"problem": f"{folder}: {reason_of(error, folder)}"}
    remaining, left = int(request["all_bytes"]), list[Path]()
    entries: dict[str, list[Any]] = {}
    report: dict[str, Any] = {"entries": entries}
    request["apart"] = {Path(path) for path in request["apart"]}
    for path in _below(folder, request, left):
        if len(entries) == request["files"]:
            report["cut"] = True
            break
        try:
            entry = _entry(path, min(int(request["whole_bytes"]), remaining))
        except OSError as error:
            report["problem"] = f"{path} cannot be read: {reason_of(error, path)}"
            permits = isinstance(error, PermissionError) and not is_withheld(error, path)
            report["permit"] = str(path) if permits else None
            break
        if entry is not None:
            entries[path.relative_to(folder).as_posix()] = entry
            remaining -= entry[0] if entry[0] != LINK and entry[1] is not None else 0
    report["left"] = [path.relative_to(folder).as_posix() for path in left]
    return report


def _below(folder: Path, request: dict[str, Any], left: list[Path]) -> Iterator[Path]:
    """Everything below `folder` that is no folder itself, in an order that all machines have. `left` gets the folders
    that are left out."""
    with os.scandir(folder) as scan:
        entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
    if any(entry.name == ENVIRONMENT for entry in entries):
        left.append(folder)
        return
    for entry in entries:
        path = Path(entry.path)
        if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in request["without"]):
            continue
        if path in request["apart"]:
            left.append(path)
        elif entry.is_dir(follow_symlinks=False):
            try:
                yield from _below(path, request, left)
            except PermissionError:
                # Named by whoever reads it.
                yield path
        else:
            yield path


def _entry(path: Path, hashed: int) -> list[Any] | None:
    """Size and hash of a file, of one over `hashed` bytes its size alone; None for what holds no bytes of its own: a
    socket, a pipe, a device."""
    if path.is_symlink():
        # Path.readlink would make a path of it, and lose how it is written.
        return [LINK, os.readlink(path)]  # noqa: PTH115
    if not path.is_file():
        if path.is_dir():
            # Raises why it was not entered.
            os.listdir(path)  # noqa: PTH208
        return None
    size = path.stat().st_size
    return [size, sha256(path) if size <= hashed else None]


def probe_write(folder: str, files: str) -> dict[str, Any]:
    """Put a folder with these files (JSON: name -> text, or null for a FIFO) in place, all of it or nothing, for its
    user alone; its parents are made. `problem` says why that failed, also when there is such a folder already."""
    os.umask(0o077)
    target, content = Path(folder), json.loads(files)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.exists():
            raise FileExistsError(0, "is there already")
        # What one that was killed has left.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, text in content.items():
            if text is None:
                os.mkfifo(partial / name)
            else:
                write_atomic(partial / name, text)
        partial.rename(target)
    except (OSError, UnicodeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        return {"problem": getattr(error, "strerror", None) or str(error)}
    return {"problem": None}


READ_BYTES = 1 << 18


def probe_read(path: str, offset: str) -> Iterator[Any]:
    """The size of a file, or why it cannot be read; then its bytes from `offset` on, READ_BYTES for each byte that
    comes: so the head has no more under way than it wants."""
    try:
        file = open_regular(Path(path))
    except OSError as error:
        yield {"problem": reason_of(error, Path(path))}
        return
    with file:
        yield {"size": os.fstat(file.fileno()).st_size}
        file.seek(int(offset))
        while granted := os.read(0, 256):
            for _ in granted:
                if not (data := file.read(READ_BYTES)):
                    return
                yield data


PYTHON_NAMES = ("python", "python3")
_SHELLS = ("sh", "bash", "zsh", "dash", "ksh")
_SCRIPT_CHARACTERS = 1 << 18
_LOCKS = 20


def probe_program(workdir: str, python: str, roots: str, *words: str) -> dict[str, Any]:
    """The answer is a ProgramLocation of the head's. `roots` is JSON: folders in which a script may lie, symlinks
    followed, as in the home and the workdir."""
    return {**_program(Path(workdir), python, json.loads(roots), *words), "locks": abandoned_locks()[:_LOCKS]}


def _program(workdir: Path, python: str, roots: list[str], *words: str) -> dict[str, Any]:
    if not workdir.is_dir():
        return _fault(f"workdir {workdir} is not there{did_you_mean(workdir)}", make=str(workdir))
    # The keeper's own words for what differs from node to node.
    here = {"{workdir}": str(workdir), "{python}": python}
    command = [here.get(word, word.replace("{workdir}", str(workdir))) for word in words]
    first = command[0]
    if first in PYTHON_NAMES:
        program = Path(python)
    elif os.sep in first:
        program = workdir / Path(first).expanduser()
    elif (located := find_program(first, python)) is not None:
        program = Path(located)
    elif first.endswith(".py") and (workdir / first).is_file():
        return _by_python(workdir / first, words)
    else:
        return _fault(f"no program {first} beside {python}, nor on PATH", absent=first)
    if not program.is_file():
        return _fault(f"{program} is not there{did_you_mean(program)}")
    if (fault := _not_executed(program, words)) is not None:
        return fault
    if first in PYTHON_NAMES or program.name.startswith("python"):
        script = next((word for word in command[1:] if not word.startswith("-")), None)
        if script and script.endswith(".py"):
            path = workdir / Path(script).expanduser()
            if not path.is_file():
                return _fault(f"{path} is not there{did_you_mean(path)}")
            allowed = [Path.home(), workdir, *(Path(root).expanduser() for root in roots)]
            if not any(path.resolve().is_relative_to(root.resolve()) for root in allowed):
                todo = "move it, or name its folder in [preflight] roots"
                return _fault(f"{path.resolve()} is outside of the home and the workdir: {todo}")
            return {"program": f"{program} {path}", "fault": None}
    return {"program": str(program), "fault": None, "launcher": _launcher_within(workdir, program, command)}


def _not_executed(program: Path, words: Sequence[str]) -> dict[str, str | None] | None:
    executable = os.access(program, os.X_OK)
    if words[0].endswith(".py"):
        try:
            with program.open("rb") as file:
                return None if executable and file.read(2) == b"#!" else _by_python(program, words)
        except OSError as error:
            return _fault(f"{program} may not be read: {error.strerror}")
    return None if executable else _fault(f"{program} may not be executed", permit=str(program))


def _by_python(script: Path, words: Sequence[str]) -> dict[str, str | None]:
    more = ", …" if len(words) > 1 else ""
    return _fault(f'{script} is no program by itself: write command = ["python", {json.dumps(words[0])}{more}]')


def _launcher_within(workdir: Path, program: Path, command: list[str]) -> list[Any] | None:
    """A sentence about the first launcher in a shell script of the command, and whether it is certain."""
    shell = next((place for place, word in enumerate(command) if Path(word).name in _SHELLS), None)
    # What -c has stands in the command, and is no file.
    named = next((word for word in command[shell + 1 :] if not word.startswith("-")), "") if shell is not None else None
    script = program if named is None else workdir / Path(named).expanduser()
    try:
        with script.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_SCRIPT_CHARACTERS)
    except OSError:
        return None
    if script == program and not re.match(r"#!.*sh\b", text):
        return None
    nested = nested_launcher(text)
    return [f"{script}: {nested}", nested.certain] if nested is not None else None


def _fault(what: str, **fix: str) -> dict[str, str | None]:
    return {"program": None, "fault": what, **fix}
