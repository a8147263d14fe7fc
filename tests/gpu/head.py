"""The head's command line in a part: `flightdeck` on a configuration whose nodes are all this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.run.run_plan import read_plan
from engine.store.layout import RunDir
from tests.faults.local_runs import Run
from tests.gpu.part import Completed, Visit

FLIGHTDECK = (sys.executable, "-c", "import sys; from tui.cli import main; sys.exit(main())")

_DEFAULTS: dict[str, Mapping[str, Any]] = {"cluster": {"name": "gpu"}, "preflight": {"all_sum_s": 0.2}}


def write_config(visit: Visit, name: str, nodes: int, **tables: Mapping[str, Any]) -> Path:
    """A flightdeck.toml of so many ranks on this machine; `tables`: "job" and others, by their names."""
    folder = visit.scratch / name
    folder.mkdir(exist_ok=True)
    lines = []
    for table, values in (_DEFAULTS | tables).items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    for rank in range(nodes):
        rows = {"name": f"here-{rank}", "python": visit.python, "workdir": str(folder)}
        lines += ["[[node]]", *(f"{key} = {json.dumps(value)}" for key, value in rows.items())]
    path = folder / "flightdeck.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def flightdeck(visit: Visit, *arguments: str, under: Sequence[str] = (), limit_s: float | None = None) -> Completed:
    """`under`: words before the command."""
    return visit.call([*under, *FLIGHTDECK, *arguments], limit_s=limit_s)


@dataclass(frozen=True)
class Launched:
    """A launch that has returned. `record`: what it printed, a RunRecord as JSON; {} where that is nothing."""

    done: Completed
    record: Mapping[str, Any]

    @property
    def text(self) -> str:
        """All that the command printed for people."""
        return self.done.errors

    def run(self, visit: Visit) -> Run:
        folder = RunDir(visit.scratch / "home" / "runs" / self.record["id"])
        plan = read_plan(folder.plan)
        return Run(folder, plan, Path(plan.config.nodes[0].workdir))


def launch(visit: Visit, config: Path, *options: str, under: Sequence[str] = ()) -> Launched:
    done = flightdeck(visit, "launch", "-c", str(config), "--accept", "--json", *options, under=under)
    try:
        record = json.loads(done.output)
    except ValueError:
        record = {}
    return Launched(done, record if isinstance(record, dict) else {})


def smi(visit: Visit, *columns: str, of: str = "gpu") -> list[list[str]]:
    """Rows of `nvidia-smi --query-gpu`, or with `of` "compute-apps" of that; [] with `dry`. Raises RuntimeError."""
    if visit.dry:
        return []
    argv = ["nvidia-smi", f"--query-{of}={','.join(columns)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=15, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def gpu_used_mib(visit: Visit) -> int:
    """MiB of the first GPU in use by all; 0 with `dry`."""
    rows = smi(visit, "memory.used")
    return int(rows[0][0]) if rows else 0
