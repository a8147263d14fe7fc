"""What NCCL is told on CUDA nodes: the launch sets it for every rank, the plan tells of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.models import NodeFacts

BUFFER_BYTES = 8 << 20
"""NCCL_BUFFSIZE for gradients that fill it many times; NCCL's own default is half of it."""
SMALL_BUFFER_BYTES = 4 << 20
_MANY = 8
"""Buffers that a gradient must fill for a larger one to help."""
PLATFORM = "Red Hat OpenShift AI 2.19 or later"
"""Where InfiniBand for distributed training is supported."""


def infiniband(names: Sequence[str], facts: Mapping[str, NodeFacts]) -> bool:
    """Whether every node has an active InfiniBand device."""
    return all(
        any(device.port_state == "PORT_ACTIVE" for device in facts[name].rdma_devices) if name in facts else False
        for name in names
    )


def environment(*, infiniband: bool, gradient_bytes: int | None) -> dict[str, str]:
    """Variables of every rank: over InfiniBand with GPUDirect RDMA, else over TCP; either way NCCL says which network
    it uses. The buffer goes by what one all_sum carries, None when that is not known."""
    if not infiniband:
        return {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    small = gradient_bytes is not None and gradient_bytes < _MANY * BUFFER_BYTES
    size = SMALL_BUFFER_BYTES if small else BUFFER_BYTES
    return {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "5", "NCCL_BUFFSIZE": str(size), "NCCL_DEBUG": "INFO"}
