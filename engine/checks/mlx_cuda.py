"""MLX's CUDA build on a node: what its import lacks, and whether its packages, the NVIDIA driver and the GPUs fit
together. Sources: setup.py and mlx/backend/cuda of MLX 0.32.4, and what its import prints where a library is missing.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from engine.checks.fixes import Fix
from engine.checks.interpreter import Interpreter
from engine.cluster.transport.base import quoted
from engine.models import NodeFacts
from engine.protocol.partition import version_numbers

DRIVERS = {"mlx-cuda-13": (580,), "mlx-cuda-12": (550, 54, 14)}
"""Package of the build -> the oldest NVIDIA driver for its CUDA."""
_LIBRARIES = {
    "libcudnn": "nvidia-cudnn-cu{0}", "libnccl": "nvidia-nccl-cu{0}", "libnvrtc": "nvidia-cuda-nvrtc",
    "libcudart": "nvidia-cuda-runtime", "libcublas": "nvidia-cublas", "libcufft": "nvidia-cufft",
    "libcusolver": "nvidia-cusolver", "libcusparse": "nvidia-cusparse", "libnvJitLink": "nvidia-nvjitlink",
}  # fmt: skip
"""Beginning of a library's name -> its package; for CUDA 12 all are named after it."""
_CONTAINER = "in a container hand the GPUs on to it (--gpus all)"

Advice = tuple[str, Fix | None]


class MlxNode(NamedTuple):
    """A node of an MLX job."""

    python: str
    seen: Interpreter
    facts: NodeFacts | None = None
    need: str = ""
    """The condition on mlx's version: "==0.32.4"."""

    @property
    def build(self) -> str | None:
        """The package of the CUDA build that is installed."""
        return next((name for name in DRIVERS if name in self.seen.builds), None)

    @property
    def fitting_build(self) -> str:
        """The newest build that the node's driver can run; where that is not known, the newest."""
        driver = version_numbers(self.facts.nvidia_driver if self.facts is not None else None)
        return next((name for name, least in DRIVERS.items() if not driver or driver >= least), next(iter(DRIVERS)))

    @property
    def extra(self) -> str:
        """The extra with which mlx is to be installed: of the build that is there, or that its GPUs can use."""
        has_gpus = self.seen.has_nvidia_smi or (self.facts is not None and bool(self.facts.gpus))
        build = self.build or (self.fitting_build if has_gpus and "mlx-cpu" not in self.seen.builds else None)
        return _extra(build) if build is not None else "[cpu]" if self.seen.linux else ""

    def install(self, build: str | None = None, package: str | None = None) -> Fix:
        """Install a build, and anew its `package`, whose files are gone. The packages of builds bring the same file,
        and each removes the other's: another one goes first."""
        build = build or self.build or self.fitting_build
        others = [name for name in (*DRIVERS, "mlx-cpu") if name in self.seen.builds and name != build]
        at, mlx = f"--python {quoted(self.python)}", shlex.quote(f"mlx{_extra(build)}{self.need}")
        before = f"uv pip uninstall {at} {' '.join(others)} && " if others else ""
        back = f"uv pip uninstall {at} {build}"
        back += f" && uv pip install {at} {shlex.quote(f'mlx{self.extra}')}" if others else ""
        effect = f"puts {package or build} into the environment of {self.python}; `{back}` takes that back"
        return Fix(f"{before}uv pip install --reinstall-package {package or build} {at} {mlx}", effect)


def _extra(build: str) -> str:
    return f"[cuda{build[-2:]}]"


def advice(node: MlxNode, first: Interpreter, backend: str) -> Advice | None:
    """Why MLX's CUDA build there cannot be used, or not beside rank 0's, and what to do; None where it can."""
    if node.seen.python is None:
        return None
    if node.seen.problem is not None:
        return _of_import(node, node.seen.problem)
    if backend == "nccl" and backend not in node.seen.backends:
        build = node.fitting_build
        return f"this build of mlx has no nccl backend: install mlx{_extra(build)}", node.install(build)
    return _mismatch(node, node.build, first, backend) if node.build is not None else None


def _of_import(node: MlxNode, problem: str) -> Advice | None:
    """None for a text that tells nothing of CUDA."""
    build, fitting = node.build or node.fitting_build, node.fitting_build
    least = f"{'.'.join(map(str, DRIVERS[build]))} or newer, which {build} needs"
    missing = re.search(r"(lib\w+)\.so[.\d]*: cannot open shared object file", problem)
    library = missing[1] if missing is not None else ""
    package = next((package for name, package in _LIBRARIES.items() if library.startswith(name)), None)
    why, fix = "", None
    if "CUDA driver version is insufficient" in problem:
        why = f"its NVIDIA driver {(node.facts and node.facts.nvidia_driver) or ''} is too old: install {least}"
        if fitting != build:
            why, fix = f"{why}, or mlx{_extra(fitting)}", node.install(fitting)
    elif "no CUDA-capable device is detected" in problem:
        why = f"{build} finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES there; {_CONTAINER}"
    elif node.build and "out of memory" in problem:
        why = "the memory of its first GPU is taken: nvidia-smi lists by what"
    elif library == "libcuda":
        why = f"there is no NVIDIA driver (libcuda.so.1): install {least}; {_CONTAINER}; without a GPU use mlx[cpu]"
    elif library == "libmlx" and (node.build or (node.facts is not None and node.facts.gpus)):
        why, fix = f"libmlx.so is missing, which {build} brings: install mlx{_extra(build)}", node.install(build)
    elif package is not None:
        package = package.format(build[-2:]) if "{" in package else package + "-cu12" * build.endswith("12")
        why, fix = f"{library}.so is missing, which {package} brings: install it again", node.install(build, package)
    return (f"mlx cannot be imported: {why}", fix) if why else None


def _mismatch(node: MlxNode, build: str, first: Interpreter, backend: str) -> Advice | None:
    """Why a CUDA build that can be imported is not to be trained with, or not beside rank 0's."""
    builds, version, mlx = node.seen.builds, node.seen.builds[build], node.seen.packages.get("mlx")
    theirs, nccl = next((name for name in DRIVERS if name in first.builds), None), f"nvidia-nccl-cu{build[-2:]}"
    gpus = node.facts.gpus if node.facts is not None else ()
    old = [gpu.name for gpu in gpus if () < version_numbers(gpu.compute_capability) < (7, 5)]
    mismatches = {
        f"{build} {version} beside mlx {mlx}: they must be of one version": version != mlx,
        f"{build} and mlx-cpu are both installed, and bring the same file": "mlx-cpu" in builds,
        f"{build} {version}, rank 0 has {theirs}": theirs not in (None, build),
    }
    if (why := next((text for text, true in mismatches.items() if true), None)) is not None:
        return why, node.install(theirs)
    if backend == "nccl" and builds.get(nccl) != first.builds.get(nccl):
        return f"{nccl} {builds.get(nccl)}, rank 0 has {first.builds.get(nccl)}: NCCL connects only the same", None
    return (f"MLX needs a GPU of compute capability 7.5 or more, and there is {', '.join(old)}", None) if old else None
