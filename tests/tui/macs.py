"""Facts of several Macs: cabled as a mesh, a ring or not enough, with RDMA, telemetry, and what can be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.models import (
    HostKeyChange,
    HostKeyOffer,
    Interface,
    NodeFacts,
    NodeTelemetry,
    RankUse,
    RdmaDevice,
    ThunderboltPort,
)
from tests.tui.fake_engine import ago

NAMES = ("ultra", "max", "mini", "air")
CHIPS = (("Apple M3 Ultra", 80, 512), ("Apple M4 Max", 40, 128), ("Apple M4 Pro", 20, 64), ("Apple M4 Pro", 16, 48))
OFFER = HostKeyOffer(
    target="cyd@mini.local",
    key="ssh-ed25519 AAAAC3NzaC1l",
    fingerprint="SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE",
)
CHANGE = HostKeyChange(
    target="cyd@mini.local:2222",
    accepted="SHA256:mVPwvezndPv/ARoIadVY98vAC0g+P/5633yTC4d/wXE",
    found="SHA256:7B1fGqjx1tkBrp6qOP5Kn0pQ3mB8nPjFb0oWcRrYk2s",
)


def configuration(count: int = 4, *, backend: str = "auto") -> Config:
    """That many Macs, each with a user of its own."""
    nodes = tuple(
        NodeConfig(
            name=name,
            ssh=f"{user}@{name}.local",
            ips=(),
            python="~/mlx/.venv/bin/python",
            workdir="~/flightdeck",
        )
        for name, user in zip(names(count), _users(count), strict=True)
    )
    job = JobConfig(
        name="support", model="~/models/Qwen3-4B", data="~/data/support",
        mlx_lm={"iters": 1000, "batch_size": 8, "learning_rate": 1e-5},
    )  # fmt: skip
    cluster = ClusterConfig.model_validate({"name": "studio", "backend": backend})
    return Config(cluster=cluster, nodes=nodes, job=job)


def names(count: int) -> list[str]:
    return [*NAMES[:count], *(f"node{number:02}" for number in range(len(NAMES), count))]


def _users(count: int) -> list[str]:
    users = ("ana", "bea", "cyd", "dov")
    return [users[number % len(users)] for number in range(count)]


def mesh(count: int = 4) -> list[tuple[int, int]]:
    return list(combinations(range(count), 2))


def ring(count: int = 4) -> list[tuple[int, int]]:
    return [*((number, number + 1) for number in range(count - 1)), (0, count - 1)]


def facts(
    count: int = 4, cables: Sequence[tuple[int, int]] | None = None, *, old_s: float = 4, stranger: bool = False
) -> list[NodeFacts]:
    """The facts of `count` Macs joined by `cables`, by default a mesh; RDMA on and active on each."""
    joined = mesh(count) if cables is None else list(cables)
    ports: list[list[ThunderboltPort]] = [[] for _ in range(count)]
    addresses: list[list[str]] = [[] for _ in range(count)]
    for cable, (a, b) in enumerate(joined):
        addresses[a].append(f"192.168.{cable}.1/30")
        addresses[b].append(f"192.168.{cable}.2/30")
        here, there = (f"{node}-{len(ports[node])}" for node in (a, b))
        for node, own, peer in ((a, here, there), (b, there, here)):
            number = len(ports[node])
            ports[node].append(
                ThunderboltPort(domain_uuid=own, receptacle=str(number + 1), device=f"en{number + 3}", peer_uuid=peer,
                                peer_name=names(count)[b if node == a else a], speed="Up to 80 Gb/s")
            )  # fmt: skip
    if stranger:
        ports[0].append(
            ThunderboltPort(domain_uuid="0-x", receptacle="6", device="en8", peer_uuid="?", peer_name="guest")
        )
    return [_facts(number, name, user, (ports[number], addresses[number]), old_s)
            for number, (name, user) in enumerate(zip(names(count), _users(count), strict=True))]  # fmt: skip


def _facts(
    number: int, name: str, user: str, linked: tuple[list[ThunderboltPort], list[str]], old_s: float
) -> NodeFacts:
    ports, addresses = linked
    chip, gpu_cores, memory = CHIPS[number % len(CHIPS)]
    cabled = [port for port in ports if port.peer_uuid is not None]
    lan = Interface(name="en0", ipv4=(f"10.0.0.{number + 11}/24",), active=True, port_name="Ethernet")
    links = [
        Interface(name=port.device or "", ipv4=(address,), active=True, port_name=f"Thunderbolt {port.receptacle}")
        for port, address in zip(ports, addresses, strict=False)
    ]
    return NodeFacts(
        node=name, host=f"{user}@{name}.local", probed_at=ago(old_s), hostname=f"{name}.local", user=user,
        home=f"/Users/{user}", os="macOS 26.4.1 (25E253)", system="Darwin", os_version="26.4.1", os_build="25E253",
        model="Mac15,14", chip=chip, cores=16, performance_cores=12, gpu="gpu", gpu_cores=gpu_cores,
        memory_total_bytes=memory * 2**30, memory_used_bytes=memory * 2**30 * 3 // 8, swap_used_bytes=0,
        gpu_limit_bytes=memory * 2**30 * 3 // 4, disk_free_bytes=812_000_000_000, disk_total_bytes=2_000_000_000_000,
        power_source="AC", low_power_mode=False, thermal="nominal", clock_skew_s=0.003 * number, python="3.13.9",
        mlx="0.32.4", mlx_lm="0.32.2", backends=("ring", "jaccl"), interfaces=(lan, *links), thunderbolt=tuple(ports),
        rdma_enabled=True, round_trip_s=0.0008 + number / 10_000,
        rdma_devices=tuple(RdmaDevice(name=f"rdma_{port.device}", port_state="PORT_ACTIVE", ipv4_gid=True)
                           for port in cabled),
    )  # fmt: skip


def failed(node: NodeFacts, problem: str, kind: str | None, **more: object) -> NodeFacts:
    """The node as a probe finds it that gets no answer."""
    gone = NodeFacts(node=node.node, host=node.host, probed_at=node.probed_at, problem=problem, problem_kind=kind)
    return gone.model_copy(update=more)


def unreachable(node: NodeFacts) -> NodeFacts:
    return failed(node, "no answer on port 22 within 10 s", "unreachable", fix="is it on, and on this network?")


def unknown_key(node: NodeFacts) -> NodeFacts:
    return failed(node, "the host key is not known", "key unknown", host_key=OFFER)


def changed_key(node: NodeFacts) -> NodeFacts:
    return failed(node, "the host key has changed", "key changed", changed_key=CHANGE)


def telemetry(count: int = 4, *, run: str = "20260314-140126-demo-3f9a", old_s: float = 1) -> list[NodeTelemetry]:
    """What the Macs use while a run is on."""
    return [
        NodeTelemetry(
            node=name, at=ago(old_s), cpu_use=0.12, gpu_use=0.97 - number * 0.02, gpu_mhz=1398,
            memory_used_bytes=CHIPS[number % 4][2] * 2**30 // 2, swap_used_bytes=0, power_w=142.0 - 20 * (number % 4),
            gpu_power_w=96.5, cpu_temperature_c=58.0, gpu_temperature_c=71.0 + number % 4, thermal="nominal",
            ranks=(RankUse(run_id=run, rank=number, rss_bytes=19_800_000_000),), source="macmon",
        )
        for number, name in enumerate(names(count))
    ]  # fmt: skip
