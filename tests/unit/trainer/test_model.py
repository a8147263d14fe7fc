"""What MLX builds on the CPU, and loads again, lies where nobody else can put anything."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from engine.protocol.job import Job
from engine.trainer.model import set_up_device


@pytest.mark.needs("linux")
@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles nothing")
def test_kernels_lie_in_the_node_root_and_not_in_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, root = tmp_path / "shared", tmp_path / "node"
    (shared / f"mlx-kernels-{os.geteuid()}-3").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    for run in ("one", "another"):
        home = root / "runs" / run
        monkeypatch.setenv("TMPDIR", str(shared))
        set_up_device(Job(home, home, home, home, compile_on_cpu=True), rank=3)
        # The next run finds what this one has built.
        assert os.environ["TMPDIR"] == str(root / "kernels" / "3")
    assert stat.S_IMODE((root / "kernels" / "3").stat().st_mode) == 0o700
    (root / "kernels").chmod(0o777)
    with pytest.raises(PermissionError, match="other users can write there: chmod go-w"):
        set_up_device(Job(home, home, home, home, compile_on_cpu=True), rank=3)
