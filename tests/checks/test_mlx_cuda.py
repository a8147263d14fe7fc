"""versions_match on nodes with MLX's CUDA build. The import's texts are those that mlx 0.32.4 with mlx-cuda-13 printed
on Linux without a GPU, each library moved away in turn, and with a driver library whose functions fail."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.checks import mlx_cuda
from engine.checks.interpreter import Interpreter, as_interpreter
from engine.checks.mlx_cuda import MlxNode
from engine.checks.versions import evaluate
from engine.cluster.probe_results import PackagesReport
from engine.models import CheckResult, CheckStatus, NodeFacts
from tests.checks.recorded import studio
from tests.unit.cluster.cuda_nodes import cpu_node, cuda_node

PACKAGES = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
BUILDS = {"mlx": "0.32.4", "mlx-cuda-13": "0.32.4", "nvidia-nccl-cu13": "2.32.3"}
OF_12 = {"mlx": "0.32.4", "mlx-cuda-12": "0.32.4", "nvidia-nccl-cu12": "2.32.3"}
SEEN = Interpreter("3.12.4", PACKAGES, ("ring", "nccl"), venv=True, linux=True, builds=BUILDS)
ON_CPU = replace(SEEN, backends=("ring",), builds={"mlx": "0.32.4", "mlx-cpu": "0.32.4"})
DRIVER_570 = "NVIDIA H100 80GB HBM3, 81559, GPU-1d3f0b9a-77c2-4e58-8a06-3c9e2b4d5f61, 570.86.15\n"
MISSING = "{}: cannot open shared object file: No such file or directory"
AT = '--python "$HOME"/venv/bin/python'


def failed(error: str, builds: dict[str, str] = BUILDS) -> Interpreter:
    answer = {"python": "3.12.4", "linux": True, "venv": True, "versions": {}, "backends": [], "builds": builds}
    report = PackagesReport.model_validate({**answer, "errors": {"mlx": f"ImportError: {error}"}})
    return as_interpreter(report, ["mlx"], "python")


def checked(seen: Interpreter, backend: str = "nccl", facts: NodeFacts | None = None) -> CheckResult:
    """With rank 0 on "ultra" as it should be, and `seen` on "max"."""
    return evaluate(studio(), {"ultra": SEEN, "max": seen}, backend, {"max": facts} if facts is not None else {})


@pytest.mark.parametrize(
    ("library", "builds", "package"),
    [
        ("libcudnn.so.9", BUILDS, "nvidia-cudnn-cu13"),
        ("libnccl.so.2", BUILDS, "nvidia-nccl-cu13"),
        ("libnvrtc.so.13", BUILDS, "nvidia-cuda-nvrtc"),
        ("libcublasLt.so.13", BUILDS, "nvidia-cublas"),
        ("libcublas.so.13", BUILDS, "nvidia-cublas"),
        ("libcufft.so.12", BUILDS, "nvidia-cufft"),
        ("libcusolver.so.12", BUILDS, "nvidia-cusolver"),
        ("libcusparse.so.12", BUILDS, "nvidia-cusparse"),
        ("libnvJitLink.so.13", BUILDS, "nvidia-nvjitlink"),
        ("libmlx.so", BUILDS, "mlx-cuda-13"),
        ("libcudnn.so.9", OF_12, "nvidia-cudnn-cu12"),
        ("libcufft.so.11", OF_12, "nvidia-cufft-cu12"),
    ],
)
def test_a_missing_library_is_named_with_the_package_that_brings_it(
    library: str, builds: dict[str, str], package: str
) -> None:
    result = checked(failed(MISSING.format(library), builds))
    assert (result.status, result.blames) == (CheckStatus.FAIL, (1, "max"))
    assert library.split(".", maxsplit=1)[0] in result.summary and package in result.summary
    extra = "cuda12" if builds is OF_12 else "cuda13"
    assert result.fixes["max"] == f"uv pip install --reinstall-package {package} {AT} 'mlx[{extra}]==0.32.4'"


@pytest.mark.parametrize(
    ("error", "facts", "says", "fix"),
    [
        (MISSING.format("libcuda.so.1"), None, "no NVIDIA driver (libcuda.so.1): install 580 or newer", None),
        (
            "cudaMallocManaged(&data, size) failed: CUDA driver version is insufficient for CUDA runtime version",
            cuda_node("max", nvidia_smi=DRIVER_570, mlx_import=""),
            "its NVIDIA driver 570.86.15 is too old: install 580 or newer, which mlx-cuda-13 needs, or mlx[cuda12]",
            f"uv pip uninstall {AT} mlx-cuda-13 && uv pip install --reinstall-package mlx-cuda-12 {AT} "
            "'mlx[cuda12]==0.32.4'",
        ),
        (
            "cudaMallocManaged(&data, size) failed: no CUDA-capable device is detected",
            cuda_node("max", mlx_import=""),
            "mlx-cuda-13 finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES",
            None,
        ),
        (
            "cudaMallocManaged(&data, size) failed: out of memory",
            cuda_node("max", mlx_import=""),
            "the memory of its first GPU is taken: nvidia-smi lists by what",
            None,
        ),
    ],
    ids=["no-driver", "old-driver", "no-gpu", "full"],
)
def test_a_driver_that_is_missing_or_too_old_is_told_apart_from_a_hidden_gpu(
    error: str, facts: NodeFacts | None, says: str, fix: str | None
) -> None:
    result = checked(failed(error), "nccl", facts)
    assert says in result.summary
    assert result.fixes.get("max") == fix


@pytest.mark.parametrize(
    ("seen", "backend", "says"),
    [
        (replace(SEEN, builds={**BUILDS, "mlx-cuda-13": "0.32.3"}), "ring", "mlx-cuda-13 0.32.3 beside mlx 0.32.4"),
        (replace(SEEN, builds=OF_12), "ring", "mlx-cuda-12 0.32.4, rank 0 has mlx-cuda-13"),
        (replace(SEEN, builds={**BUILDS, "mlx-cpu": "0.32.4"}), "ring", "mlx-cuda-13 and mlx-cpu are both installed"),
        (replace(SEEN, builds={**BUILDS, "nvidia-nccl-cu13": "2.31.1"}), "nccl", "nvidia-nccl-cu13 2.31.1, rank 0 has"),
        (replace(SEEN, builds={**BUILDS, "nvidia-nccl-cu13": "2.31.1"}), "ring", None),
        (ON_CPU, "nccl", "this build of mlx has no nccl backend: install mlx[cuda13]"),
        (ON_CPU, "ring", None),
        (SEEN, "nccl", None),
    ],
    ids=["mlx-differs", "cuda-differs", "two-builds", "nccl-differs", "nccl-unused", "cpu-nccl", "cpu-ring", "alike"],
)
def test_builds_that_do_not_fit_together(seen: Interpreter, backend: str, says: str | None) -> None:
    result = checked(seen, backend)
    assert result.status is (CheckStatus.FAIL if says else CheckStatus.PASS), result.summary
    assert says is None or says in result.summary


def test_a_gpu_that_is_too_old_for_the_kernels_is_named() -> None:
    volta = cuda_node("max")
    gpus = (volta.gpus[0].model_copy(update={"name": "Tesla V100", "compute_capability": "7.0"}),)
    result = checked(SEEN, "nccl", volta.model_copy(update={"gpus": gpus}))
    assert "compute capability 7.5 or more, and there is Tesla V100" in result.summary
    assert checked(SEEN, "nccl", cuda_node("max")).status is CheckStatus.PASS


@pytest.mark.parametrize(
    ("builds", "facts", "extra"),
    [
        (BUILDS, None, "[cuda13]"),
        (OF_12, cuda_node(), "[cuda12]"),
        ({}, cuda_node(mlx_import=""), "[cuda13]"),
        ({}, cuda_node(mlx_import="", nvidia_smi=DRIVER_570), "[cuda12]"),
        ({}, cuda_node(mlx_import="", nvidia_smi=""), "[cpu]"),
        ({"mlx-cpu": "0.32.4"}, cpu_node(), "[cpu]"),
    ],
    ids=["as-installed", "as-installed-12", "none", "none-older-driver", "none-no-gpu", "cpu-on-purpose"],
)
def test_mlx_is_installed_with_the_extra_of_its_build_or_of_the_nodes_gpus(
    builds: dict[str, str], facts: NodeFacts | None, extra: str
) -> None:
    assert MlxNode("python", Interpreter(linux=True, builds=builds), facts).extra == extra
    assert mlx_cuda.advice(MlxNode("python", Interpreter()), SEEN, "nccl") is None
