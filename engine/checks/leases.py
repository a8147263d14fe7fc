"""Leases on the processes and directories that a check creates on the hosts.

A lease is a process on the host that needs a heartbeat from here. When it is released, or no heartbeat has come for
LEASE_S, everything the check started on that host is ended and removed, so nothing outlives a head that dies or is
cut off."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePath, PurePosixPath

from engine.checks.context import CheckContext
from engine.cluster.agent_client import THIS_MACHINE, AgentRequest, value_of
from engine.cluster.probe_results import LeaseHeld, LeaseReleased
from engine.cluster.staging import HostLayout, gather_all
from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.node.bootstrap import make_private, node_root
from engine.protocol.attempt import CHECK_PREFIX

LEASE_S = 7.0
_HEARTBEAT_S = 1.0
_ACQUIRE_LIMIT_S = 20.0
_RELEASE_LIMIT_S = 4.0
"""An abort waits for it."""


@contextlib.asynccontextmanager
async def leased(context: CheckContext) -> AsyncIterator[Leases]:
    """The leases of one check, not acquired yet. Leaving the context ends what the check has started everywhere."""
    make_private(node_root())
    with tempfile.TemporaryDirectory(prefix=CHECK_PREFIX, dir=node_root(), ignore_cleanup_errors=True) as here:
        leases = Leases(context, Path(here))
        try:
            yield leases
        finally:
            await asyncio.shield(leases.release())


class Leases:
    """The leases of one check, on every host and on this machine."""

    def __init__(self, context: CheckContext, here: Path) -> None:
        self.here = here
        """A folder on this machine."""
        self.nonce = secrets.token_hex(16)
        self.check_id = f"{CHECK_PREFIX}{self.nonce[:12]}"
        """Names the check's folders on the hosts, like an attempt's; the prefix is what a lease removes."""
        self.leftovers = ""
        """After the release: processes that could not be ended, as a message; "" for none."""
        self._context = context
        self._held: list[tuple[NodeConfig, AgentRequest]] = []
        self._heartbeats: asyncio.Task[None] | None = None

    async def acquire(self) -> None:
        """From now on, everything with the nonce, the folder `here`, and the one of `check_id` on each host live only
        as long as heartbeats are sent. Raises LaunchError, NodeUnreachable."""
        layouts = await self._context.layouts()
        wanted = [(self._context.config.nodes[layout.ranks[0]], [str(self.folder(layout))]) for layout in layouts]
        # mlx.launch and its ssh run on this machine also where no rank does.
        local = next((folder for node, folder in wanted if node.local), None)
        if local is None:
            wanted.append((THIS_MACHINE, [str(self.here)]))
        else:
            local.append(str(self.here))
        self._heartbeats = asyncio.create_task(self._send_heartbeats(), name="leases")
        await gather_all(self._acquire_on(node, folder) for node, folder in wanted)

    def folder(self, layout: HostLayout) -> PurePosixPath:
        return PurePosixPath(layout.root) / "runs" / self.check_id

    async def write(self, layout: HostLayout, folder: PurePath, files: Mapping[str, str]) -> None:
        """Put a folder with these files (name → text) in place on a host. Raises LaunchError, NodeUnreachable."""
        node = self._context.config.nodes[layout.ranks[0]]
        try:
            await self._context.agent(node).write(folder, files)
        except OSError as error:
            raise LaunchError(
                "the check's files could not be written", where=f"{node.name}:{folder}", why=error
            ) from error

    async def release(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            await asyncio.gather(self._heartbeats, return_exceptions=True)
        problems = await asyncio.gather(*(self._release(node, request) for node, request in self._held))
        self._held.clear()
        self.leftovers = "; ".join(filter(None, problems))

    async def _acquire_on(self, node: NodeConfig, folders: Sequence[str]) -> None:
        request = await self._context.agent(node).start_probe("lease", self.nonce, str(LEASE_S), *folders)
        self._held.append((node, request))
        value_of(await request.next_result("lease", LeaseHeld, _ACQUIRE_LIMIT_S), node)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            for _, request in self._held:
                # What is lost is reported when the check ends.
                with contextlib.suppress(FlightDeckError):
                    request.send(b"\n")

    async def _release(self, node: NodeConfig, request: AgentRequest) -> str:
        try:
            request.send(b"end\n")
            released = value_of(await request.next_result("lease", LeaseReleased, _RELEASE_LIMIT_S), node)
        except FlightDeckError as error:
            return f"it is not known whether anything is left on {node.name}; its lease ends it: {error}"
        finally:
            request.close()
        return f"still running on {node.name}: {released.left[0]}" if released.left else ""
