"""How the ranks are connected: the backend, each rank's addresses and RDMA devices, what prevents RDMA, and NCCL's
environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from engine.cluster import hardware
from engine.cluster.topology import ring_order
from engine.config.models import Config, NodeConfig, RdmaRow
from engine.errors import ENABLE_RDMA, LaunchError, plural, spans
from engine.models import FrozenModel, NodeFacts, Topology
from engine.plan.addresses import choose_addresses
from engine.protocol.job import Framework, Strategy
from engine.security.identifiers import SshTarget


class LaunchHost(FrozenModel):
    """One rank's entry of the hostfile."""

    ssh: str
    """In OpenSSH's form (SshTarget.openssh)."""
    ips: tuple[str, ...] = ()
    rdma: RdmaRow | None = None
    """None without RDMA."""
    interface: str | None = None
    """The network interface that has its first address, where it is known. Of PyTorch and NCCL alone."""
    gpu: str | None = None
    """Its GPU as CUDA_VISIBLE_DEVICES names it, "" for a divided one (MIG). Of MLX on CUDA alone."""


class NetworkPlan(FrozenModel):
    """The chosen backend and hosts, with the reasons."""

    backend: str
    """ "ring", "jaccl", "jaccl-ring" or "nccl"; with framework "torch" "nccl" or "gloo"."""
    framework: Framework = "mlx"
    hosts: tuple[LaunchHost, ...]
    infiniband: bool = False
    """With nccl: every node has an active InfiniBand device."""
    reasons: tuple[str, ...] = ()
    """One sentence each: why this backend, and where the addresses came from."""
    warnings: tuple[str, ...] = ()
    """Improvements that are not possible now, such as RDMA that is off on one node."""


NCCL_BUFFER_BYTES = 8 << 20
"""NCCL_BUFFSIZE for gradients that fill it many times; NCCL's default is half of it."""
NCCL_SMALL_BUFFER_BYTES = 4 << 20
_MIN_BUFFERS = 8
"""Number of buffers that a gradient must fill for the larger size to help."""
INFINIBAND_PLATFORM = "Red Hat OpenShift AI 2.19 or later"
"""Supports InfiniBand for distributed training."""


def _infiniband_devices(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts]) -> dict[str, str | None]:
    """By node the first active device."""
    devices = {node.name: facts[node.name].rdma_devices if node.name in facts else () for node in nodes}
    return {
        name: next((device.name for device in on_node if device.port_state == "PORT_ACTIVE"), None)
        for name, on_node in devices.items()
    }


def nccl_environment(*, infiniband: bool, gradient_bytes: int | None) -> dict[str, str]:
    """Variables for every rank: InfiniBand with GPUDirect RDMA, or else TCP; NCCL logs the network it uses. The buffer
    size depends on the bytes of one all_sum, None if unknown."""
    if not infiniband:
        return {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "INFO"}
    small = gradient_bytes is not None and gradient_bytes < _MIN_BUFFERS * NCCL_BUFFER_BYTES
    size = NCCL_SMALL_BUFFER_BYTES if small else NCCL_BUFFER_BYTES
    return {"NCCL_IB_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "5", "NCCL_BUFFSIZE": str(size), "NCCL_DEBUG": "INFO"}


MIN_MACOS = (26, 2)
MAX_MESH_RANKS = 8
"""Limit of a full mesh in MLX's jaccl."""
_PREFIX = "rdma_"
_OWN_NETWORK = "give each cable its own /30 network, and take the Thunderbolt bridge down"


@dataclass(frozen=True)
class Rdma:
    """The matrix of RDMA devices, one row per rank, valid if there are no obstacles."""

    rows: tuple[RdmaRow, ...]
    obstacles: tuple[str, ...]
    """One sentence each, starting with the node's name if it concerns one node."""


def rdma_over_cables(
    nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], topology: Topology, *, ring: bool
) -> Rdma:
    """Connect every pair, or with `ring` the neighbours in rank order. The configuration's own rows are kept."""
    obstacles = _cluster_obstacles(nodes, facts, ring=ring)
    for node in nodes:
        obstacles += [f"{node.name}: {fault}" for fault in node_obstacles(facts.get(node.name))]
    pairs = [(i, j) for i, j in combinations(range(len(nodes)), 2) if not ring or j - i in (1, len(nodes) - 1)]
    given = [node.rdma for node in nodes if node.rdma is not None]
    if len(given) == len(nodes):
        unnamed = [(i, j) for i, j in pairs if not given[i][j] or not given[j][i]]
        obstacles += [f"{nodes[i].name}: its rdma row has no device for {nodes[j].name}" for i, j in unnamed]
        return Rdma(tuple(given), tuple(obstacles))
    unknown = {node.name: why for node in nodes if (why := topology.unknown.get(node.name)) is not None}
    obstacles += [f"{name}: its Thunderbolt cables are not known: {why}" for name, why in unknown.items()]
    chosen: dict[tuple[int, int], list[tuple[str, str]]] = {}
    missing = []
    for i, j in pairs:
        usable, faults, cabled = _cables(nodes[i].name, nodes[j].name, facts, topology)
        chosen[i, j] = usable
        if not cabled and unknown.keys().isdisjoint((nodes[i].name, nodes[j].name)):
            missing.append(f"{nodes[i].name} and {nodes[j].name}")
        elif cabled and not usable:
            obstacles += faults
    if missing:
        shape = "the nodes do not form a ring in their order" if ring else "the nodes do not form a full mesh"
        obstacles.append(f"{shape}: no Thunderbolt cable between {', '.join(missing)}")
    return Rdma(_rows(nodes, chosen), tuple(dict.fromkeys(obstacles)))


