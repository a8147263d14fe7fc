"""The variables of a PyTorch rank on one of several machines, and of MLX's on CUDA."""

from __future__ import annotations

import pytest

from engine.launch.rank_environment import gpu_environment, torch_rank_variables
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


@pytest.mark.parametrize(
    ("backend", "found"), [("nccl", ["0", "0", "1", "2", "GPU-e"]), ("ring", [None] * 4 + ["GPU-e"])]
)
def test_nccls_ranks_of_a_machine_whose_gpus_are_not_known_take_one_after_another(
    backend: str, found: list[str | None]
) -> None:
    """Of machines with different numbers of ranks, in any order: mlx.launch alone gives all of them the first."""
    hosts = [LaunchHost(ssh=f"ana@{name}") for name in ("x", "y", "x", "x", "y")]
    hosts[4] = hosts[4].model_copy(update={"gpu": "GPU-e"})
    network = NetworkPlan(backend=backend, hosts=tuple(hosts))
    assert [gpu_environment(network, rank).get("CUDA_VISIBLE_DEVICES") for rank in range(5)] == found
