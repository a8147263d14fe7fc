"""The plan for nodes with MLX on CUDA: the backend, each rank's GPU, its memory, and mixes that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config.models import ClusterConfig
from engine.errors import LaunchError
from engine.launch.rank_environment import common_environment, gpu_environment
from engine.models import Interface, NodeFacts, RdmaDevice
from engine.plan.document import MemorySection
from engine.plan.network import NetworkPlan
from engine.plan.planner import make_plan
from tests.unit.cluster.cuda_nodes import MLX, cpu_node, cuda_node
from tests.unit.plan.clusters import QWEN3_4B, inputs, mac

SECOND, FIRST = (gpu["uuid"] for gpu in MLX["gpus"])
"""In the order of nvidia-smi: FIRST, SECOND."""
MIB = 2**20


def nodes(*hosts: str, gpus: int = 2, **changes: object) -> list[NodeFacts]:
    """A node on each of these hosts; those of one machine by one name."""
    found = []
    for rank, host in enumerate(hosts):
        address = Interface(name="eth0", ipv4=(f"10.0.0.{ord(host[-1]) - 96}/24",), active=True)
        fact = cuda_node(f"gpu-{rank}", host=host, gpus=gpus)
        found.append(fact.model_copy(update={"interfaces": (address,), **changes}))
    return found


def network_of(facts: list[NodeFacts], backend: str = "auto", **more: Any) -> NetworkPlan:
    cluster = ClusterConfig.model_validate({"name": "cuda", "backend": backend})
    network = inputs(facts, config={"cluster": cluster}, **more).network
    assert network is not None
    return network


@pytest.mark.parametrize(
    ("hosts", "gpus", "strategy", "backend", "reason"),
    [
        (("a", "a"), 2, "data", "nccl", "all ranks run on one machine"),
        (("a", "b"), 1, "data", "nccl", "TCP, not InfiniBand: no active device on gpu-0, gpu-1"),
        (("a", "b"), 1, "sharded", "nccl", "every rank has an NVIDIA GPU"),
        (("a", "a"), 2, "pipeline", "ring", "MLX's NCCL backend has neither send nor recv"),
        (
            ("a", "a"),
            1,
            "data",
            "ring",
            "not known to have an NVIDIA GPU for each rank: gpu-0, gpu-1 (nvidia-smi lists 1 GPU",
        ),
        (("a", "a"), 2, "local", "ring", "strategy local averages over TCP connections of its own"),
        (("a",), 2, "data", "ring", "all ranks run on one machine"),
    ],
)
def test_nccl_is_chosen_where_it_can_carry_the_strategy(
    hosts: tuple[str, ...], gpus: int, strategy: str, backend: str, reason: str
) -> None:
    network = network_of(nodes(*hosts, gpus=gpus), strategy=strategy)
    assert network.backend == backend
    assert any(reason in text for text in network.reasons), network.reasons


def test_infiniband_is_used_where_every_node_has_it() -> None:
    active = RdmaDevice(name="mlx5_0", port_state="PORT_ACTIVE")
    network = network_of(nodes("a", "b", rdma_devices=(active,)))
    assert network.infiniband and "InfiniBand: gpu-0 mlx5_0, gpu-1 mlx5_0" in network.reasons
    plan = make_plan(inputs(nodes("a", "b", rdma_devices=(active,))))
    assert (plan.rdma_config.network, plan.rdma_config.env_vars["NCCL_IB_DISABLE"]) == ("InfiniBand", "0")
    assert plan.distributed_config.unified_memory is False


@pytest.mark.parametrize(("hosts", "tells"), [("aa", False), ("ab", True)])
def test_the_plan_tells_of_a_network_only_between_machines_and_of_sums_on_the_gpu(hosts: str, *, tells: bool) -> None:
    plan = make_plan(inputs(nodes(*hosts)))
    assert "on the GPU's stream" in plan.distributed_config.gradient_sync
    assert any("NCCL uses TCP" in step for step in plan.rdma_config.setup) is tells
    assert ("between GPUs of one machine NCCL needs no network" in plan.rdma_config.reason) is not tells


@pytest.mark.parametrize(
    ("facts", "strategy", "why"),
    [
        (nodes("a", "a"), "pipeline", "MLX's NCCL backend has neither send nor recv"),
        (nodes("a", "a", gpus=1), "data", "it needs a GPU for each rank: gpu-0, gpu-1 (nvidia-smi lists 1 GPU for 2"),
        ([*nodes("a"), mac("ana", 1, "Apple M4 Max", 64)], "data", "MLX computes on Metal on ana"),
        ([*nodes("a"), cpu_node("gpu-1")], "data", "MLX computes on CPU on gpu-1"),
    ],
    ids=["pipeline", "one-gpu", "metal", "cpu"],
)
def test_nccl_is_refused_by_name_where_it_cannot_run(facts: list[NodeFacts], strategy: str, why: str) -> None:
    with pytest.raises(LaunchError) as refusal:
        network_of(facts, "nccl", strategy=strategy)
    assert str(refusal.value).startswith("nccl is not possible: ") and why in str(refusal.value)


def test_a_refusal_counts_the_gpus_that_the_job_makes_visible() -> None:
    with pytest.raises(LaunchError, match="the job's CUDA_VISIBLE_DEVICES names 1 GPU for 2 ranks"):
        network_of(nodes("a", "a"), "nccl", job={"env": {"CUDA_VISIBLE_DEVICES": "1"}})


@pytest.mark.parametrize(
    ("hosts", "env", "gpus"),
    [
        (("a", "a", "b"), {}, (FIRST, SECOND, FIRST)),
        (("a", "b", "a"), {}, (FIRST, FIRST, SECOND)),
        (("a", "a", "a"), {}, (FIRST, SECOND, FIRST)),
        (("a", "a"), {"CUDA_VISIBLE_DEVICES": "2, 3"}, ("2", "3")),
    ],
    ids=["in-order", "in-turns", "shared", "chosen-by-the-job"],
)
def test_each_rank_has_a_gpu_of_its_own_in_every_start(
    hosts: tuple[str, ...], env: dict[str, str], gpus: tuple[str, ...]
) -> None:
    network = network_of(nodes(*hosts), "ring", job={"env": env})
    assert tuple(gpu_environment(network, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(len(hosts))) == gpus
    assert "CUDA_VISIBLE_DEVICES" not in common_environment(network, env)


def test_a_divided_gpu_is_left_to_the_nodes_own_environment() -> None:
    facts = nodes("a")[0]
    divided = tuple(gpu.model_copy(update={"mig": True}) for gpu in facts.gpus)
    for backend in ("ring", "nccl"):
        network = network_of([facts.model_copy(update={"gpus": divided})], backend)
        assert network.backend == backend and gpu_environment(network, 0) == {}
    assert common_environment(network, {"CUDA_VISIBLE_DEVICES": "MIG-1"})["CUDA_VISIBLE_DEVICES"] == "MIG-1"


def test_nccl_between_machines_uses_the_interface_of_the_address() -> None:
    assert gpu_environment(network_of(nodes("a", "b")), 1)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in gpu_environment(network_of(nodes("a", "b")), 1, {"NCCL_SOCKET_IFNAME": "ib0"})
    assert "NCCL_SOCKET_IFNAME" not in gpu_environment(network_of(nodes("a", "a")), 1)


@pytest.mark.parametrize(
    ("ranks", "gpus", "env", "sharing"),
    [(1, 2, {}, 1), (2, 2, {}, 1), (3, 2, {}, 2), (2, 1, {}, 2), (2, 2, {"CUDA_VISIBLE_DEVICES": "1"}, 2)],
    ids=["one", "own", "uneven", "shared", "chosen-by-the-job"],
)
def test_a_ranks_memory_is_that_of_its_gpu(ranks: int, gpus: int, env: dict[str, str], sharing: int) -> None:
    plan = make_plan(inputs(nodes(*"a" * ranks, gpus=gpus), job={"env": env}))
    assert isinstance(plan.memory, MemorySection)
    assert {row.limit_bytes for row in plan.memory.ranks} == {80683571609 // sharing}
    assert {row.limit_from for row in plan.memory.ranks} == {
        "the GPU's limit" + (f", shared by its {sharing} ranks" if sharing > 1 else "")
    }


def test_a_pytorch_job_is_planned_alike_with_facts_of_an_mlx_job_before_it() -> None:
    both = nodes("a", "a")
    for fact in (both[0], cpu_node()):
        facts = [fact.model_copy(update={"node": other.node, "host": "ana@a"}) for other in both]
        job = {"framework": "torch", "command": ("python", "train.py"), "mlx_lm": {}}
        for backend in ("auto", "nccl"):
            network = network_of(facts, backend, job=job, model=None)
            assert (network.backend, [host.gpu for host in network.hosts]) == ("nccl", [None, None])
        assert make_plan(inputs(facts, job=job, model=None)).rdma_config.platform == "cuda"


@pytest.mark.parametrize(
    ("env", "gpus", "backend"),
    [({}, 2, "nccl"), ({}, 0, "gloo"), ("0,1", 0, "gloo"), ("-1", 2, "gloo"), ("", 2, "gloo")],
)
def test_pytorch_takes_nccl_for_gpus_that_are_there_and_visible(
    env: str | dict[str, str], gpus: int, backend: str
) -> None:
    facts = [fact.model_copy(update={"gpu": None, "gpus": fact.gpus[:gpus]}) for fact in nodes("a", "b")]
    env = {"CUDA_VISIBLE_DEVICES": env} if isinstance(env, str) else env
    job = {"framework": "torch", "command": ("python", "train.py"), "mlx_lm": {}, "env": env}
    assert network_of(facts, job=job, model=None).backend == backend


def test_a_cpu_build_is_planned_with_the_machines_memory() -> None:
    plan = make_plan(inputs([cpu_node()]))
    assert isinstance(plan.memory, MemorySection)
    assert plan.memory.ranks[0].limit_bytes == 527990784 * 1024
    assert plan.rdma_config.platform == "cpu"


@pytest.mark.parametrize("strategy", ["data", "sharded", "pipeline", "local"])
@pytest.mark.parametrize(
    ("other", "named"),
    [(mac("ana", 1, "Apple M4 Max", 64), "Metal on ana"), (cpu_node("box"), "CPU on box")],
    ids=["metal", "cpu"],
)
def test_ranks_that_compute_on_different_devices_are_refused(other: NodeFacts, named: str, strategy: str) -> None:
    address = Interface(name="eth0", ipv4=("10.0.0.2/24",), active=True)
    mixed = [*nodes("a"), other.model_copy(update={"interfaces": (address,)})]
    plan = make_plan(inputs(mixed, strategy=strategy, job={"strategy": strategy}))
    texts = [issue.text for issue in plan.refusals if issue.name == "nodes"]
    assert len(texts) == 1 and f"MLX computes with CUDA on gpu-0, {named}" in texts[0]
    assert plan.rdma_config.backend == "ring"


def test_a_mix_is_a_warning_for_a_command_and_nothing_where_all_are_alike() -> None:
    mixed = [*nodes("a"), mac("ana", 1, "Apple M4 Max", 64)]
    plan = make_plan(inputs(mixed, job={"command": ("python", "train.py"), "mlx_lm": {}}, model=None))
    assert not plan.refused and any("copies drift apart" in warning.text for warning in plan.warnings)
    assert not make_plan(inputs(nodes("a", "b"), model=QWEN3_4B)).refused
