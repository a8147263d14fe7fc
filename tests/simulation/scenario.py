"""One history to simulate: the run, its nodes, and the faults that come over it. Drawn from a seed; compact JSON."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from engine.config.models import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    JobConfig,
    NodeConfig,
    RecoveryConfig,
)
from engine.plan.decisions import LaunchDecisions
from engine.plan.document import Disabled
from engine.plan.network import LaunchHost, NetworkPlan
from engine.run.run_plan import RunPlan
from engine.security.identifiers import SshTarget

START: Final = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
"""The head's wall clock at virtual time 0."""

RUN_KINDS: Final = ("data", "direct", "sharded", "shared", "local", "elastic", "command", "torch")
"""data: in step, by mlx.launch; direct: the same without it; sharded: each node keeps its part of the state; shared: in
a folder that all nodes reach; local: strategy local; elastic: torchrun; command: the user's own program; torch: our
PyTorch trainer."""


@dataclass(frozen=True)
class Fault:
    kind: str
    at: float
    """Virtual seconds since the launch; for a kill of the head between two effects, the number of the effect."""
    node: int = 0
    length: float = 0.0
    """Seconds until it is over; 0: for good."""


@dataclass(frozen=True)
class Scenario:
    seed: int = 0
    """Of delays and jitter."""
    kind: str = "data"
    nodes: int = 2
    local: bool = True
    """The first node is this machine."""
    iterations: int = 20
    period_s: float = 0.5
    """Of one iteration."""
    every: int = 5
    """Iterations between two checkpoints; 0: none."""
    min_nodes: int = 0
    """0: all."""
    recovery: int = 0
    """Row of RECOVERIES."""
    budget_s: float = 0.0
    """0: none."""
    unattended: bool = False
    faults: tuple[Fault, ...] = ()

    def to_json(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if value != getattr(_PLAIN, name)}
        if self.faults:
            fields["faults"] = [[fault.kind, fault.at, fault.node, fault.length] for fault in self.faults]
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        fields: dict[str, Any] = json.loads(text)
        faults = tuple(Fault(*row) for row in fields.pop("faults", ()))
        return cls(**fields, faults=faults)

    @property
    def names(self) -> tuple[str, ...]:
        return node_names(self.nodes)

    @property
    def plan(self) -> RunPlan:
        plan = run_plan(
            self.kind, self.nodes, self.local, self.iterations, self.every, self.min_nodes or None, self.recovery
        )
        more = {"budget_s": self.budget_s or None, "unattended": self.unattended}
        return plan.model_copy(update=more) if any(more.values()) else plan


_PLAIN: Final = Scenario()

RECOVERIES: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"lease_s": 20.0, "node_wait_s": 120.0, "stall_s": 90.0, "hang_s": 15.0, "save_grace_s": 8.0},
    {"lease_s": 20.0, "node_wait_s": 300.0, "stall_s": 120.0, "hang_s": 20.0, "max_restarts": 1, "save_grace_s": 10.0},
    {"lease_s": 30.0, "node_wait_s": 100.0, "stall_s": 120.0, "hang_s": 20.0, "max_restarts": 5, "backoff_s": 4.0},
    {"lease_s": 20.0, "on_lease_expiry": "continue", "node_wait_s": 200.0, "stall_s": 90.0, "hang_s": 15.0},
    {"lease_s": 15.0, "node_wait_s": 90.0, "stall_s": 60.0, "hang_s": 10.0, "stop_grace_s": 0.5, "term_grace_s": 3.0},
    {"lease_s": 20.0, "max_restarts": 0, "stall_s": 90.0, "hang_s": 15.0},
    {"lease_s": 20.0, "node_wait_s": 120.0, "stall_s": 90.0, "hang_s": 15.0, "restart_commands": True},
)

NODE_FAULTS: Final = (
    *("rank_killed", "rank_killed", "rank_exits", "rank_exits_0", "rank_stopped", "keeper_killed", "keeper_stopped"),
    *("agent_killed", "agent_stopped", "node_sleeps", "power", "power", "cut", "cut", "cut_to", "cut_from", "isolated"),
    *(
        "reset",
        "slow",
        "disk_full",
        "disk_stalled",
        "clock",
        "diverged",
        "out_of_memory",
        "start_fails",
        "unfit",
        "rank_deaf",
        "rank_lingers",
        *("all_ranks_killed", "outage"),
    ),
)
HEAD_FAULTS: Final = (
    *("head_killed", "head_killed", "head_killed_at_effect", "head_killed_at_effect", "head_killed_at_effect"),
    *("head_stopped", "head_sleeps", "head_power", "head_disk_full", "head_disk_stalled", "head_clock"),
    *("launcher_killed", "second_head", "abort", "abort", "abort_now", "resume"),
)
_NODES: Final = (*(2,) * 14, *(3,) * 12, *(4,) * 10, *(5,) * 4, *(6,) * 4, 7, 8, 8, 10, 12, 16)
_LENGTHS: Final = (0.4, 2.0, 7.0, 12.0, 18.0, 30.0, 45.0, 70.0, 110.0, 180.0, 400.0)


def node_names(count: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(count))


@functools.cache
def _nodes(count: int, local: bool) -> tuple[NodeConfig, ...]:
    return tuple(
        NodeConfig(
            name=name,
            ssh="127.0.0.1" if local and number == 0 else f"{name}.test",
            python="/usr/bin/python3",
            workdir="/work",
            ips=(f"10.0.0.{number + 1}",),
        )
        for number, name in enumerate(node_names(count))
    )


