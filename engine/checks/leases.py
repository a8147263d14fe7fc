"""Leases on the processes and directories that a check creates on the hosts.

A lease is a process on the host that needs a heartbeat from here. When it is released, or no heartbeat has come for
LEASE_S, everything the check started on that host is ended and removed, so nothing outlives a head that dies or is
cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.checks.context import CheckContext, value_of
from engine.cluster.agent_client import THIS_MACHINE, AgentRequest
from engine.cluster.probe_results import LeaseHeld, LeaseReleased
from engine.cluster.staging import gather_all
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError

LEASE_S = 7.0
_HEARTBEAT_S = 1.0
_ACQUIRE_LIMIT_S = 20.0
_RELEASE_LIMIT_S = 4.0
"""An abort waits for it."""


@dataclass(frozen=True)
class _Lease:
    node: NodeConfig
    request: AgentRequest


class Leases:
    """The leases of one check, on every host and on this machine."""

    def __init__(self, context: CheckContext, nonce: str) -> None:
        self._context = context
        self._nonce = nonce
        self._held: list[_Lease] = []
        self._heartbeats: asyncio.Task[None] | None = None

    async def acquire(self, check_id: str, here: Path) -> None:
        """From now on, everything with the nonce, the folder `here`, and the one of `check_id` on each host live only
        as long as heartbeats are sent. Raises LaunchError, NodeUnreachable; what was acquired by then is to be
        released."""
        layouts = await self._context.layouts()
        folders = {layout.ranks[0]: [str(PurePosixPath(layout.root) / "runs" / check_id)] for layout in layouts}
        wanted = [(self._context.config.nodes[rank], folder) for rank, folder in folders.items()]
        # mlx.launch and its ssh run on this machine also where no rank does.
        local = next((folder for node, folder in wanted if node.local), None)
        if local is None:
            wanted.append((THIS_MACHINE, [str(here)]))
        else:
            local.append(str(here))
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="leases")
        await gather_all(self._acquire_on(node, folder) for node, folder in wanted)

    async def release(self) -> str:
        """End what is left everywhere; a message about what could not be ended, or ""."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        problems = await asyncio.gather(*(self._release(lease) for lease in self._held))
        self._held.clear()
        return "; ".join(filter(None, problems))

    async def _acquire_on(self, node: NodeConfig, folders: Sequence[str]) -> None:
        request = await self._context.agent(node).start_probe("lease", self._nonce, str(LEASE_S), *folders)
        self._held.append(_Lease(node, request))
        value_of(await request.next_result("lease", LeaseHeld, _ACQUIRE_LIMIT_S), node)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for lease in self._held:
                # What is lost is reported when the check ends.
                with contextlib.suppress(FlightDeckError):
                    lease.request.send(b"\n")

    async def _release(self, lease: _Lease) -> str:
        try:
            lease.request.send(b"end\n")
            released = value_of(await lease.request.next_result("lease", LeaseReleased, _RELEASE_LIMIT_S), lease.node)
        except FlightDeckError as error:
            return f"it is not known whether anything is left on {lease.node.name}; its lease ends it: {error}"
        finally:
            lease.request.close()
        return f"still running on {lease.node.name}: {released.left[0]}" if released.left else ""
