"""Takes the manifest of a folder: `python -m worker.looks.tree FOLDER QUESTION`.

QUESTION is JSON: `without`, names (or patterns) of files and folders that are left out wherever they are; `apart`,
paths that are left out; `files`, how many are looked at most; `whole_bytes`, up to which size a file is hashed;
`all_bytes`, how much is hashed in all. Prints `home` (the folder is the user's home: nothing is read), `problem`
(`absent`: there is no such folder; `permit`: what may not be read), and `entries`: path → [size, SHA-256 or null], of a
symlink [-1, its target]; in the paths' order. `cut` is whether there are more; `left` the folders that were left out
for what they are, not for their name.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .near import near
from .parent import end_with_parent

LINK = -1
ENVIRONMENT = "pyvenv.cfg"
"""A folder that holds it is a virtual environment, whatever it is called: made on each machine, for that machine."""


def manifest(folder: Path, question: dict[str, Any]) -> dict[str, Any]:
    """The document for one folder."""
    said: dict[str, Any] = {
        "home": False, "absent": False, "problem": None, "permit": None, "entries": {}, "cut": False, "left": [],
    }  # fmt: skip
    try:
        if not folder.is_dir():
            said["absent"], said["problem"] = True, f"{folder} is not there{near(folder)}"
            return said
        if folder.resolve() == Path.home().resolve():
            said["home"] = True
            return said
    except OSError as error:
        said["problem"] = f"{folder}: {error.strerror}"
        return said
    left, entries = int(question["all_bytes"]), said["entries"]
    walk = _Walk(tuple(question["without"]), {Path(path) for path in question["apart"]})
    for path in walk.below(folder):
        if len(entries) == question["files"]:
            said["cut"] = True
            break
        try:
            entry = _entry(path, min(int(question["whole_bytes"]), left))
        except OSError as error:
            said["problem"] = f"{path} cannot be read: {error.strerror}"
            said["permit"] = str(path) if isinstance(error, PermissionError) else None
            break
        if entry is not None:
            entries[path.relative_to(folder).as_posix()] = entry
            left -= entry[0] if entry[0] != LINK and entry[1] is not None else 0
    said["left"] = [path.relative_to(folder).as_posix() for path in walk.left]
    return said


class _Walk:
    """Goes through a folder, in an order that all machines have."""

    def __init__(self, without: tuple[str, ...], apart: set[Path]) -> None:
        self._without = without
        self._apart = apart
        self.left: list[Path] = []

    def below(self, folder: Path) -> Iterator[Path]:
        """Everything below `folder` that is no folder itself."""
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        if any(entry.name == ENVIRONMENT for entry in entries):
            self.left.append(folder)
            return
        for entry in entries:
            path = Path(entry.path)
            if any(fnmatch.fnmatchcase(entry.name, pattern) for pattern in self._without):
                continue
            if path in self._apart:
                self.left.append(path)
            elif entry.is_dir(follow_symlinks=False):
                try:
                    yield from self.below(path)
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
            raise PermissionError(13, "permission denied")
        return None
    size = path.stat().st_size
    if size > hashed:
        return [size, None]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return [size, digest.hexdigest()]


if __name__ == "__main__":
    end_with_parent()
    print(json.dumps(manifest(Path(sys.argv[1]), json.loads(sys.argv[2]))))
