"""Nodes with MLX's CUDA build, as NodeFacts. Their answers have the shape that the sources of MLX 0.32.4 and the
documentation of nvidia-smi give them: recordings of `python -m tests.gpu` are to take their place."""

from __future__ import annotations

import json
from typing import Any

from engine.cluster.facts import read_facts
from engine.models import NodeFacts
from tests.data import node_output
from tests.unit.cluster.macs import NOW

MLX: dict[str, Any] = json.loads(node_output("mlx-cuda.json"))
"""As the `facts` probe prints it: two GPUs, of three that nvidia-smi lists, in another order."""
VERSIONS = {"mlx": "0.32.4", "mlx_lm": "0.32.2", "mlx-cuda-13": "0.32.4", "mlx-cuda-12": None}
ANSWERS = {
    "mlx_import": node_output("mlx-cuda.json"),
    "versions": VERSIONS,
    "nvidia_smi": node_output("nvidia-smi-list.csv"),
    "nvidia_smi_more": node_output("nvidia-smi-more.csv"),
    "meminfo": "MemTotal:       527990784 kB\nMemAvailable:   500000000 kB\n",
}


def cuda_node(name: str = "gpu-1", *, host: str | None = None, gpus: int = 2, **answers: object) -> NodeFacts:
    """ANSWERS with these in place of its own, of a node with that many GPUs."""
    imported = json.dumps({**MLX, "gpus": MLX["gpus"][:gpus]})
    fields = read_facts({"system": "Linux", "answers": {**ANSWERS, "mlx_import": imported, **answers}})
    return NodeFacts(node=name, host=host or f"ana@{name}", probed_at=NOW, **fields)


def cpu_node(name: str = "gpu-1") -> NodeFacts:
    """The same machine with MLX's CPU build."""
    imported = json.dumps({"gpu": "cpu", "backends": ["ring"], "working_set": None, "gpus": []})
    return cuda_node(name, mlx_import=imported, versions={**VERSIONS, "mlx-cuda-13": None})
