"""calibrate_node: measures one node with the caller's own benchmark program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from engine.measurements import HardwareMetrics, valid_model_name, valid_node_id
from engine.node.processes import kill_group
from engine.security.identifiers import safe_repr
from engine.security.paths import default_roots, validate_path
from engine.security.sanitise import plain
from engine.validators.values import finite, table

_ALLOWANCE_S = 10.0
"""For the benchmark's start and end."""
_STDERR_LENGTH = 2_000
_FIGURES = ("throughput", "memory_gb", "latency_ms")


def calibrate_node(
    node_config: Mapping[str, Any], benchmark_path: str | PathLike[str], *, duration_s: float = 120
) -> HardwareMetrics:
    """Run a benchmark on this machine, which prints one JSON object with `throughput` (examples per second),
    `memory_gb` and `latency_ms`: an executable itself, anything else by this python, with the arguments `--node-id`,
    `--model-name` and `--duration` (seconds). A throughput of 0 is an offline node.

    Raises ValueError for a `node_config` that is no table, a `node_id` or `model_name` in it that is not valid, an
    invalid path or duration, an output that is no such object, and figures below 0; TimeoutError when it runs for more
    than `duration_s` + 10 s; RuntimeError with its exit code and stderr when it fails."""
    names = table(node_config, "node_config")
    node_id, model_name = valid_node_id(names.get("node_id")), valid_model_name(names.get("model_name"))
    if not finite(duration_s, "duration_s") > 0:
        raise ValueError(f"duration_s must be above 0: {duration_s!r}")
    if not isinstance(benchmark_path, (str, PathLike)):
        raise ValueError(f"benchmark_path = {safe_repr(benchmark_path)}: must be a path")
    # It may be anywhere, but a symlink may not lead out of its folder.
    path = validate_path(fspath(benchmark_path), "benchmark", roots=(*default_roots(), Path(benchmark_path).parent))
    program = [str(path)] if path.suffix != ".py" and os.access(path, os.X_OK) else [sys.executable, str(path)]
    argv = [*program, "--node-id", node_id, "--model-name", model_name, "--duration", f"{duration_s:g}"]
    code, output, errors = _run(argv, str(path), duration_s + _ALLOWANCE_S)
    if code != 0:
        raise RuntimeError(f"{path} ended with {code}: {plain(errors.decode(errors='replace'), _STDERR_LENGTH)}")
    return HardwareMetrics(node_id, model_name, **_figures(output, str(path)), timestamp=datetime.now(UTC))


def _run(argv: list[str], where: str, limit_s: float) -> tuple[int, bytes, bytes]:
    """Exit code, stdout, stderr. Raises TimeoutError, after ending all that it has started."""
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{where}: no end after {limit_s:g} s") from None
        finally:
            kill_group(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def _figures(output: bytes, where: str) -> dict[str, float]:
    try:
        figures = json.loads(output)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} printed no JSON object: {error}") from error
    if not isinstance(figures, dict):
        raise ValueError(f"{where} printed no JSON object but {type(figures).__name__}")
    if missing := [name for name in _FIGURES if name not in figures]:
        raise ValueError(f"{where} printed no {', '.join(missing)}")
    return {name: figures[name] for name in _FIGURES}
