"""Runs on the node, with the node's own python (any from 3.9) and the standard library: prints facts as JSON lines.

    python facts_script.py DIRECTORY

The system's own words are sent as they are and read on the head. mlx is imported last and in a line of its own, so that
a build that crashes on import costs the device and the backends, and not the facts before.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys

BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl", "mpi")
COMMAND_LIMIT_S = 5
MACOS_COMMANDS = {
    "sysctl": ["/usr/sbin/sysctl", "hw.memsize", "machdep.cpu.brand_string", "hw.model"],
    "vm_stat": ["/usr/bin/vm_stat"],
    "sw_vers": ["/usr/bin/sw_vers"],
}
LINUX_FILES = {
    "cpuinfo": "/proc/cpuinfo",
    "meminfo": "/proc/meminfo",
    "os_release": "/etc/os-release",
}
FILE_LIMIT = 65536


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def printed(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace")


def read(path: str) -> str | None:
    try:
        with open(path, "rb") as file:  # noqa: PTH123  (as short as can be: this runs on the node)
            return file.read(FILE_LIMIT).decode(errors="replace")
    except OSError:
        return None


def free_bytes(directory: str) -> int | None:
    """On the disk of the directory, or of the nearest parent that there is."""
    while not os.path.isdir(directory) and directory != os.path.dirname(directory):  # noqa: PTH112, PTH120
        directory = os.path.dirname(directory)  # noqa: PTH120
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def facts(directory: str) -> dict[str, object]:
    usable = getattr(os, "sched_getaffinity", None)
    system = platform.system()
    texts: dict[str, str | None] = {}
    if system == "Darwin":
        texts = {name: printed(argv) for name, argv in MACOS_COMMANDS.items()}
    elif system == "Linux":
        texts = {name: read(path) for name, path in LINUX_FILES.items()}
    return {
        "system": system,
        "release": platform.release(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
        "cores": len(usable(0)) if usable else os.cpu_count(),
        "disk_free_bytes": free_bytes(directory),
        "texts": texts,
    }


def mlx_facts() -> dict[str, object]:
    try:
        # By name: only the node's process does this, and no import graph shall show mlx below the console.
        mx = importlib.import_module("mlx.core")
        backends = [name for name in BACKENDS if mx.distributed.is_available(name)]
        return {"gpu": mx.default_device().type.name, "backends": backends}
    except Exception as error:
        return {"mlx_problem": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])), flush=True)
    print(json.dumps(mlx_facts()), flush=True)
