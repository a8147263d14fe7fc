"""The MLX parts on the CPU build, through the frame of a visit; and what they make of a GPU's figures."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from engine.models import NodeFacts, NvidiaGpu
from engine.plan.document import MemorySection, RankMemory
from tests.gpu import mlx_numbers
from tests.gpu.mlx_facts import probed
from tests.gpu.mlx_models import Asked, Cell
from tests.gpu.mlx_parts import PARTS
from tests.gpu.mlx_runs import difference
from tests.gpu.mlx_training import compare, report_memory
from tests.gpu.mlx_worker import Enough, Reports
from tests.gpu.part import ROOT, Completed, Visit
from tests.gpu.results import Row, read_rows

GB = 10**9


@pytest.mark.slow
@pytest.mark.busy
@pytest.mark.needs("linux")
@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_a_part_runs_on_the_cpu_build_and_judges_nothing_of_a_gpu(name: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.gpu", "--dry", "--out", str(tmp_path), "--limit-s", "900", "--only", name]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    rows = [row for row in read_rows(tmp_path) if row.part]
    assert len(rows) > 1 and all(row.dry for row in rows) and rows[-1].status == "ended"
    assert not [row for row in rows if row.target.endswith(("×", "%"))]


def visit_in(folder: Path) -> Visit:
    """On a GPU."""
    return Visit("part", folder, folder, False, "cuda", sys.executable)


def verdicts(folder: Path) -> dict[str, str]:
    return {row.name: row.status for row in read_rows(folder)}


def figure(folder: Path, name: str) -> Row:
    return next(row for row in read_rows(folder) if row.name == name)


def answers(*rates: float, peak: float, tokens: int = 20) -> list[dict[str, Any]]:
    """The worker's, of 2 reports after the warm-up."""
    counted = {"tokens": tokens, "reports": 3, "seconds": 2.0, "processor_s": 1.0, "before_bytes": 0}
    return [{**counted, "tokens_per_s": rate, "peak_bytes": peak * GB} for rate in rates]


def test_a_rate_and_a_peak_are_judged_by_the_medians_at_two_decimals(tmp_path: Path) -> None:
    stock = answers(100.0, 90.0, 110.0, peak=10.0)
    cells = {
        "level": (answers(99.6, peak=10.04), "ok", "ok"),
        "slower": (answers(99.0, peak=9.0), "failed", "ok"),
        "larger": (answers(120.0, peak=10.1), "ok", "failed"),
    }
    for size, (ours, _, _) in cells.items():
        compare(visit_in(tmp_path), Cell(size, "lora", 1), ours, stock)
    found = verdicts(tmp_path)
    for size, (_, rate, peak) in cells.items():
        assert found[f"{size}, lora, batch 1: tokens/s, ours over stock"] == rate
        assert found[f"{size}, lora, batch 1: peak memory, ours over stock"] == peak
    assert figure(tmp_path, "slower, lora, batch 1: tokens/s, ours over stock").value == 0.99


def test_trainings_of_other_tokens_are_no_comparison(tmp_path: Path) -> None:
    compare(visit_in(tmp_path), Cell("4 B", "full", 1), answers(9.0, peak=1), answers(1.0, peak=1, tokens=18))
    assert verdicts(tmp_path) == {"4 B, full, batch 1: our peak": "measured", "4 B, full, batch 1: compared": "failed"}


def test_a_training_that_failed_is_no_comparison(tmp_path: Path) -> None:
    stock = answers(1.0, peak=1)
    failure = [{"name": "cell", "failure": "RuntimeError: [malloc] Unable to allocate 9 bytes.", "reports": 0}]
    compare(visit_in(tmp_path), Cell("4 B", "full", 1), failure, stock)
    assert verdicts(tmp_path) == {"4 B, full, batch 1: ours": "failed", "4 B, full, batch 1: compared": "failed"}
    assert "Unable to allocate" in str(figure(tmp_path, "4 B, full, batch 1: ours").value)
    compare(visit_in(tmp_path), Cell("1.5 B", "full", 4), stock, failure)
    names = ("our peak", "stock", "compared")
    assert [verdicts(tmp_path)[f"1.5 B, full, batch 4: {name}"] for name in names] == ["measured"] * 3


def section_of(peak_bytes: int) -> MemorySection:
    rank = RankMemory.model_construct(peak_bytes=peak_bytes, limit_bytes=80 * GB, limit_from="the GPU's limit")
    return MemorySection.model_construct(ranks=(rank,))


