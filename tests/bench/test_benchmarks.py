"""Every benchmark of docs/benchmarks.md runs; with the smallest numbers, so that its figures say nothing. `compare` and
`training` only run others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = set(re.findall(r"tests\.bench\.(\w+)", (ROOT / "docs" / "benchmarks.md").read_text()))
SMALLEST = {
    "abort": ["--rounds", "1"],
    "batches": ["--only", "alpaca-like, 100", "--seconds", "0.1"],
    "calibration": ["--rounds", "1", "--seconds", "2", "--iters", "8"],
    "checkpoint_cost": ["--iterations", "5"],
    "chunks": ["50000"],
    "convergence": ["--steps", "3", "--seeds", "1"],
    "flood": ["--seconds", "4"],
    "idle": ["--seconds", "1"],
    "launch": ["--rounds", "1"],
    "links": ["--rounds", "1", "--rates", "1000", "--ratios", "1"],
    "long_context": ["--tokens", "1024", "--only", "qwen3,"],
    "loss": ["--rounds", "1", "--tokens", "256"],
    "logs": ["--seconds", "4", "--lines", "200000"],
    "memory": ["--only", "full, adafactor"],
    "models": ["--only", "qwen3_5"],
    "partitioned": ["--only", "pipeline 0-1"],
    "precision": ["--steps", "3"],
    "preflight": ["--rounds", "1"],
    "recovery": ["--seeds", "1"],
    "series": ["--points", "2000", "--runs", "2"],
    "startup": ["--pairs", "1"],
    "telemetry": ["3"],
    "throughput": ["--rounds", "1", "--epochs", "1", "--only", "1 rank, lora, float32, equal"],
}


@pytest.mark.slow
@pytest.mark.needs("linux", "root", "namespaces", "ip", "tc", "sshd", "ssh-keygen", "g++")
@pytest.mark.parametrize("name", sorted(NAMED - {"compare", "training"}))
def test_it_prints_its_figures(name: str) -> None:
    argv = [sys.executable, "-m", f"tests.bench.{name}", *SMALLEST.get(name, [])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    # 1 is a target that was missed.
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) > 1, done.stdout
