"""The hosts of an attempt, each with its connection, and what a supervisor that adopts the attempt finds there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time

from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.host_connection import AttemptOnHost, HostConnection
from engine.cluster.staging import HostLayout, hosts_of
from engine.config.models import NodeConfig
from engine.launch.mlx_launch import Launcher
from engine.models import Reason, RunState
from engine.node import processes
from engine.node.bootstrap import ROOT
from engine.protocol.attempt import NodeFiles, read_regular
from engine.run.events import Attempt, Verdict
from engine.run.history import AttemptHistory
from engine.run.run_context import HostConnections, RunContext
from engine.run.run_plan import RunPlan
from engine.security.identifiers import SshTarget
from engine.store.layout import LAUNCHER_SOURCE, RunDir


def host_connections(run: RunContext, plan: RunPlan, attempt: Attempt) -> HostConnections:
    """The connections of an attempt, not started yet; always one to this machine. `plan` is that of its nodes."""
    planned = [attempted for attempted in run.history.attempts if attempted.number == attempt.number]
    identities = {rank: event.identity for attempted in planned[-1:] for rank, event in attempted.started.items()}
    connections: list[HostConnection] = []
    for layout in attempt.layouts:
        node = plan.config.nodes[layout.ranks[0]]
        # On this machine with the python that runs us: a rank's broken one must not leave its processes unproved.
        node = THIS_MACHINE if node.local else node
        nodes = {rank: plan.nodes[rank] for rank in layout.ranks}
        part = AttemptOnHost(attempt.files_at(layout, plan.run_id), attempt.nonce, nodes, identities)
        connections.append(HostConnection(node, run.fleet.to(node), part))
    if not any(connection.local for connection in connections):
        part = AttemptOnHost(NodeFiles.for_attempt(run.node_root, plan.run_id, attempt.number), attempt.nonce)
        connections.append(HostConnection(THIS_MACHINE, run.fleet.to(THIS_MACHINE), part))
    for connection in connections:
        connection.clock = run.clock
    return HostConnections(connections)


_ANSWER_LIMIT_S = 20.0
_POLL_S = 0.1


async def any_rank_started(connections: HostConnections) -> bool:
    """A rank of the attempt, or its end, or one that is about to start is there; a node that does not answer may have
    one. A shell that a node was still starting is not seen at first, so that "nothing" counts only once the node is
    fenced and nothing can start there any more."""
    for fence in (False, True):
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        for connection in connections:
            await asyncio.to_thread(connection.request_processes, kill=fence)
        left: list[object] = [None]
        while None in left:
            seen = [connection.observe(rank) for connection in connections for rank in connection.ranks]
            left = [connection.processes() for connection in connections]
            if any(left) or any(rank.record is not None for rank in seen) or time.monotonic() > deadline:
                return True
            await asyncio.sleep(_POLL_S)
    return False


def find_launcher(run_dir: RunDir, attempt: AttemptHistory) -> Launcher | None:
    """The mlx.launch of an earlier supervisor's attempt; one that was never recorded is found by its nonce. None where
    its start is not known, or the processes are not: the proof of the end covers it, too. Blocking."""
    pid, start = -1, ""
    if attempt.launcher is not None:
        pid, start = attempt.launcher.pid, attempt.launcher.start
    else:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            alive = processes.with_nonce(attempt.plan.nonce)
            pids = (process.pid for process in alive if "mlx.launch" in process.command)
            pid = next((pid for pid in pids if os.getpgid(pid) == pid), -1)
            start = processes.start_time(pid) or ""
    if not start:
        return None
    stdin, log = run_dir.attempt(attempt.number) / "launcher.in", run_dir.log(LAUNCHER_SOURCE)
    return Launcher(pid, start, stdin, log, attempt.plan.log_bases[LAUNCHER_SOURCE])


class UnknownAttempt:
    """An attempt of which only the number is known, and all that carries the run's nonce."""

    def __init__(self, run: RunContext) -> None:
        """Its connections are not started yet."""
        number = run.run_dir.newest_attempt()
        plan, world_size = _plan_of_unknown(run, number)
        nodes, self._kind = plan.config.nodes, plan.config.job.kind
        layouts = [
            HostLayout(ssh, ranks, "~", str(run.node_root) if nodes[ranks[0]].local else f"~/{ROOT}", "", "")
            for ssh, ranks in hosts_of(nodes).items()
        ]
        attempt = Attempt.model_construct(number=number, nonce=run.history.nonce, layouts=layouts)
        self.connections = host_connections(run, plan, attempt)
        self._unknown = run.history.unknown_attempt(number)
        self._needed = self._kind.success_ranks(world_size)

    def verdict(self) -> Verdict | None:
        """Success, where its ranks have left records of it."""
        for rank in self._needed:
            host = self.connections.to(rank)
            if not self._kind.succeeded(host.observe(rank).record, host.exit_output(rank).end):
                return None
        whose = "rank 0" if self._kind.outlives_ranks else "every rank"
        cause = f"{self._unknown}; the exit record of {whose} shows that it completed"
        return Verdict(RunState.SUCCEEDED, Reason.COMPLETED, cause)


def _plan_of_unknown(run: RunContext, number: int) -> tuple[RunPlan, int]:
    """The run's plan with the nodes of the attempt before all others, in the order of its ranks, as its hostfile has
    their hosts; and how many they are."""
    plan, members = run.whole_plan, list[NodeConfig]()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        hosts = json.loads(read_regular(run.run_dir.attempt(number) / "hostfile.json"))["hosts"]
        # A plan for fewer nodes keeps their order.
        for node in plan.config.nodes:
            members += [node] if hosts[len(members)]["ssh"] == SshTarget.parse(node.ssh).openssh else []
    nodes = tuple(sorted(plan.config.nodes, key=lambda node: node not in members))
    config = plan.config.model_copy(update={"nodes": nodes})
    return plan.model_copy(update={"config": config}), len(members) or len(nodes)
