"""Adoption of an attempt whose supervisor is gone: find its launcher, whether any rank has started, and, as a last
resort, kill everything.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence

from engine.cluster.agent_client import TransportProvider
from engine.cluster.staging import HostLayout
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.launch.mlx_launch import LauncherWatch
from engine.node import processes
from engine.run.events import LauncherStarted
from engine.run.history import AttemptHistory
from engine.run.ranks import HostConnections
from engine.run.recorder import RunRecorder
from engine.store.layout import LAUNCHER_SOURCE, RunDir

_KILL_LIMIT_S = 10.0
_ANSWER_LIMIT_S = 20.0
"""For the nodes of an adopted run to answer whether anything of it is there."""
_POLL_S = 0.1


def find_launcher(run_dir: RunDir, recorder: RunRecorder, attempt: AttemptHistory) -> LauncherWatch | None:
    """The attempt's mlx.launch; one that was never recorded is found by its nonce, and recorded."""
    launcher = attempt.launcher
    if launcher is None:
        found = [each.pid for each in processes.with_nonce(attempt.plan.nonce) if "mlx.launch" in each.command]
        leader = next((pid for pid in found if _leads_its_group(pid)), None)
        if leader is None:
            return None
        launcher = LauncherStarted(pid=leader, start=processes.start_time(leader) or "")
        recorder.append(launcher)
    return LauncherWatch(
        launcher.pid,
        launcher.start,
        run_dir.attempt(attempt.number) / "launcher.in",
        run_dir.log(LAUNCHER_SOURCE),
        attempt.plan.log_bases[LAUNCHER_SOURCE],
    )


async def any_rank_started(connections: HostConnections) -> bool:
    """A rank of the attempt, or its end, or one that is about to start is there; a node that does not answer may have
    one. A shell that a node was still starting is not seen at first, so that "nothing" counts only once the node is
    fenced and nothing can start there any more."""
    return await _anything_left(connections, fence=False) or await _anything_left(connections, fence=True)


async def _anything_left(connections: HostConnections, *, fence: bool) -> bool:
    deadline = time.monotonic() + _ANSWER_LIMIT_S
    for connection in connections:
        await asyncio.to_thread(connection.request_processes, kill=fence)
    while time.monotonic() < deadline:
        seen = [connection.observe(rank) for connection in connections for rank in connection.ranks]
        left = [connection.processes() for connection in connections]
        if any(left) or any(each.record is not None for each in seen):
            return True
        if all(each is not None for each in left):
            return False
        await asyncio.sleep(_POLL_S)
    return True


async def kill_everywhere(
    fleet: TransportProvider, nodes: Sequence[NodeConfig], layouts: Sequence[HostLayout], nonce: str
) -> tuple[str, ...]:
    """KILL everything that carries `nonce`: the last resort for an attempt that cannot be monitored. The names of the
    nodes that have not done so; there the leases end it."""

    async def kill(layout: HostLayout) -> tuple[str, ...]:
        node = nodes[layout.ranks[0]]
        argv = [layout.python, f"{layout.bundle}/engine/node/processes.py", "--kill", nonce]
        try:
            done = (await fleet.to(node).run(argv, timeout_s=_KILL_LIMIT_S)).code == 0
        except (FlightDeckError, OSError):
            done = False
        return () if done else tuple(nodes[rank].name for rank in layout.ranks)

    async def kill_here() -> tuple[str, ...]:
        try:
            await asyncio.to_thread(processes.kill_with_nonce, nonce)
        except (OSError, subprocess.SubprocessError):
            return tuple(node.name for node in nodes if node.local)
        return ()

    remote = [layout for layout in layouts if not nodes[layout.ranks[0]].local]
    missed = await asyncio.gather(kill_here(), *map(kill, remote))
    return tuple(name for names in missed for name in names)


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
