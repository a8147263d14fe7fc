"""What a rank's program finds in its environment is the same under both launchers, for every backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.plan.network import NetworkPlan
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import on, plan_of, start_attempt
from tests.unit.launch.host_layouts import configured_network

DUMP = """
import json, os
files = {name: json.load(open(os.environ[name])) for name in ("MLX_HOSTFILE", "MLX_IBV_DEVICES") if name in os.environ}
print(json.dumps([dict(os.environ), files]))
"""
NOBODYS = {"_", "SHLVL", "PWD", "OLDPWD", "PS1", "SSH_CLIENT", "SSH_CONNECTION", "FLIGHTDECK_CONTROL_FD"}
"""What each shell, each connection and each keeper has for itself."""
PATHS = {"MLX_HOSTFILE", "MLX_IBV_DEVICES", "FLIGHTDECK_SPEC", "FLIGHTDECK_EVENTS"}
DEVICES = ((None, "rdma_en1", "rdma_en2"), ("rdma_en3", None, "rdma_en4"), ("rdma_en5", "rdma_en6", None))


@pytest.mark.parametrize(
    "backend",
    ["ring", "jaccl", pytest.param("jaccl-ring", marks=pytest.mark.slow), pytest.param("nccl", marks=pytest.mark.slow)],
)
async def test_both_launchers_give_the_ranks_the_same_environment(
    backend: str, cluster: Cluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "132")
    nodes = [
        node.model_copy(update={"rdma": row})
        for node, row in zip(on(cluster, "head", "ana", "ana"), DEVICES, strict=True)
    ]
    network = configured_network(nodes, backend)
    by_launcher = await under("mlx.launch", nodes, network, fleet, tmp_path)
    directly = await under("direct", nodes, network, fleet, tmp_path)
    for rank in range(3):
        assert seen(by_launcher[rank]) == seen(directly[rank])
        # Equal, and not because both are empty.
        assert directly[rank][0]["MLX_RANK"] == str(rank)
    expected = {"ring": "MLX_HOSTFILE", "nccl": "NCCL_PORT"}.get(backend, "MLX_JACCL_COORDINATOR")
    assert expected in directly[2][0]
    assert directly[0][0]["TMPDIR"] == str(tmp_path)
    assert directly[2][0]["COLUMNS"] == "132"
    assert "TMPDIR" not in directly[1][0]


async def test_strategy_local_starts_its_ranks_directly_with_the_addresses_of_all(
    cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    nodes = on(cluster, "head", "ana", "bea")
    output = await under("mlx.launch", nodes, configured_network(nodes), fleet, tmp_path, strategy="local")
    expected = [[f"{node.ips[0]}:{21_000 + rank}"] for rank, node in enumerate(nodes)]
    for rank, (environment, files) in enumerate(output):
        assert environment["MLX_RANK"] == str(rank)
        assert files == {"MLX_HOSTFILE": expected}


async def under(launcher: str, nodes: Any, network: NetworkPlan, fleet: Fleet, tmp_path: Path, **job: Any) -> list[Any]:
    """What each rank has printed."""
    plan = plan_of(nodes, ["python", "-c", DUMP], launcher=launcher, starting_port=21_000, **job)
    started = await start_attempt(tmp_path / "home", plan, fleet, network)
    assert (started.launched.launcher is None) is plan.config.starts_directly
    output = [json.loads(await started.output(rank)) for rank in range(3)]
    await started.launcher_left()
    return output


def seen(output: Any) -> dict[str, Any]:
    """The environment, with the files in the place of their names."""
    environment, files = output
    values = {name: value for name, value in environment.items() if name not in NOBODYS}
    return values | dict.fromkeys(PATHS & values.keys(), "(a path)") | {"files": files}
