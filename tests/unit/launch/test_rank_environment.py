"""The variables of a PyTorch rank on one of several machines."""

from __future__ import annotations

import pytest

from engine.launch.rank_environment import torch_rank_variables
from engine.plan.network import LaunchHost, NetworkPlan


@pytest.mark.parametrize(
    ("backend", "interfaces"),
    [("gloo", {"GLOO_SOCKET_IFNAME"}), ("nccl", {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"})],
)
def test_gloo_has_an_interface_also_beside_nccl(backend: str, interfaces: set[str]) -> None:
    """The built-in training has gloo for what is on the CPU."""
    hosts = tuple(LaunchHost(ssh=f"ana@box{number}", interface="eth1") for number in (1, 2))
    variables = torch_rank_variables(NetworkPlan(backend=backend, framework="torch", hosts=hosts), 1)
    assert {name for name in variables if "IFNAME" in name} == interfaces
    assert {variables[name] for name in interfaces} == {"eth1"}
