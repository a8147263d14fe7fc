"""The `mlx`, `mlx_lm` and `torch` probes: which of a framework's packages this python can import. An import of mlx-lm
or PyTorch takes seconds of a core: the files that one has read are kept, below the node root, and while this python,
its path and each of those files are the same, an import would find the same again."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.node.probes.facts import MLX_CUDA
from engine.node.processes import tool_output
from engine.protocol.attempt import read_regular, write_atomic

PROOFS = Path("~/.flightdeck/imports")
NICE = 10
"""Other measurements on the node at the same time go first."""
MLX_BUILDS = ("mlx", *MLX_CUDA, "mlx-cpu", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Packages of MLX's build on Linux."""
NVIDIA_SMI_LIMIT = 1_000
"""Characters: its first lines have the versions of the driver and of CUDA."""


def stat_of(path: str) -> list[int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116  (thousands of them)
    except OSError:
        return None
    return [status.st_size if not os.path.isdir(path) else 0, status.st_mtime_ns]  # noqa: PTH112


def surroundings() -> dict[str, Any]:
    """Conditions of an import besides the files of the modules. A file that is put beside those changes its folder."""
    return {"python": sys.version, "system": platform.platform(), "path": {entry: stat_of(entry) for entry in sys.path}}


def proof_file(packages: Sequence[str]) -> Path:
    """The proof of this interpreter, by the name that it was called by: a venv's is a link."""
    name = hashlib.sha256(f"{sys.executable}\0{sys.prefix}\0{[*packages]}".encode()).hexdigest()[:16]
    return PROOFS.expanduser() / f"{name}.json"


def proved(packages: Sequence[str]) -> dict[str, Any] | None:
    """The report of an earlier import, with its time as `proved`; None if it no longer holds."""
    try:
        proof = json.loads(read_regular(proof_file(packages)))
        if proof["surroundings"] != surroundings() or any(stat_of(path) != was for path, was in proof["files"].items()):
            return None
        return {**proof["report"], "proved": float(proof["at"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(packages: Sequence[str], report: dict[str, Any]) -> None:
    """Where the node root is there, and its disk takes it."""
    files = {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))}
    stats = {path: stat_of(path) for path in sorted(files)}
    proof = {"report": report, "at": time.time(), "surroundings": surroundings(), "files": stats}
    with contextlib.suppress(OSError):
        proof_file(packages).parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(proof_file(packages), json.dumps(proof))


def probe_torch(how: str, *packages: str) -> dict[str, Any]:
    """`python`, `linux`, `venv`; of `packages` the `versions` by name, and `errors` of the others; with `how` "import"
    also the distributed `backends` of mlx or torch and the `build` of torch, and as `proved` when an earlier import
    succeeded that still holds. "find" imports none. On Linux the `builds` that mlx consists of."""
    linux, venv = sys.platform.startswith("linux"), sys.prefix != sys.base_prefix
    report: dict[str, Any] = {"python": platform.python_version(), "linux": linux, "venv": venv, "backends": []}
    if linux and "mlx" in packages:
        report["builds"] = find_packages(MLX_BUILDS)["versions"]
    if how == "find":
        return {**report, **find_packages(packages)}
    # What torch and MLX see of GPUs no file proves.
    kept = None if "mlx" in packages or ("torch" in packages and shutil.which("nvidia-smi")) else proved(packages)
    return {**report, **(kept or import_packages(packages))}


probe_mlx = probe_mlx_lm = probe_torch
"""The names say which of them a failure is of."""


def find_packages(packages: Sequence[str]) -> dict[str, Any]:
    metadata = importlib.import_module("importlib.metadata")
    versions, errors = {}, {}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            errors[name] = f"ModuleNotFoundError: No module named {name!r}"
    return {"versions": versions, "errors": errors}


def import_packages(packages: Sequence[str]) -> dict[str, Any]:
    with contextlib.suppress(OSError):
        os.nice(NICE)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    report: dict[str, Any] = {"versions": {}, "errors": {}}
    for name in packages:
        try:
            module = importlib.import_module("mlx.core" if name == "mlx" else name)
            if name == "mlx":
                usable = module.distributed.is_available
                report["backends"] = [backend for backend in ("ring", "jaccl", "nccl") if usable(backend)]
            report["versions"][name] = str(module.__version__)
            if name == "torch":
                report["backends"], report["build"] = torch_backends(module), torch_build(module)
        except Exception as error:
            report["errors"][name] = f"{type(error).__name__}: {error}"
    if not report["errors"] and "mlx" not in packages:
        keep(packages, report)
    return report


def torch_backends(torch: Any) -> list[str]:
    named = ("gloo", "nccl") if torch.distributed.is_available() else ()
    return [name for name in named if getattr(torch.distributed, f"is_{name}_available")()]


def torch_build(torch: Any) -> dict[str, Any]:
    """A TorchBuild of the head's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    return {
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable and "nccl" in torch_backends(torch) else None,
        "gpus": torch.cuda.device_count() if usable else 0,
        "cuda_problem": str(caught[0].message) if caught else None,
        "nvidia_smi": tool_output("nvidia-smi")[:NVIDIA_SMI_LIMIT] if shutil.which("nvidia-smi") else None,
    }
