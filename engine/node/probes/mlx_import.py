"""The `mlx` and `mlx_lm` probes: which of them this python can import.

An import of mlx-lm takes seconds of a core. So the files that one has read are kept, below the node root: while this
python, its path and each of those files are the same, an import would find the same again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from engine.protocol.attempt import write_atomic

PROOFS = Path("~/.flightdeck/imports")
NICE = 10
"""Other measurements on the node at the same time go first."""


def stat_of(path: str) -> list[int] | None:
    try:
        found = os.stat(path)  # noqa: PTH116  (thousands of them)
    except OSError:
        return None
    return [found.st_size if not os.path.isdir(path) else 0, found.st_mtime_ns]  # noqa: PTH112


def surroundings() -> dict[str, Any]:
    """Conditions of an import besides the files of the modules. A file that is put beside those changes its folder."""
    return {"python": sys.version, "system": platform.platform(), "path": {entry: stat_of(entry) for entry in sys.path}}


def proof_file() -> Path:
    """The proof of this interpreter, by the name that it was called by: a venv's is a link."""
    return PROOFS.expanduser() / (hashlib.sha256(f"{sys.executable}\0{sys.prefix}".encode()).hexdigest()[:16] + ".json")


def proved() -> dict[str, Any] | None:
    """Result of an earlier import; None if it no longer holds."""
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
    proof = {
        "mlx_lm": version,
        "at": time.time(),
        "surroundings": surroundings(),
        "files": {path: stat_of(path) for path in sorted(files)},
    }
    with contextlib.suppress(OSError):
        proof_file().parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(proof_file(), json.dumps(proof))


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
    return {"mlx_lm": importlib.import_module("importlib.metadata").version("mlx-lm")}


def probe_mlx() -> dict[str, Any]:
    """`python`, `linux`, `venv`, and `mlx` with its distributed `backends`, or `mlx_error`."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "linux": sys.platform.startswith("linux"),
        "venv": sys.prefix != sys.base_prefix,
    }
    try:
        mx = importlib.import_module("mlx.core")
        report["mlx"] = mx.__version__
        report["backends"] = [name for name in ("ring", "jaccl", "nccl") if mx.distributed.is_available(name)]
    except Exception as error:
        report["mlx_error"] = f"{type(error).__name__}: {error}"
    return report


def probe_mlx_lm(how: str) -> dict[str, Any]:
    """`mlx_lm`, its version, or `mlx_lm_error`. `how` is "import", or "find" without importing it; `proved` is when an
    earlier import succeeded that still holds."""
    return (proved() or imported()) if how == "import" else found()
