"""What a supervisor that is gone has left of an attempt: its launcher, whatever has come of the ranks, and, when all
else fails, its end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError
from engine.launch.place import Place
from engine.launch.staging import Ways
from engine.runs.layout import LAUNCHER_SOURCE, RunDir
from engine.supervision.attempt import Attempt
from engine.supervision.launcher_watch import LauncherWatch
from engine.supervision.links.links import Links
from engine.supervision.logbook import Logbook
from engine.supervision.rank_entries import of_attempt
from engine.worker import processes

_KILL_LIMIT_S = 10.0
_HEAR_LIMIT_S = 20.0
"""For the nodes of a run that is taken over to say whether anything of it is there."""
_LOOK_EVERY_S = 0.1


def old_launcher(run_dir: RunDir, logbook: Logbook, attempt: Attempt) -> LauncherWatch | None:
    """The attempt's mlx.launch; one whose start nobody had time to enter is found by its nonce, and entered."""
    own = of_attempt(logbook, attempt.number)
    entry = next((entry for entry in reversed(own) if entry["event"] == "launcher"), None)
    if entry is None:
        found = [each.pid for each in processes.with_nonce(attempt.nonce) if "mlx.launch" in each.command]
        leader = next((pid for pid in found if _leads_its_group(pid)), None)
        if leader is None:
            return None
        entry = {"pid": leader, "start": processes.start_time(leader) or ""}
        logbook.append("launcher", **entry)
    return LauncherWatch(
        int(entry["pid"]),
        str(entry["start"]),
        run_dir.attempt(attempt.number) / "launcher.in",
        run_dir.log(LAUNCHER_SOURCE),
        attempt.log_bases[LAUNCHER_SOURCE],
    )


async def anybody_came(links: Links) -> bool:
    """Whether anything of the attempt is there: a rank, or its end, or one that is about to start. A node that does not
    tell may have it. Where nobody came, nobody comes later: a shell that a node was still starting is not to be seen,
    so that nothing is there counts once nothing can start there any more."""
    return await _anything(links, fence=False) or await _anything(links, fence=True)


async def _anything(links: Links, *, fence: bool) -> bool:
    deadline = time.monotonic() + _HEAR_LIMIT_S
    for link in links:
        await asyncio.to_thread(link.ask_left, kill=fence)
    while time.monotonic() < deadline:
        seen = [link.sight(rank, thorough=True) for link in links for rank in link.ranks]
        left = [link.left() for link in links]
        if any(left) or any(each.record is not None for each in seen):
            return True
        if all(each is not None for each in left):
            return False
        await asyncio.sleep(_LOOK_EVERY_S)
    return True


async def kill_everywhere(
    fleet: Ways, nodes: Sequence[NodeConfig], places: Sequence[Place], nonce: str
) -> tuple[str, ...]:
    """The last thing that can be done for an attempt that we cannot watch: KILL to all of it. The names of the nodes
    that have not done so; there the leases end it."""

    async def kill(place: Place) -> tuple[str, ...]:
        node = nodes[place.ranks[0]]
        argv = [place.python, f"{place.bundle}/worker/processes.py", "--kill", nonce]
        try:
            done = (await fleet.to(node).run(argv, timeout_s=_KILL_LIMIT_S)).code == 0
        except (FlightDeckError, OSError):
            done = False
        return () if done else tuple(nodes[rank].name for rank in place.ranks)

    async def kill_here() -> tuple[str, ...]:
        try:
            await asyncio.to_thread(processes.kill_with_nonce, nonce)
        except (OSError, subprocess.SubprocessError):
            return tuple(node.name for node in nodes if node.local)
        return ()

    remote = [place for place in places if not nodes[place.ranks[0]].local]
    missed = await asyncio.gather(kill_here(), *map(kill, remote))
    return tuple(name for names in missed for name in names)


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
