"""Attempts on the test cluster without a supervisor: layouts, files, ranks, and what they printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.cluster.staging import prepare
from engine.cluster.transport.fleet import Fleet
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from engine.launch.hostfile import fresh_ports
from engine.launch.mlx_launch import Launcher
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import ExitRecord
from engine.run.attempt import AttemptOrigin, launch, new_attempt
from engine.run.events import Attempt
from engine.run.history import RunHistory
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir
from tests.cluster.cluster import Cluster
from tests.machine import NONCE
from tests.unit.launch.host_layouts import configured_network
from tests.unit.run.run_maker import made_decisions

LIMIT_S = 60.0
LAUNCHERS: list[Launcher] = []
"""Those of the test that is going on, for its fixture to clear away."""


def on(cluster: Cluster, *names: str) -> tuple[NodeConfig, ...]:
    """A [[node]] for each name: one of the cluster's, or "head", with its own python, home and address."""
    nodes = []
    for rank, name in enumerate(names):
        if name == "head":
            nodes.append(NodeConfig(name=f"head{rank}", ips=(cluster.head,), python=sys.executable, workdir="/"))
        else:
            node = cluster[name]
            nodes.append(NodeConfig(name=f"{name}{rank}", ssh=name, ips=(node.ip,), python=node.python, workdir="~"))
    return tuple(nodes)


def plan_of(
    nodes: Sequence[NodeConfig], command: Sequence[str], *, launcher: str, starting_port: int | None = None, **job: Any
) -> RunPlan:
    config = Config(
        cluster=ClusterConfig.model_validate({"launcher": launcher, "starting_port": starting_port}),
        nodes=tuple(nodes),
        job=JobConfig(name="test", command=tuple(command), **job),
    )
    now = datetime.now(UTC)
    return RunPlan(nonce="n", config=config, run_id=f"{launcher.replace('.', '-')}-{now:%H%M%S%f}", created_at=now)


class StartedAttempt:
    """One attempt, launched."""

    def __init__(self, run_dir: RunDir, plan: RunPlan, attempt: Attempt, launched: AttemptOrigin, fleet: Fleet) -> None:
        self.run_dir, self.plan, self.attempt, self.launched, self.fleet = run_dir, plan, attempt, launched, fleet

    async def read(self, rank: int, name: str) -> bytes:
        """A file of the attempt on the node of `rank`."""
        files = self.attempt.files(self.plan.run_id, rank)
        # The rank's own python may be missing.
        node = self.plan.config.nodes[self.attempt.layout(rank).ranks[0]]
        return await self.fleet.agent(node).read_end(files.directory / name, 1 << 20)

    async def record(self, rank: int) -> ExitRecord:
        """Awaits the rank's end."""
        name = self.attempt.files(self.plan.run_id, rank).exit(rank).name
        deadline = time.monotonic() + LIMIT_S
        while not (record := await self.read(rank, name)):
            assert time.monotonic() < deadline, (
                self.run_dir.log(0xFFFF).read_text() if self.launched.launcher else self.launched.start_failures,
                await self.read(rank, f"rank{rank}.keeper.log"),
                await self.read(rank, f"rank{rank}.log"),
            )
            await asyncio.sleep(0.05)
        return ExitRecord(**json.loads(record))

    async def launcher_left(self) -> None:
        """Awaits the end of mlx.launch, if there is one."""
        if (launcher := self.launched.launcher) is not None:
            assert launcher.process is not None
            launcher.drop_pipes()
            await asyncio.to_thread(launcher.process.wait, LIMIT_S)

    async def output(self, rank: int) -> str:
        """What the rank's program has printed, once it has ended with 0."""
        record = await self.record(rank)
        log = (await self.read(rank, f"rank{rank}.log")).decode()
        assert (record.code, record.error) == (0, None), (record, log)
        return log


async def start_attempt(home: Path, plan: RunPlan, fleet: Fleet, network: NetworkPlan | None = None) -> StartedAttempt:
    """Launch `plan` with the run's directory below `home`."""
    run_dir = RunDir(home / "runs" / plan.run_id)
    run_dir.path.mkdir(parents=True)
    nodes = plan.config.nodes
    network = network or configured_network(nodes)
    layouts = await prepare(fleet, nodes)
    port = await fresh_ports(fleet, nodes, network, plan.config.cluster.starting_port)
    history = RunHistory(plan.record(), NONCE, plan.created_at)
    attempt = new_attempt(run_dir, plan, history, layouts=layouts, starting_port=port)
    launched = await launch(run_dir, plan, attempt, made_decisions(plan, network=network), fleet)
    if launched.launcher is not None:
        LAUNCHERS.append(launched.launcher)
    return StartedAttempt(run_dir, plan, attempt, launched, fleet)


def write_config(cluster: Cluster, file: Path, *names: str) -> Path:
    """A configuration of these nodes with a job of no account; `file` again."""
    tables = [f'[[node]]\nname = "{name}"\nssh = "{name}"\npython = "{cluster[name].python}"\n' for name in names]
    file.write_text("\n".join([*tables, '[job]\nname = "mine"\ncommand = ["true"]\n']))
    return file


@contextlib.contextmanager
def unknown(cluster: Cluster, name: str) -> Iterator[str]:
    """The node of this name, whose key nobody has accepted meanwhile."""
    known, ip = cluster.known_hosts.read_text(), cluster[name].ip
    cluster.known_hosts.write_text("".join(line for line in known.splitlines(True) if ip not in line))
    try:
        yield name
    finally:
        cluster.known_hosts.write_text(known)
