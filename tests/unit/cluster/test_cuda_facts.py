"""What a node with NVIDIA GPUs tells of them and of MLX: by samples of the shape that MLX's source gives."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.cluster.facts import read_facts
from engine.node.probes import facts as probe
from tests.unit.cluster.cuda_nodes import MLX, VERSIONS, cpu_node, cuda_node
from tui import node_state

FIRST, SECOND = (gpu["uuid"] for gpu in MLX["gpus"])


def test_the_gpus_are_those_that_mlx_can_use_in_the_order_of_nvidia_smi() -> None:
    facts = cuda_node()
    assert [gpu.uuid for gpu in facts.gpus] == [SECOND, FIRST]
    assert {(gpu.name, gpu.compute_capability, gpu.mig) for gpu in facts.gpus} == {
        ("NVIDIA H100 80GB HBM3", "9.0", False)
    }
    assert [gpu.free_bytes for gpu in facts.gpus] == [85454749696, 84929937408]
    assert (facts.mlx_device, facts.mlx_cuda, facts.nvidia_driver) == ("CUDA", "mlx-cuda-13 0.32.4", "580.95.05")
    assert node_state.chip(facts) == "2 x NVIDIA H100 80GB HBM3"


def test_the_limit_is_mlxs_own_for_one_gpu_or_the_memory_of_a_smaller_one() -> None:
    assert cuda_node().gpu_limit_bytes == 80683571609
    imported = json.dumps({**MLX, "gpus": [MLX["gpus"][0], {**MLX["gpus"][1], "total_memory": 24 * 2**30}]})
    assert cuda_node(mlx_import=imported).gpu_limit_bytes == 24 * 2**30


def test_a_part_of_a_divided_gpu_has_no_name_for_cuda_visible_devices() -> None:
    part = {**MLX["gpus"][0], "uuid": "GPU-00000000-aaaa-bbbb-cccc-000000000001"}
    assert [gpu.uuid for gpu in cuda_node(mlx_import=json.dumps({**MLX, "gpus": [part]})).gpus] == [None]


@pytest.mark.parametrize("lists", ["", "NVIDIA-SMI has failed because it couldn't communicate with the driver\n"])
def test_without_a_list_of_nvidia_smi_mlx_itself_tells_of_the_gpus(lists: str) -> None:
    facts = cuda_node(nvidia_smi=lists, nvidia_smi_more=lists)
    assert [(gpu.uuid, gpu.memory_bytes, gpu.mig) for gpu in facts.gpus] == [
        (FIRST, 85520809984, None),
        (SECOND, 85520809984, None),
    ]


def test_a_cpu_build_has_no_gpu_limit_and_is_a_warning() -> None:
    facts = cpu_node()
    assert (facts.mlx_device, facts.mlx_cuda, facts.gpu_limit_bytes, len(facts.gpus)) == ("CPU", None, None, 3)
    (warning,) = node_state.warnings(facts, {})
    assert "MLX computes on its CPU, and not on 2 x NVIDIA H100 80GB HBM3, 1 x NVIDIA T4" in warning


def test_a_build_whose_import_fails_is_named() -> None:
    facts = cuda_node(mlx_import="")
    assert (facts.mlx_device, len(facts.gpus), facts.gpu_limit_bytes) == (None, 3, 15360 * 2**20)
    fields = {"mlx_import": {"command": "import mlx", "exit_code": 1, "stderr": "ImportError: libnccl.so.2: cannot"}}
    read = read_facts({"system": "Linux", "answers": {"versions": VERSIONS}, "unknown": fields})
    assert (read["mlx_cuda"], read["mlx_problem"]) == ("mlx-cuda-13 0.32.4", "ImportError: libnccl.so.2: cannot")


def test_a_mac_is_no_cuda_node() -> None:
    assert cuda_node().model_copy(update={"system": "Darwin"}).mlx_device == "Metal"


def test_the_probe_asks_mlx_for_each_gpu_and_its_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the functions of MLX's CUDA build that it calls (python/src/device.cpp, memory.cpp)."""
    core: Any = ModuleType("mlx.core")
    core.gpu = "gpu"
    core.default_device = lambda: SimpleNamespace(type=SimpleNamespace(name="gpu"))
    core.Device = lambda kind, number: (kind, number)
    core.device_count = lambda kind: len(MLX["gpus"]) if kind == "gpu" else 1
    core.device_info = lambda device=("gpu", 0): MLX["gpus"][device[1]]
    core.cuda = SimpleNamespace(is_available=lambda: True)
    core.get_memory_limit = lambda: MLX["working_set"]
    core.distributed = SimpleNamespace(is_available=lambda name: name in ("ring", "nccl"))
    monkeypatch.setitem(sys.modules, "mlx", SimpleNamespace(core=core))
    monkeypatch.setitem(sys.modules, "mlx.core", core)
    exec(probe.MLX, {})
    assert json.loads(capsys.readouterr().out) == MLX
