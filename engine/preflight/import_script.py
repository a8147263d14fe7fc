"""Runs on the node, with the node's own python, its text coming over stdin: can it import mlx-lm?

    python - import|find < import_script.py

Prints one JSON object: `mlx_lm`, its version, or `mlx_lm_error`. An import takes seconds of a core. So the files that
one has read are kept, below the node root: while this python, its path and each of those files are the same, an import
would find the same again, and `proved` says when it has. With `find` it is only looked for.
"""

from __future__ import annotations

import sys

# Read from stdin, the script would find its modules in the node user's home first, whatever lies there.
if sys.path and sys.path[0] == "":
    del sys.path[0]

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

PROOFS = Path("~/.flightdeck/imports")
NICE = 10
"""What else is measured on the node at the same time goes first."""


def stat_of(path: str) -> list[int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (thousands of them)
    except OSError:
        return None
    return [found.st_size if not os.path.isdir(path) else 0, found.st_mtime_ns]  # noqa: PTH112


def surroundings() -> dict[str, Any]:
    """What an import depends on besides the files of the modules. One that is put beside those changes its folder."""
    return {
        "python": sys.version,
        "system": platform.platform(),
        "path": {entry: stat_of(entry) for entry in sys.path},
    }


def proof_file() -> Path:
    """Of this interpreter, by the name that it was called by: a venv's is a link."""
    return PROOFS.expanduser() / (hashlib.sha256(f"{sys.executable}\0{sys.prefix}".encode()).hexdigest()[:16] + ".json")


def proved() -> dict[str, Any] | None:
    """What an earlier import has found, while it still holds."""
    try:
        proof = json.loads(proof_file().read_text())
        if proof["surroundings"] != surroundings() or any(stat_of(path) != was for path, was in proof["files"].items()):
            return None
        return {"mlx_lm": str(proof["mlx_lm"]), "proved": float(proof["at"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(version: str) -> None:
    """Where the node root is there, and its disk takes it."""
    files = {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))}
    said = {
        "mlx_lm": version,
        "at": time.time(),
        "surroundings": surroundings(),
        "files": {path: stat_of(path) for path in sorted(files)},
    }
    file = proof_file()
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        beside.write_text(json.dumps(said))
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


def imported() -> dict[str, Any]:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        mlx_lm = importlib.import_module("mlx_lm")
    except Exception as error:
        return {"mlx_lm_error": f"{type(error).__name__}: {error}"}
    keep(mlx_lm.__version__)
    return {"mlx_lm": mlx_lm.__version__}


def found() -> dict[str, Any]:
    if importlib.util.find_spec("mlx_lm") is None:
        return {"mlx_lm_error": "ModuleNotFoundError: No module named 'mlx_lm'"}
    return {"mlx_lm": importlib.metadata.version("mlx-lm")}


if __name__ == "__main__":
    print("\n" + json.dumps((proved() or imported()) if sys.argv[1] == "import" else found()), flush=True)
    # What mlx-lm has brought along has threads that are waited for.
    os._exit(0)
