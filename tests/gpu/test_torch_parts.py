"""The PyTorch parts on CPU builds, through the frame of a visit; and what they make of a GPU's figures."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.gpu import torch_facts, torch_memory, torch_throughput, torch_trainings
from tests.gpu.part import ROOT, Part, Visit
from tests.gpu.results import RECORDINGS, Row, read_rows
from tests.gpu.torch_facts import facts
from tests.gpu.torch_jobs import Trained, shape_of
from tests.gpu.torch_parts import PARTS
from tests.gpu.torch_throughput import Compared

SMI = """#!/bin/sh
# A card whose memory and use are those of one process, as long as that lives.
cd {folder}
card() {{
    used=512 use=0 apps=
    if [ -e pid ] && kill -0 "$(cat pid)" 2>/dev/null; then
        used=3072 apps="$(cat pid), 2560, python"
        [ -e busy ] && use=97
    fi
}}
row() {{ card; echo "0, $use, 1980, 120.50, 41, $used, 81559"; }}
case "$*" in
    *loop*) while :; do row; sleep 0.2; done ;;
    *=index,*) row ;;
    *=memory.used*) card; echo $used ;;
    *compute-apps*) card; [ -z "$apps" ] || echo "$apps" ;;
    *=name,*) echo "NVIDIA H100 80GB HBM3, 81559, GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61, 580.95.05" ;;
    *=uuid,*) echo "GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61, 9.0, Disabled" ;;
    *-x*) cat {folder}/smi.xml ;;
    *) echo "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0 |" ;;
esac
"""
XML = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <driver_version>580.95.05</driver_version>
    <cuda_version>{cuda}</cuda_version>
    <attached_gpus>1</attached_gpus>
    <gpu id="00000000:01:00.0">
        <product_name>NVIDIA H100 80GB HBM3</product_name>
        <mig_mode><current_mig>Disabled</current_mig></mig_mode>
        <uuid>GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61</uuid>
        <fb_memory_usage><total>81559 MiB</total><used>512 MiB</used></fb_memory_usage>
    </gpu>
</nvidia_smi_log>
"""
PROCESS = """
import json, os, sys, time
from pathlib import Path
folder = Path({folder!r})
(folder / "pid").write_text(str(os.getpid()))
found = {{"name": "NVIDIA H100 80GB HBM3", "memory": 84_900_000_000, "capability": "9.0", "pid": os.getpid()}}
print(json.dumps(found), flush=True)
sys.stdin.readline()
(folder / "busy").touch()
time.sleep(600)
"""


def visit_in(tmp_path: Path, *, dry: bool = False) -> Visit:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    return Visit("part", tmp_path, scratch, dry, "cpu" if dry else "cuda", sys.executable)


def figures(folder: Path) -> dict[str, Row]:
    return {row.name: row for row in read_rows(folder) if row.part and row.name}