def _rows(nodes: Sequence[NodeConfig], chosen: Mapping[tuple[int, int], list[tuple[str, str]]]) -> tuple[RdmaRow, ...]:
    """Every pair uses the same number of cables: that of the pair with the fewest."""
    count = min((len(cables) for cables in chosen.values()), default=0)
    matrix: list[list[str | tuple[str, ...] | None]] = [[None] * len(nodes) for _ in nodes]
    for (i, j), cables in chosen.items():
        for here, there, end in ((i, j, 0), (j, i, 1)):
            devices = tuple(cable[end] for cable in cables[:count])
            matrix[here][there] = devices if count > 1 else next(iter(devices), None)
    return tuple(tuple(row) if node.rdma is None else node.rdma for node, row in zip(nodes, matrix, strict=True))


def _cluster_obstacles(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], *, ring: bool) -> list[str]:
    obstacles = []
    if len(nodes) > MAX_MESH_RANKS and not ring:
        obstacles.append(f"{len(nodes)} ranks: jaccl connects at most {MAX_MESH_RANKS} in a mesh")
    hosts = [node.ssh for node in nodes]
    if shared := sorted({node.name for node in nodes if hosts.count(node.ssh) > 1}):
        obstacles.append(f"{', '.join(shared)} are one machine: RDMA connects different Macs")
    builds: dict[str, list[str]] = {}
    for node in nodes:
        if (fact := facts.get(node.name)) is not None and fact.os_build:
            builds.setdefault(f"{fact.os_version} ({fact.os_build})", []).append(node.name)
    if len(builds) > 1:
        versions = "; ".join(f"{build} on {', '.join(names)}" for build, names in builds.items())
        obstacles.append(f"macOS builds differ ({versions}): update all nodes to the same build")
    return obstacles


def node_obstacles(fact: NodeFacts | None) -> list[str]:
    """Reasons why one node cannot use RDMA, apart from its cables."""
    if fact is None:
        return ["not probed"]
    if fact.problem is not None:
        return [f"facts not known: {fact.problem}"]
    if fact.system != "Darwin":
        return [f"{fact.os or fact.system or 'its system'} does not support RDMA over Thunderbolt"]
    faults = []
    version = tuple(map(int, re.findall(r"\d{1,4}", fact.os_version or "")))
    if not version:
        faults.append("its macOS version is not known")
    elif version < MIN_MACOS:
        faults.append(f"macOS {fact.os_version} is too old for RDMA: update to 26.2 or later")
    generation = hardware.THUNDERBOLT_GENERATIONS.get(fact.chip or "")
    if generation is not None and generation < 5:
        faults.append(f"{fact.chip} has Thunderbolt {generation}: RDMA needs 5")
    elif fact.rdma_enabled is False:
        faults.append(f"RDMA is disabled: {ENABLE_RDMA}")
    elif fact.rdma_enabled is None:
        why = fact.unknown.get("rdma_ctl") or "rdma_ctl is missing, or its output is not understood"
        faults.append(f"cannot tell whether RDMA is enabled: {why}")
    if fact.backends and "jaccl" not in fact.backends:
        faults.append(f"MLX {fact.mlx or '(unknown version)'} was built without jaccl")
    return faults