@functools.cache
def run_plan(  # noqa: PLR0913, PLR0917
    kind: str,
    nodes: int,
    local: bool,
    iterations: int,
    every: int,
    min_nodes: int | None,
    recovery: int,
) -> RunPlan:
    job: dict[str, Any] = {"name": "job", "model": "/m", "data": "/d", "mlx_lm": {"iters": iterations, "batch_size": 4}}
    if kind in ("sharded", "shared"):
        job["strategy"] = "sharded"
    elif kind == "local":
        job["strategy"] = "local"
    elif kind == "torch":
        job |= {"framework": "torch", "strategy": "ddp"}
    elif kind == "command":
        job = {"name": "job", "command": ("python", "train.py")}
    elif kind == "elastic":
        job = {"name": "job", "framework": "torch", "elastic": True, "command": ("torchrun", "train.py")}
    config = Config(
        cluster=ClusterConfig(launcher="direct" if kind == "direct" else "mlx.launch"),
        nodes=_nodes(nodes, local),
        job=JobConfig(**job),
        checkpoint=CheckpointConfig(
            every=every or None, enabled=every > 0, destination="/mnt/nas" if kind == "shared" else None
        ),
        recovery=RecoveryConfig(**RECOVERIES[recovery], min_nodes=min_nodes),
    )
    return RunPlan(run_id="20260102-030405-job-0000", nonce="nonce", created_at=START, config=config)


@functools.cache
def launch_decisions(kind: str, nodes: tuple[NodeConfig, ...]) -> LaunchDecisions:
    torch = kind in ("torch", "elastic")
    hosts = tuple(LaunchHost(ssh=SshTarget.parse(node.ssh).openssh, ips=node.ips, rdma=None) for node in nodes)
    network = NetworkPlan(backend="gloo" if torch else "ring", framework="torch" if torch else "mlx", hosts=hosts)
    names = tuple(node.name for node in nodes)
    settings = Disabled(enabled=False, reason="nothing is left open")
    return LaunchDecisions.model_construct(
        nodes=names, division=None, settings=settings, layer_split=None, validators=names, network=network
    )


def draw(seed: int, number: int) -> Scenario:
    """The `number`-th history of this seed."""
    rng = random.Random(seed * 1_000_003 + number)
    kind = rng.choice(RUN_KINDS)
    nodes = rng.choice(_NODES)
    period = rng.choice((0.2, 0.5, 0.5, 1.0, 3.0))
    iterations = rng.choice((8, 15, 24, 40))
    length_s = 8.0 + iterations * period
    count = rng.choice((0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 6))
    recovery = rng.randrange(len(RECOVERIES))
    # Where the lease lets ranks go on, a run waits without end for a node that is away for good.
    forever = RECOVERIES[recovery].get("on_lease_expiry") != "continue"
    faults = tuple(_fault(rng, nodes, length_s, forever=forever) for _ in range(count))
    if rng.random() < 0.12:
        faults += _second_failure(rng, nodes, length_s)
    drawn = Scenario(
        seed=rng.randrange(1 << 30),
        kind=kind,
        nodes=nodes,
        local=rng.random() < 0.5,
        iterations=iterations,
        period_s=period,
        every=rng.choice((0, 3, 5, 10)),
        min_nodes=rng.choice((0, 0, 1, 2, nodes - 1)),
        recovery=recovery,
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
    )
    # Last, so that all else is drawn as without it.
    budget_s = round(rng.uniform(2.0, 2.0 * length_s), 2) if rng.random() < _BUDGETS else 0.0
    return replace(drawn, budget_s=budget_s, unattended=rng.random() < _UNATTENDED)


_BUDGETS: Final = 0.15
"""Share of the histories with a run that is launched for a time."""
_UNATTENDED: Final = 0.25
"""Share of the histories with a run of the queue."""


def _second_failure(rng: random.Random, nodes: int, length_s: float) -> tuple[Fault, ...]:
    """One rank fails, and later, when the run has recovered, all at once."""
    first = round(rng.uniform(5.0, length_s), 2)
    second = round(first + rng.uniform(4.0, 25.0), 2)
    kind = rng.choice(("all_ranks_killed", "outage", "abort_now"))
    faults: tuple[Fault, ...] = (
        Fault(rng.choice(("rank_killed", "rank_exits", "power")), first, rng.randrange(nodes), 7.0),
    )
    faults += (Fault(kind, second, 0, 12.0),)
    return (*faults, Fault("resume", second + 60.0)) if kind == "abort_now" else faults


def _fault(rng: random.Random, nodes: int, length_s: float, *, forever: bool) -> Fault:
    kind = rng.choice(NODE_FAULTS) if rng.random() < 0.6 else rng.choice(HEAD_FAULTS)
    # Most while it trains, some in the launch, some in the recovery from others or after the end.
    at = round(rng.choice((rng.uniform(0.0, 6.0), rng.uniform(4.0, length_s), rng.uniform(4.0, 2.5 * length_s))), 2)
    if kind == "head_killed_at_effect":
        at = rng.randrange(60)
    if kind == "unfit" and rng.random() < 0.7:
        # Before the first preflight.
        at = 0.0
    if kind in ("resume", "second_head"):
        at = round(rng.uniform(1.0, 400.0), 2)
    length = 0.0 if rng.random() < 0.15 else rng.choice(_LENGTHS)
    if not forever or kind in HEAD_FAULTS or kind in ("disk_stalled", "slow", "keeper_stopped", "agent_stopped"):
        # These end: without a head nothing is decided.
        length = length or 30.0
    return Fault(kind, at, rng.randrange(nodes), length)


def without_fault(scenario: Scenario, place: int) -> Scenario:
    faults = scenario.faults
    return replace(scenario, faults=faults[:place] + faults[place + 1 :])
