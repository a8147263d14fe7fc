"""Probes: how the head inspects a node, and writes an attempt's files there, with the node's own python and its
standard library alone. Each is a function of strings that returns one JSON document, or yields several. The agent runs
them in forked children; `python -m engine.node.probes NAME ARGUMENT…` runs one by itself."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.node.processes import end_with_parent, tool_output


@dataclass(frozen=True)
class Probe:
    """Where a probe is, and how the agent runs it."""

    module: str
    """Below this package; its function is `probe_<name>`."""
    streams: bool = False
    """It goes on until its stdin ends."""
    own_process: bool = False
    """It needs an interpreter of its own: it imports a framework, or is found by its command line."""
    outlives_agent: bool = False
    """Nothing but the end of its stdin may end it."""


PROBES = {
    "adapters": Probe("job", own_process=True),
    "addresses": Probe("network"),
    "configuration": Probe("model_files"),
    "copies": Probe("copies"),
    "environment": Probe("copies", streams=True),
    "examples": Probe("dataset"),
    "facts": Probe("facts"),
    "free_ports": Probe("network"),
    "hashes": Probe("files"),
    "hub": Probe("copies", streams=True),
    "inputs": Probe("files"),
    "jsonl": Probe("dataset"),
    "lease": Probe("leases", streams=True, own_process=True, outlives_agent=True),
    "listen": Probe("network", streams=True),
    "load": Probe("load"),
    "loading": Probe("job", own_process=True),
    "manifest": Probe("copies", streams=True),
    "mlx": Probe("imports", own_process=True),
    "mlx_lm": Probe("imports", own_process=True),
    "model": Probe("model_files"),
    "occupied": Probe("leases"),
    "ports": Probe("network"),
    "program": Probe("files"),
    "reach": Probe("network"),
    "read": Probe("files", streams=True),
    "remove_copy": Probe("copies"),
    "reporters": Probe("job", own_process=True),
    "rows": Probe("template", own_process=True),
    "run_folders": Probe("storage"),
    "stale": Probe("leases"),
    "storage": Probe("storage"),
    "telemetry": Probe("telemetry", streams=True),
    "template": Probe("template", own_process=True),
    "torch": Probe("imports", own_process=True),
    "transfer": Probe("copies", streams=True),
    "tree": Probe("files"),
    "write": Probe("files"),
}


_HUB_ID = re.compile(r"[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*")


def preload() -> None:
    for probe in PROBES.values():
        if not probe.own_process:
            importlib.import_module(f"{__name__}.{probe.module}")


def run(name: str, arguments: list[str]) -> None:
    """Print what a probe reports, one JSON document a line, or bytes as they are."""
    probe = PROBES[name]
    if not probe.streams:
        end_with_parent()
    module = importlib.import_module(f"{__name__}.{probe.module}")
    # Libraries print (DeepSpeed logs on stdout); the report is the only thing there.
    with contextlib.redirect_stdout(sys.stderr):
        report = getattr(module, f"probe_{name}")(*arguments)
    for document in report if isinstance(report, Iterator) else [report]:
        raw = document if isinstance(document, bytes) else json.dumps(document).encode() + b"\n"
        sys.stdout.buffer.write(raw)
        sys.stdout.flush()


def content(path: str, limit: int = 16_384) -> str:
    """The first `limit` bytes of a file as text; "" where it cannot be read."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  (as cheap as can be: this runs beside the training)
            return file.read(limit).decode(errors="replace").strip("\0")
    except OSError:
        return ""


def nearest(path: Path) -> Path:
    """The path, or what there is of the way to it."""
    # Path.exists raises PermissionError below a folder that may not be entered (before Python 3.14).
    return next(part for part in (path, *path.parents) if os.path.exists(part))  # noqa: PTH110


_PRIVATE = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents")
_ACCESS = (
    "allow full disk access for remote users in System Settings, General, Sharing, Remote Login, or keep it elsewhere"
)


def reason_of(error: OSError, path: Path) -> str:
    """An error's reason as words. macOS answers EPERM to what came over ssh and has no full disk access, in the home's
    private folders and on other volumes (Mac User Guide, "Allow a remote computer to access your Mac")."""
    words = error.strerror or str(error)
    return f"{words}: {_ACCESS}" if is_withheld(error, path) else words


def is_withheld(error: OSError, path: Path) -> bool:
    """macOS's privacy forbids it, so that no mode and no owner allows it."""
    private = {Path("/Volumes"), *(Path.home() / name for name in _PRIVATE)}
    return sys.platform == "darwin" and error.errno == errno.EPERM and not private.isdisjoint((path, *path.parents))


def mac_gpu_statistics(limit: int) -> str:
    """At most `limit` characters of ioreg's lines about the GPU's use."""
    statistics = tool_output("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
    return "\n".join(line for line in statistics.splitlines() if "PerformanceStatistics" in line)[:limit]


def did_you_mean(path: Path, holding: str = "") -> str:
    """ ", did you mean …?" for a path whose parent has something of a similar name. `holding`: a file that must be in
    it; without its parent, the path may then be ORG/NAME of the Hugging Face Hub, and is looked for in its cache."""
    parent, identifier = path.parent, "/".join(path.parts[-2:])
    try:
        names = [entry.name for entry in parent.iterdir() if (entry / holding).exists()]
    except OSError:
        names = []
    close = [str(parent / name) for name in difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)]
    kind = "dataset" if holding.endswith(".jsonl") else "model"
    if not close and holding and _HUB_ID.fullmatch(identifier) and not parent.exists():
        # As huggingface_hub.constants has it.
        home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
        cache = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
        cached = cache.glob(f"{kind}s--{identifier.replace('/', '--')}/snapshots/*/{holding}")
        close = [str(file.parent) for file in sorted(cached, key=lambda file: -file.stat().st_mtime)]
        if not close and parent.parent.is_dir():
            folder = shlex.quote(str(path))
            return f"; from the Hugging Face Hub: hf download {identifier} --repo-type {kind} --local-dir {folder}"
    return f", did you mean {close[0]}?" if close else ""