def test_an_estimate_within_a_tenth_of_the_peak_is_met(tmp_path: Path) -> None:
    sections: dict[str, MemorySection | str] = {"none": "the model is unknown", "lacking": section_of(GB)}
    sections |= {"low": section_of(8 * GB), "near": section_of(round(10.9 * GB)), "high": section_of(12 * GB)}
    report_memory(visit_in(tmp_path), sections, dict.fromkeys(("low", "near", "high"), 10.0 * GB))
    found = verdicts(tmp_path)
    assert found.pop("the rank's memory limit") == "measured"
    assert found == {
        "none: the plan's peak": "failed",
        "lacking: peak": "failed",
        "low: planned over measured peak": "failed",
        "near: planned over measured peak": "ok",
        "high: planned over measured peak": "failed",
    }


SMI = """#!/bin/sh
echo "NVIDIA H100 80GB HBM3, GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61, 81559, 580.95.05"
"""


@pytest.mark.parametrize(
    ("driver", "mib", "wrong"), [("580.95.05", 81_559, []), ("570.1", 40_000, ["driver", "memory"])]
)
def test_our_probe_is_compared_with_what_nvidia_smi_says(
    driver: str, mib: int, wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gpu = NvidiaGpu(
        name="NVIDIA H100 80GB HBM3", uuid="GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61", memory_bytes=mib * 2**20
    )
    node = NodeFacts(
        node="here", host="127.0.0.1", probed_at=datetime.now(UTC), system="Linux", gpu="gpu", gpus=(gpu,),
        nvidia_driver=driver, gpu_limit_bytes=80 * GB,
    )  # fmt: skip
    probed(visit_in(tmp_path), node, {"device_name": "NVIDIA H100 80GB HBM3"})
    missed = [name.removeprefix("our probe: ") for name, status in verdicts(tmp_path).items() if status == "failed"]
    assert missed == wrong


@pytest.mark.parametrize(("growth", "verdict"), [(2.0, "ok"), (2.05, "ok"), (4.0, "failed")])
def test_scores_that_are_kept_show_in_how_the_peak_grows(
    growth: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(*_: object) -> Asked:
        sizes = {2_048: 100 * 10**6, 4_096: round(growth * 100 * 10**6), 4_095: 400 * 10**6}
        rows = [
            {"head": 64, "length": length, "peak_bytes": peak, "input_bytes": 10**6, "seconds": 0.1}
            for length, peak in sizes.items()
        ]
        return Asked(rows, Completed(0, "", "", 1.0))

    monkeypatch.setattr(mlx_numbers, "ask", answered)
    mlx_numbers.attention(visit_in(tmp_path))
    assert verdicts(tmp_path) == {
        "heads of 64: the gradient's peak that grows with tokens²": verdict,
        "heads of 64: peak of one token less, over it": "measured",
    }


def test_losses_differ_from_their_first_iteration_that_does() -> None:
    whole = {1: 4.0, 2: 3.0, 3: 2.0}
    assert difference(whole, dict(whole)) == ("the same, bit for bit", 0.0)
    text, apart = difference(whole, {1: 4.0, 2: 3.0 * (1 + 1e-6), 3: 2.0 * (1 - 1e-5)})
    assert text == "differ from iteration 2, by up to 1.0e-05" and apart == pytest.approx(1e-5)
    assert difference(whole, {1: 4.0}) == ("3 and 1 iterations", float("inf"))


def test_a_training_is_counted_after_its_warm_up_until_there_is_enough() -> None:
    reports = Reports({"reports": 2})
    reports.add(10, GB)
    reports.add(20, 3 * GB)
    with pytest.raises(Enough):
        reports.add(30, 2 * GB)
    answer = reports.answer()
    assert (answer["tokens"], answer["peak_bytes"], answer["reports"]) == (20, 3 * GB, 3)
    assert answer["tokens_per_s"] == pytest.approx(20 / answer["seconds"])


def test_what_a_worker_ended_with_is_told() -> None:
    failing = Completed(1, "", "before\nCUDA error mlx/backend/cuda/device.cpp:31 'out of memory'\n", 1.0)
    assert Asked([], failing).failure == "exit code 1: CUDA error mlx/backend/cuda/device.cpp:31 'out of memory'"
    assert Asked([], Completed(None, "", "", 7.2)).failure == "killed after 7 s"
    assert Asked([], Completed(1, "", "", 1.0)).failure == "exit code 1: it printed nothing"
    assert Asked([], Completed(0, "", "a warning", 1.0)).failure is None
