"""Probes: how the head inspects a node. Each is a function of strings that returns one JSON document, or yields
several.

The agent runs them in forked children; `python -m engine.node.probes NAME ARGUMENT…` runs one by itself. They use
Python's standard library alone, with the node's own python.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.node.processes import end_with_parent


@dataclass(frozen=True)
class Probe:
    """Where a probe is, and how the agent runs it."""

    function: str
    """`module.function`, below this package."""
    streams: bool = False
    """It goes on until its stdin ends."""
    own_process: bool = False
    """It needs an interpreter of its own: it imports MLX, or is found by its command line."""


PROBES = {
    "addresses": Probe("network.probe_addresses"),
    "bundle": Probe("files.probe_bundle"),
    "configuration": Probe("model.probe_configuration"),
    "examples": Probe("dataset.probe_examples"),
    "facts": Probe("facts.probe_facts"),
    "free_ports": Probe("network.probe_free_ports"),
    "hashes": Probe("files.probe_hashes"),
    "jsonl": Probe("dataset.probe_jsonl"),
    "lease": Probe("leases.probe_lease", streams=True, own_process=True),
    "listen": Probe("network.probe_listen", streams=True),
    "load": Probe("load.probe_load"),
    "mlx": Probe("mlx_import.probe_mlx", own_process=True),
    "mlx_lm": Probe("mlx_import.probe_mlx_lm", own_process=True),
    "model": Probe("model.probe_model"),
    "ports": Probe("network.probe_ports"),
    "program": Probe("files.probe_program"),
    "reach": Probe("network.probe_reach"),
    "stale": Probe("leases.probe_stale"),
    "storage": Probe("storage.probe_storage"),
    "telemetry": Probe("telemetry.probe_telemetry", streams=True),
    "tree": Probe("files.probe_tree"),
}


def run(name: str, arguments: list[str]) -> None:
    """Print what a probe reports, one JSON document a line."""
    probe = PROBES[name]
    if not probe.streams:
        end_with_parent()
    module, _, function = probe.function.rpartition(".")
    report = getattr(importlib.import_module(f"{__name__}.{module}"), function)(*arguments)
    for document in report if isinstance(report, Iterator) else [report]:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()


def did_you_mean(path: Path, holding: str = "") -> str:
    """ ", did you mean …?" for a path whose parent has something of a similar name; `holding` is a file that must be
    in it."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if (entry / holding).exists()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.7)
    return f", did you mean {path.parent / close[0]}?" if close else ""
