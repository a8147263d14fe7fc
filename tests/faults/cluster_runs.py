"""Real runs on the test cluster: a supervisor on this machine, ranks on nodes with their own homes and pythons."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig, PreflightConfig, RecoveryConfig
from engine.demo import demo_config
from engine.node.processes import Process
from engine.protocol.attempt import NodeFiles
from engine.run import supervisor_process
from engine.run.events import NodeConditionChanged
from tests.cluster.cluster import Cluster
from tests.cluster.demo_job import DATA, MODEL, install_demo
from tests.cluster.node import Node
from tests.demo_copies import demo_below
from tests.faults.local_runs import PLANNED, SHORT_GRACES, Run, plan_config, ring


@dataclass
class ClusterRun(Run):
    """A run whose rank k is on `nodes[k]`."""

    nodes: list[Node] = field(default_factory=list)

    def node_of(self, rank: int, attempt: int = 1) -> Node:
        """The node that a rank was on in an attempt."""
        plans = {found.number: found.plan for found in self.history.attempts}
        names = dict(enumerate(plans[attempt].nodes)) if attempt in plans else {}
        return next((node for node in self.nodes if node.name == names.get(rank)), self.nodes[rank])

    def files_of(self, rank: int, attempt: int = 1) -> NodeFiles:
        node = self.node_of(rank, attempt)
        there = NodeFiles.for_attempt(Path(node.home) / ".flightdeck", self.plan.run_id, attempt)
        return NodeFiles(node.disk.seen_from_head(str(there.directory)))

    def left(self) -> list[Process]:
        """On this machine and on every node, looked at without ssh."""
        return [*super().left(), *(process for node in self.nodes for process in node.processes(self.nonce))]

    def left_on(self, node: Node) -> list[Process]:
        return node.processes(self.nonce)

    def finish(self) -> None:
        self.nodes[0].write(f"{self.workdir}/enough", "")

    def kill(self, rank: int, pid: int) -> None:
        """kill -9 on the node of `rank`; `pid` is the node's."""
        done = self.nodes[rank].run(["kill", "-9", str(pid)])
        assert done.returncode == 0, done.stderr

    def conditions(self, node: str) -> list[str]:
        """The recorded conditions of a node, oldest first."""
        return [event.condition for event in self.events_of(NodeConditionChanged) if event.node == node]

    def await_condition(self, node: str, condition: str, within_s: float = 60.0) -> float:
        """Awaits that it is recorded; the seconds that it took."""
        begun = time.monotonic()
        self.wait(lambda: self.conditions(node)[-1:] == [condition], within_s)
        return time.monotonic() - begun

    def steps(self, rank: int) -> int:
        """How many lines the head has of a rank."""
        log = self.dir.log(rank)
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def everybody_steps(self) -> None:
        """Awaits a step of the ring on every rank."""
        for rank in range(len(self.nodes)):
            self.await_output("step", rank)

    def await_more_output(self, rank: int) -> None:
        before = self.steps(rank)
        self.wait(lambda: self.steps(rank) > before)


def nodes_of(cluster: Cluster, workdir: str = "~", names: Sequence[str] = ()) -> tuple[NodeConfig, ...]:
    """One [[node]] for each node of the cluster, or for `names`."""
    chosen = [node for node in cluster.nodes if not names or node.name in names]
    return tuple(
        NodeConfig(name=node.name, ssh=node.ssh, ips=(node.ip,), python=node.python, workdir=workdir) for node in chosen
    )


def ring_config(
    cluster: Cluster,
    *,
    fault: str = "pass",
    script: str | None = None,
    recovery: RecoveryConfig = SHORT_GRACES,
    launcher: str = "mlx.launch",
    names: Sequence[str] = (),
    **job: Any,
) -> Config:
    """A ring over the nodes; each has an empty working directory of the run's own."""
    workdir = f"~/work/{uuid.uuid4().hex[:8]}"
    for node in cluster.nodes:
        node.write(f"{workdir}/.kept", "")
    return Config(
        cluster=ClusterConfig.model_validate({"launcher": launcher}),
        nodes=nodes_of(cluster, workdir, names),
        job=JobConfig(name="test", command=("python", "-c", script or ring(fault)), **job),
        preflight=PreflightConfig(all_sum_s=0.3),
        recovery=recovery,
    )


def demo_on(cluster: Cluster, home: Path, *, iters: int, recovery: RecoveryConfig = SHORT_GRACES) -> Config:
    """The demo's training on the nodes."""
    install_demo(cluster, demo_below(home))
    config = demo_config(home, ranks=4, iters=iters)
    keys = {"batch_size": 4, "max_seq_length": 64, "adapter_path": "~/adapters"}
    job = config.job.model_copy(update={"model": MODEL, "data": DATA, "mlx_lm": {**config.job.mlx_lm, **keys}})
    return config.model_copy(update={"nodes": nodes_of(cluster), "job": job, "recovery": recovery})


def plan_on(cluster: Cluster, home: Path, config: Config, *, skip: tuple[str, ...] | None = None) -> ClusterRun:
    """The run's directory with its plan; without preflight unless `skip` is given."""
    planned = plan_config(home, config, skip=skip)
    nodes = [cluster[node.name] for node in config.nodes]
    run = ClusterRun(planned.dir, planned.plan, Path(config.nodes[0].workdir), nodes=nodes)
    PLANNED[PLANNED.index(planned)] = run
    return run


def start_on(cluster: Cluster, home: Path, config: Config, *, skip: tuple[str, ...] | None = None) -> ClusterRun:
    """A run that has been started."""
    run = plan_on(cluster, home, config, skip=skip)
    supervisor_process.start_supervisor(run.dir)
    return run
