"""What MLX builds on the CPU or by CUDA's compiler, and loads again, lies where nobody else can put anything; what it
is told about its device; and what it keeps of freed memory."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from engine.protocol.job import Job
from engine.trainer import model
from engine.trainer.model import limit_cache, memory_mib, set_up_device


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


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX says that it has CUDA, and reports its device as mlx/backend/cuda/device_info.cpp does."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "NVIDIA H100", "total_memory": 80 * 2**30})
    monkeypatch.setattr(model, "_on_cpu", lambda: False)


@pytest.mark.usefixtures("cuda")
def test_what_cudas_compiler_builds_lies_in_the_node_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's cache of it is below TMPDIR, unless MLX_PTX_CACHE_DIR is set (mlx/backend/cuda/jit_module.cpp)."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    home = tmp_path / "runs" / "one"
    set_up_device(Job(home, home, home, home), rank=3)
    assert os.environ["TMPDIR"] == str(tmp_path / "kernels" / "3")
    assert stat.S_IMODE((tmp_path / "kernels" / "3").stat().st_mode) == 0o700


@pytest.mark.usefixtures("cuda")
def test_layers_are_divided_by_the_gpus_memory() -> None:
    assert memory_mib() == 80 * 2**10


@pytest.mark.parametrize("own", [None, "1"])
def test_a_long_training_of_many_lengths_is_no_error_unless_the_job_says_so(own: str | None) -> None:
    """MLX reads the variable when it is imported."""
    program = (
        "import engine.trainer, os, sys; print(os.environ['MLX_ENABLE_CACHE_THRASHING_CHECK'], 'mlx' in sys.modules)"
    )
    environment = {name: text for name, text in os.environ.items() if name != "MLX_ENABLE_CACHE_THRASHING_CHECK"}
    environment |= {"MLX_ENABLE_CACHE_THRASHING_CHECK": own} if own else {}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{own or 0} False\n"


_GIB = 2**30


@dataclass(frozen=True)
class Freed:
    """`free`: of the 80 bytes of a CUDA GPU, with the keys of MLX 0.32.4's source; None without one."""

    cache: int
    threshold: int = 0
    free: int | None = None


@pytest.mark.parametrize(
    ("freed", "released"),
    [
        (Freed(_GIB), False),
        (Freed(_GIB + 1), True),
        (Freed(101, threshold=100), True),
        (Freed(40 * _GIB, free=20), False),
        (Freed(40 * _GIB, free=9), True),
        (Freed(101, threshold=100, free=20), True),
    ],
    ids=str,
)
def test_freed_memory_is_released_above_a_gibibyte_and_on_a_cuda_gpu_where_little_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: Freed, released: bool
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(mx, "get_cache_memory", lambda: freed.cache)
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("cleared"))
    if freed.free is not None:
        monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
        monkeypatch.setattr(mx, "device_info", lambda: {"free_memory": freed.free, "total_memory": 80})
    limit_cache(Job(tmp_path, tmp_path, tmp_path, tmp_path, clear_cache_threshold=freed.threshold))
    assert bool(calls) is released