@pytest.mark.slow  # tests/gpu/test_visit.py runs a part of MLX in every run of the tests.
@pytest.mark.busy
@pytest.mark.needs("torch", "linux")
@pytest.mark.parametrize("part", PARTS, ids=[part.name for part in PARTS])
def test_a_part_runs_on_cpu_builds_and_says_nothing_of_a_gpu(part: Part, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.gpu", "--dry", "--out", str(tmp_path), "--limit-s", "900", "--only", part.name]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    rows = [row for row in read_rows(tmp_path) if row.part]
    measured = [row for row in rows if row.name]
    assert measured and all(row.dry for row in rows) and rows[-1].status == "ended"
    assert not [row.name for row in measured if row.unit in ("tokens/s", "MiB") or "MFU" in row.name]


@pytest.mark.slow
@pytest.mark.needs("linux")
@pytest.mark.parametrize("cuda", ["13.0", "12.8"])
def test_facts_and_telemetry_of_a_card_are_compared_with_what_nvidia_smi_says(
    cuda: str, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text(SMI.format(folder=tools))
    (tools / "nvidia-smi").chmod(0o755)
    (tools / "smi.xml").write_text(XML.format(cuda=cuda))
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setattr(torch_facts, "_PROCESS", PROCESS.format(folder=str(tools)))
    facts(visit_in(tmp_path))
    found = figures(tmp_path)
    missed = [name for name, row in found.items() if row.status == "failed"]
    assert missed == ([] if cuda == "13.0" else ["facts: CUDA of the driver"])
    assert found["telemetry: memory in use, grown by"].value == 2560
    assert found["load: memory of the process"].value == 2560
    assert found["telemetry: use of the GPU while a process computes"].value == 0.97
    recorded = [json.loads(line)["name"] for line in (tmp_path / RECORDINGS).read_text().splitlines()]
    assert {"nvidia-smi", "nvidia-smi -q -x", "nvidia-smi -L", "telemetry: a sample"} <= set(recorded)


def trained(losses: list[float], *warnings: str, peak: int = 0, error: str = "") -> Trained:
    steps = [{"peak_memory_bytes": peak}]
    return Trained(error, dict(enumerate(losses, 1)), steps, {"device": "cuda:0"}, warnings, "log")


def test_losses_miss_their_target_where_they_differ_rise_or_are_not_there(tmp_path: Path) -> None:
    visit, reference = visit_in(tmp_path), trained([3.0, 2.0])
    cases = {
        "equal": trained([3.0, 2.0]),
        "close": trained([3.00005, 2.0]),
        "other": trained([3.0, 2.001]),
        "shorter": trained([3.0]),
        "failed": trained([3.0, 2.0], error="exit codes [1]"),
    }
    for name, here in cases.items():
        torch_trainings.compare(visit, name, here, reference, 1e-4)
    torch_trainings.compare(visit, "rises", trained([2.0, 3.0]), trained([2.0, 3.0]), 1e-4)
    verdicts = {name: row.status for name, row in figures(tmp_path).items()}
    assert verdicts == {name: "ok" if name in ("equal", "close") else "failed" for name in [*cases, "rises"]}


def test_updates_that_the_scaler_skipped_are_counted(tmp_path: Path) -> None:
    visit = visit_in(tmp_path)
    skip = "iteration 1: float16 overflowed, so nothing was learned from it"
    torch_trainings._scaled(visit, "full", trained([3.0, 3.0, 2.0], skip, "another"))
    torch_trainings._scaled(visit, "lora", trained([3.0, float("nan")]))
    found = figures(tmp_path)
    assert found["full, fp16 with scaling: updates that the scaler skipped"].value == 1
    verdicts = [found[f"{kind}, fp16 with scaling: the loss"].status for kind in ("full", "lora")]
    assert verdicts == ["ok", "failed"]


def test_an_estimate_is_within_a_tenth_of_the_allocators_peak_or_misses(tmp_path: Path) -> None:
    visit, case = visit_in(tmp_path), ("0.1 B", "full")
    planned = torch_memory._planned(case, "bf16", 4, 1_024, on_gpu=True)
    for share, verdict in ((1.0, "ok"), (1.09, "ok"), (1.2, "failed"), (0.85, "failed")):
        torch_memory._report(visit, case, trained([3.0], peak=round(planned.peak_bytes / share)), planned)
        assert figures(tmp_path)[torch_memory._name(case)].status == verdict


def test_trainings_at_the_same_time_leave_a_part_of_the_gpu_free() -> None:
    planned = {(size, kind): 10 * count for count, (size, kind) in enumerate(product("abc", ("lora", "full")), 1)}
    assert torch_memory.waves(planned, 120) == [
        [("c", "full"), ("b", "lora")],
        [("c", "lora"), ("b", "full")],
        [("a", "full"), ("a", "lora")],
    ]
    assert torch_memory.waves({("a", "full"): 100, ("b", "lora"): 90}, 100) == [[("a", "full")], [("b", "lora")]]


def test_a_rate_and_its_mfu_are_beside_the_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    visit = visit_in(tmp_path)
    monkeypatch.setattr(torch_throughput, "smi", lambda *_: [["NVIDIA H100 80GB HBM3"]])
    operations = torch_throughput._operations("1 B", "full", 2_048)
    assert operations == 6 * (shape_of("1 B").total_parameters - 2_048 * 32_000) + 12 * 16 * 2_048 * 2_048
    compared = Compared({"ours": 0.1, "plain": 0.11}, {"ours": 90, "plain": 100}, "")
    torch_throughput._report(visit, "faster", compared, 4_096, operations)
    torch_throughput._report(
        visit, "slower", Compared({"ours": 0.12, "plain": 0.11}, compared.peak_bytes, ""), 4_096, 1.0
    )
    found = figures(tmp_path)
    assert found["faster: ours"].value == 40_960
    assert found["faster: ours, MFU"].value == f"{40_960 * operations / 989e12:.1%}"
    verdicts = [found[f"{name}: ours over the Trainer's"].status for name in ("faster", "slower")]
    assert verdicts == ["ok", "failed"]
