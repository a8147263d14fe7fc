"""Machines with NVIDIA GPUs, or none, and plans of PyTorch jobs on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.models import Interface, NodeFacts, NvidiaGpu, RdmaDevice
from engine.plan.context import PlanInputs
from engine.plan.document import TorchSection, TrainingPlan
from engine.plan.planner import make_plan
from tests.unit.plan.clusters import NOW, QWEN3_4B, inputs

TINY = QWEN3_4B | {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 8192,
}
FULL: Mapping[str, Any] = {"fine_tune_type": "full", "batch_size": 16, "grad_checkpoint": "auto"}


def box(host: str, ranks: int, gpu: str | None = None, gb: int = 80, **more: Any) -> list[NodeFacts]:
    """One machine's ranks, as many as it has GPUs. `more`: fields of NodeFacts, and `number`, of its address."""
    number = more.pop("number", 1)
    found = tuple(NvidiaGpu(name=gpu, memory_bytes=gb * 2**30) for _ in range(ranks)) if gpu is not None else ()
    address = Interface(name="eth0", ipv4=(f"10.0.0.{number}/24",), active=True)
    facts = {"system": "Linux", "memory_total_bytes": 2**40, "gpus": found, "interfaces": (address,), **more}
    return [NodeFacts(node=f"{host}.{rank}", host=host, probed_at=NOW, **facts) for rank in range(ranks)]


def infiniband(host: str, ranks: int, gpu: str, number: int) -> list[NodeFacts]:
    device = RdmaDevice(name="mlx5_0", port_state="PORT_ACTIVE")
    return box(host, ranks, gpu, number=number, rdma_devices=(device,))


def torch_inputs(nodes: Sequence[NodeFacts], settings: Mapping[str, Any] | None = None, **more: Any) -> PlanInputs:
    """`more`: fields of PlanInputs, or of the job (`job`) or the configuration (`config`)."""
    job = {"framework": "torch", "strategy": "auto", **more.pop("job", {})}
    return inputs(list(nodes), settings=settings, job=job, **more)


def plan(nodes: Sequence[NodeFacts], settings: Mapping[str, Any] | None = None, **more: Any) -> TrainingPlan:
    return make_plan(torch_inputs(nodes, settings, **more))


def section(made: TrainingPlan) -> TorchSection:
    assert isinstance(made.torch, TorchSection)
    return made.torch
