"""Runs are compared from their directories: journals, plans, series and telemetry."""

from __future__ import annotations

import json
from pathlib import Path

from engine.api import Engine
from engine.models import NodeFacts
from engine.store.store import Store
from tests.unit.run.run_maker import START, MadeRun, report, validation


def made(home: Path, number: int, speed: float, thermal: str = "nominal") -> MadeRun:
    run = MadeRun(home, number=number).state("preflight", "launching").attempt().state("running", "finishing")
    losses = [validation(10, 2.0), validation(20, 1.0), validation(30, 1.5)]
    run.metrics([*(report(step, 3.0, tokens_per_second=speed) for step in range(1, 31)), *losses])
    samples = [{"at": 1.7e9 + n, "node": "node1", "gpu_use": 0.9, "thermal": thermal} for n in range(10)]
    samples += [{"at": 1.7e9 + n, "node": "node1", "gpu_use": 0.9, "thermal": "nominal"} for n in range(10, 20)]
    run.directory.telemetry.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return run.state("succeeded", reason="completed", train_loss=3.0, iteration=30).close()


def test_series_chips_and_heat_of_two_runs_are_compared(home: Path) -> None:
    fast, slow = made(home, 1, 1000.0), made(home, 2, 700.0, "heavy")
    Store(home).put_facts("default", [NodeFacts(node="node1", host="h", probed_at=START, chip="M3")])
    engine = Engine(home=home)
    engine.runs.annotate(slow.id, add=["night"])
    comparison = engine.comparisons.compare([slow.id, fast.id])
    rows = {row.key: (row.values, row.best) for row in comparison.differences}
    assert rows["tokens/s"] == ((700.0, 1000.0), 1)
    assert rows["tags"] == (("night", None), None)
    assert "best val loss" not in rows, "1.0 in both"
    (speed,) = comparison.speeds
    assert speed.summary.startswith("job-0002 makes 700 tokens/s, 30% less than job-0001")
    assert speed.reasons == ("node1 was throttled by heat (heavy) for 50% of the time, not 0%",)
