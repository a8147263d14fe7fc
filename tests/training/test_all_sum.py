"""The preflight's all_sum, through the real launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.training.launching import LAUNCHER, free_ports
from tests.unit.worker.kept import stage_bundle


def test_two_ranks_agree_and_are_measured(tmp_path: Path) -> None:
    bundle = stage_bundle(tmp_path / "bundle")
    hostfile = tmp_path / "hostfile.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    options = ["--seconds", "0.5", "--world-size", "2", "--out", str(tmp_path / "rank{rank}.json")]
    subprocess.run(
        [
            *(str(LAUNCHER), "--backend", "ring", "--hostfile", str(hostfile)),
            *("--starting-port", str(free_ports(2)), "--cwd", str(bundle)),
            *("--", sys.executable, "-m", "worker.all_sum", *options),
        ],
        stdin=subprocess.DEVNULL,
        check=True,
        capture_output=True,
        timeout=60,
    )
    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (result["rank"], result["size"], result["exact"], result["error"]) == (rank, 2, True, None)
        assert 0 < result["latency_s"] < 1
        assert result["bandwidth_bytes_per_s"] > 1e6


def test_a_rank_without_its_group_says_so(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "worker.all_sum", "--world-size", "2", "--out", str(tmp_path / "rank{rank}.json")],
        cwd=stage_bundle(tmp_path / "bundle"),
        env={**os.environ, "MLX_RANK": "0"},
        timeout=60,
        check=False,
    )
    assert finished.returncode == 1
    result = json.loads((tmp_path / "rank0.json").read_text())
    assert not result["exact"] and "GroupError" in result["error"]
