"""The preflight's all_sum, through the real launcher."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.agent.keeper_runner import stage_bundle
from tests.training.launching import run_under_launcher

pytestmark = pytest.mark.busy


def test_two_ranks_agree_and_are_measured(tmp_path: Path) -> None:
    bundle = stage_bundle(tmp_path / "bundle")
    options = ["--seconds", "0.5", "--world-size", "2", "--out", str(tmp_path / "rank{rank}.json")]
    command = shlex.join([sys.executable, "-m", "engine.trainer.allreduce_check", *options])
    program = ["/bin/sh", "-c", f"PYTHONPATH={shlex.quote(str(bundle))} exec {command}"]
    launcher = run_under_launcher(tmp_path, 2, program, uuid.uuid4().hex)
    assert launcher.process is not None
    launcher.process.wait(60)
    for rank in (0, 1):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (result["rank"], result["size"], result["exact"], result["error"]) == (rank, 2, True, None)
        assert 0 < result["latency_s"] < 1
        assert result["bandwidth_bytes_per_s"] > 1e6


def test_a_rank_without_its_group_reports_it(tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "engine.trainer.allreduce_check",
            "--world-size",
            "2",
            "--out",
            str(tmp_path / "rank{rank}.json"),
        ],
        cwd=stage_bundle(tmp_path / "bundle"),
        env={**os.environ, "MLX_RANK": "0"},
        timeout=60,
        check=False,
    )
    assert finished.returncode == 1
    result = json.loads((tmp_path / "rank0.json").read_text())
    assert not result["exact"] and "GroupError" in result["error"]