def _cables(
    a: str, b: str, facts: Mapping[str, NodeFacts], topology: Topology
) -> tuple[list[tuple[str, str]], list[str], bool]:
    """(devices of each usable cable, faults of the others, whether there is any cable)."""
    usable, faults, cabled = [], [], False
    for cable in topology.cables:
        if {cable.a, cable.b} != {a, b}:
            continue
        cabled = True
        ends = {cable.a: cable.a_device, cable.b: cable.b_device}
        port_faults = [f"{node}: {fault}" for node in (a, b) for fault in _port_faults(facts.get(node), ends[node])]
        faults += port_faults
        if not port_faults:
            usable.append((f"{_PREFIX}{ends[a]}", f"{_PREFIX}{ends[b]}"))
    return usable, faults, cabled


def _port_faults(fact: NodeFacts | None, device: str | None) -> list[str]:
    """Unknown facts are not faults: MLX reports at start what it cannot do."""
    if fact is None or device is None:
        return ["the interface of a Thunderbolt port is not known"]
    if hardware.PORT_WITHOUT_RDMA.get(fact.model or "") == device:
        return [f"{device} is the port next to Ethernet, which does not support RDMA: use another port"]
    name = f"{_PREFIX}{device}"
    rdma = next((entry for entry in fact.rdma_devices if entry.name == name), None)
    if rdma is None and fact.rdma_devices and "ibv_devices" not in fact.unknown:
        return [f"device {name} does not exist"]
    faults = []
    if rdma is not None and rdma.port_state not in (None, "PORT_ACTIVE"):
        faults.append(f"{name} is {rdma.port_state}: both ends need RDMA enabled and a Thunderbolt 5 cable")
    interface = next((entry for entry in fact.interfaces if entry.name == device), None)
    if interface is not None and not interface.ipv4 and "ifconfig" not in fact.unknown:
        member = f" (a member of {interface.bridge})" if interface.bridge else ""
        faults.append(f"{device} has no IPv4 address{member}: {_OWN_NETWORK}")
    elif rdma is not None and rdma.ipv4_gid is False:
        faults.append(f"{name} has no IPv4 address in its GID table: {_OWN_NETWORK}")
    return faults


@dataclass(frozen=True)
class _BackendChoice:
    backend: str
    reasons: tuple[str, ...]
    rdma_rows: Sequence[RdmaRow] | None = None
    warnings: tuple[str, ...] = ()


def plan_network(
    config: Config, facts: Sequence[NodeFacts], topology: Topology, strategy: Strategy | None = None
) -> NetworkPlan:
    """Choose the backend, and each rank's addresses and devices; rank k is the k-th node.

    "auto" uses RDMA if possible, else TCP with a warning for each obstacle to RDMA; strategy "local" TCP alone. Raises
    LaunchError that names every node that cannot use the backend which the configuration sets, or that has no known
    address. `strategy` replaces the job's."""
    by_node = {fact.node: fact for fact in facts if any(node.name == fact.node for node in config.nodes)}
    nodes, chosen = config.nodes, strategy or config.job.strategy
    local = chosen == "local"
    if local:
        choice = _for_local(config.cluster.backend)
    elif config.cluster.backend != "auto":
        choice = _configured_backend(config, by_node, topology, chosen)
    else:
        choice = _for_nvidia(config, by_node, chosen) or _choose_backend(nodes, by_node, topology)
    # A cable between two of more ranks is no way to rank 0 for the others.
    cabling = topology.model_copy(update={"cables": ()}) if local and len(nodes) > 2 else topology
    addresses = choose_addresses(nodes, by_node, cabling, backend=choice.backend)
    rows: Sequence[RdmaRow | None] = choice.rdma_rows or [None] * len(nodes)
    named = choice.backend in ("nccl", "gloo")
    return NetworkPlan(
        backend=choice.backend,
        framework=config.job.framework,
        infiniband=choice.backend == "nccl" and all(_infiniband_devices(nodes, by_node).values()),
        hosts=tuple(
            LaunchHost(
                ssh=SshTarget.parse(node.ssh).openssh,
                ips=ips,
                rdma=row,
                interface=_interface(by_node.get(node.name), ips) if named else None,
                gpu=gpu_of(config, rank, by_node.get(node.name)),
            )
            for rank, (node, ips, row) in enumerate(zip(nodes, addresses.ips, rows, strict=True))
        ),
        reasons=(*choice.reasons, *addresses.reasons),
        warnings=(*addresses.warnings, *choice.warnings),
    )


