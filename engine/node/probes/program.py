"""Looks for a job's own program where its rank would: `python -m engine.node.probes.program WORKDIR PYTHON COMMAND…`.

Prints `program`, what would be run, where its Python `script` really lies, and `roots`, where it may; or its `fault`,
with a folder to `make` or a file to `permit` the execution of.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.node.probes import did_you_mean

PYTHON_NAMES = ("python", "python3")


def locate(workdir: Path, python: str, command: Sequence[str]) -> dict[str, Any]:
    """Where the command's program lies, or what is wrong with it or its script."""
    if not workdir.is_dir():
        return _fault(f"workdir {workdir} is not there{did_you_mean(workdir)}", make=str(workdir))
    # The keeper's own words for what differs from node to node.
    here = {"{workdir}": str(workdir), "{python}": python}
    command = [here.get(word, word.replace("{workdir}", str(workdir))) for word in command]
    first = command[0]
    if first in PYTHON_NAMES:
        program = Path(python)
    elif os.sep in first:
        program = workdir / Path(first).expanduser()
    else:
        program = Path(shutil.which(first) or "")
        if not program.name:
            return _fault(f"no program {first} on PATH")
    if not program.is_file():
        return _fault(f"{program} is not there{did_you_mean(program)}")
    if not os.access(program, os.X_OK):
        return _fault(f"{program} may not be executed", permit=str(program))
    if first in PYTHON_NAMES or program.name.startswith("python"):
        script = next((word for word in command[1:] if not word.startswith("-")), None)
        if script and script.endswith(".py"):
            path = workdir / Path(script).expanduser()
            if not path.is_file():
                return _fault(f"{path} is not there{did_you_mean(path)}")
            found = {"script": str(path.resolve()), "roots": _roots(workdir)}
            return {"program": f"{program} {path}", "fault": None, **found}
    return {"program": str(program), "fault": None}


def _roots(workdir: Path) -> list[str]:
    """Where a script may lie, symlinks followed."""
    return [str(Path.home().resolve()), str(workdir.resolve())]


def _fault(what: str, *, make: str | None = None, permit: str | None = None) -> dict[str, str | None]:
    return {"program": None, "fault": what, "make": make, "permit": permit}


def probe_program(workdir: str, python: str, *command: str) -> dict[str, Any]:
    return locate(Path(workdir), python, command)