def _interface(fact: NodeFacts | None, ips: Sequence[str]) -> str | None:
    """The interface of a node that has the first of these addresses."""
    interfaces = fact.interfaces if fact is not None else ()
    return next((entry.name for entry in interfaces if any(ip.split("/")[0] == ips[0] for ip in entry.ipv4)), None)


def gpus_of_ranks(config: Config, fact: NodeFacts | None) -> list[str | None]:
    """A machine's GPUs for ranks, by their names in CUDA_VISIBLE_DEVICES; None: unknown; "": divided, to be left."""
    gpus, named = fact.gpus if fact is not None else (), config.job.env.get("CUDA_VISIBLE_DEVICES")
    if named is None or not gpus:
        return ["" if gpu.mig else gpu.uuid for gpu in gpus]
    return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]


def gpu_of(config: Config, rank: int, fact: NodeFacts | None) -> str | None:
    """For a rank of MLX on CUDA: those of a machine take its GPUs in order, and share them where there are fewer."""
    of_mlx = config.job.framework == "mlx" and fact is not None and fact.mlx_device == "CUDA"
    gpus = gpus_of_ranks(config, fact) if of_mlx else []
    before = sum(node.ssh == config.nodes[rank].ssh for node in config.nodes[:rank])
    return gpus[before % len(gpus)] if gpus else None


def ranks_of_host(config: Config, ssh: str) -> int:
    """The ranks of one machine: its nodes, or the processes that its torchrun starts."""
    return sum(node.processes for node in config.nodes if node.ssh == ssh)


def _for_nvidia(config: Config, facts: Mapping[str, NodeFacts], strategy: Strategy) -> _BackendChoice | None:
    """NCCL wants an NVIDIA GPU for each rank. None where not all of several nodes are known to have MLX on CUDA."""
    torch, names = config.job.framework == "torch", [node.name for node in config.nodes]
    on_cuda = {name for name, fact in facts.items() if fact.mlx_device == "CUDA" and "nccl" in fact.backends}
    if not torch and (len(names) == 1 or not on_cuda.issuperset(names)):
        return None
    without = _without_gpus(config, facts, names)
    if without or strategy == "pipeline":
        why = f"not known to have an NVIDIA GPU for each rank: {without}" if without else _NO_SEND
        return _BackendChoice(config.job.kind.framework.tcp_backend, (why,))
    return _BackendChoice("nccl", ("every rank has an NVIDIA GPU", _infiniband(config.nodes, facts)))


def _refuse_shared_gpus(config: Config, facts: Mapping[str, NodeFacts]) -> None:
    """NCCL refuses two ranks on one GPU: "Duplicate GPU detected" (NVIDIA/nccl, src/init.cc). A machine of which
    nvidia-smi lists no GPU, or a divided one (MIG), may have enough all the same. Raises LaunchError."""
    listed = [name for name, fact in facts.items() if fact.gpus and not any(gpu.mig for gpu in fact.gpus)]
    if without := _without_gpus(config, facts, listed):
        other = config.job.kind.framework.tcp_backend
        todo = f'plan fewer ranks on that machine, or set backend = "{other}" in [cluster]'
        raise LaunchError("nccl is not possible", why=f"it needs a GPU for each rank: {without}", todo=todo)


def _without_gpus(config: Config, facts: Mapping[str, NodeFacts], names: Sequence[str]) -> str:
    """Those nodes of `names` that are not known to have an NVIDIA GPU for each rank, with the reason."""
    without: dict[str, list[str]] = {}
    for node in config.nodes:
        fact, ranks = facts.get(node.name), ranks_of_host(config, node.ssh)
        if node.name in names and len(gpus_of_ranks(config, fact)) < ranks:
            without.setdefault(_too_few_gpus(config, fact, ranks), []).append(node.name)
    return "; ".join(f"{spans(lacking)} ({why})" for why, lacking in without.items())


def _too_few_gpus(config: Config, fact: NodeFacts | None, ranks: int) -> str:
    if fact is None or fact.problem is not None:
        return "not probed"
    if fact.gpus:
        by = "the job's CUDA_VISIBLE_DEVICES names" if "CUDA_VISIBLE_DEVICES" in config.job.env else "nvidia-smi lists"
        return f"{by} {plural(len(gpus_of_ranks(config, fact)), 'GPU')} for {plural(ranks, 'rank')}"
    return str(fact.unknown.get("nvidia_smi", "no nvidia-smi found, or it lists no GPU"))


def _for_local(backend: str) -> _BackendChoice:
    if backend not in ("auto", "ring"):
        why, todo = 'strategy "local" has TCP connections of its own', 'set backend = "ring" in [cluster]'
        raise LaunchError(f"{backend} is not possible", why=why, todo=todo)
    star = "strategy local averages over TCP connections of its own, from each rank to rank 0"
    return _BackendChoice("ring", (f"{star}: RDMA is of no use to it",))


_NO_SEND = "a pipeline sends activations from rank to rank, and MLX's NCCL backend has neither send nor recv"


def _configured_backend(
    config: Config, facts: Mapping[str, NodeFacts], topology: Topology, strategy: Strategy
) -> _BackendChoice:
    backend, nodes = config.cluster.backend, config.nodes
    reasons = (f"the configuration sets {backend}",)
    if backend == "nccl":
        others = [(name, fact.mlx_device) for name, fact in facts.items() if fact.mlx_device not in (None, "CUDA")]
        why = [f"MLX computes on {device} on {name}" for name, device in others] + [_NO_SEND] * (strategy == "pipeline")
        # The facts for a torch job may be those of an MLX job before it.
        if why and config.job.framework == "mlx":
            todo = 'set backend = "auto" or "ring" in [cluster]'
            raise LaunchError("nccl is not possible", why="; ".join(why), todo=todo)
        _refuse_shared_gpus(config, facts)
    if backend not in ("jaccl", "jaccl-ring"):
        return _BackendChoice(backend, reasons)
    rdma = rdma_over_cables(nodes, facts, topology, ring=backend == "jaccl-ring")
    if rdma.obstacles:
        todo = 'fix that, or set backend = "ring" in [cluster]'
        raise LaunchError(f"{backend} is not possible", why="; ".join(rdma.obstacles), todo=todo)
    return _BackendChoice(backend, reasons, rdma.rows)


def _choose_backend(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts], topology: Topology) -> _BackendChoice:
    if len({node.ssh for node in nodes}) == 1:
        return _BackendChoice("ring", ("all ranks run on one machine",))
    if not any((fact := facts.get(node.name)) and fact.system == "Darwin" for node in nodes):
        return _BackendChoice("ring", ("no node is known to be a Mac, and not all are known to have CUDA",))
    mesh = rdma_over_cables(nodes, facts, topology, ring=False)
    if not mesh.obstacles:
        return _BackendChoice("jaccl", (f"the {len(nodes)} Macs form a full mesh, all with RDMA on",), mesh.rows)
    ring = rdma_over_cables(nodes, facts, topology, ring=True)
    if not ring.obstacles:
        reason = f"the {len(nodes)} Macs form a ring in rank order, all with RDMA on"
        return _BackendChoice("jaccl-ring", (reason, *mesh.obstacles), ring.rows)
    warnings = dict.fromkeys(f"no RDMA: {obstacle}" for obstacle in (*mesh.obstacles, *ring.obstacles))
    if (order := _other_ring_order(nodes, topology)) is not None:
        names = ", ".join(order)
        warnings[f"the cables form a ring in the order {names}: put the [[node]] tables in that order"] = None
    return _BackendChoice("ring", ("TCP, because RDMA is not possible",), warnings=tuple(warnings))


def _other_ring_order(nodes: Sequence[NodeConfig], topology: Topology) -> Sequence[str] | None:
    """The order in which the cables form a ring of all nodes, unless it is the order of the nodes."""
    order = ring_order(topology)
    names = [node.name for node in nodes]
    if order is None or len(order) != len(names) or topology.shape != "ring":
        return None
    start = order.index(names[0])
    rotated = [*order[start:], *order[:start]]
    return None if names in (rotated, [rotated[0], *reversed(rotated[1:])]) else order


def _infiniband(nodes: Sequence[NodeConfig], facts: Mapping[str, NodeFacts]) -> str:
    active = _infiniband_devices(nodes, facts)
    if len({node.ssh for node in nodes}) == 1:
        return "between GPUs of one machine NCCL needs no network"
    if all(active.values()):
        return "InfiniBand: " + ", ".join(f"{name} {device}" for name, device in active.items())
    without = ", ".join(name for name, device in active.items() if not device)
    return f"TCP, not InfiniBand: no active device on {without}"
