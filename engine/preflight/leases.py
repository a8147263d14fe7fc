"""The leases of what a check starts on the hosts: while they are held it may run; given back, lost or unheard, it ends.

Each is a process of `worker.looks.lease` there, at the other end of a channel of ours. So nothing outlives a head that
is killed or cut off by more than LEASE_S and a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from engine.config.models import NodeConfig
from engine.errors import FlightDeckError, NodeUnreachable
from engine.launch.asking import at_once
from engine.preflight.answers import Held, Left
from engine.preflight.scene import Scene, heard, look_argv
from engine.transport.base import Channel
from engine.transport.local import LocalTransport

LEASE_S = 7.0
_BEAT_S = 1.0
_TAKE_LIMIT_S = 20.0
_GIVE_BACK_LIMIT_S = 4.0
"""An abort waits for it."""


@dataclass(frozen=True)
class _Lease:
    name: str
    channel: Channel


class Leases:
    """Of one check, on every host and on this machine."""

    def __init__(self, scene: Scene, nonce: str) -> None:
        self._scene = scene
        self._nonce = nonce
        self._held: list[_Lease] = []
        self._beats: asyncio.Task[None] | None = None

    async def take(self, check_id: str, here: Path) -> None:
        """Everything with the nonce, and the folders `here` and of `check_id` on each host, lives from now on as long
        as this is kept up. Raises LaunchError, NodeUnreachable; what has been taken by then is to be given back."""
        places = await self._scene.places()
        nodes = [self._scene.config.nodes[place.ranks[0]] for place in places]
        folders = [str(PurePosixPath(place.root) / "runs" / check_id) for place in places]
        self._beats = asyncio.create_task(self._beat(), name="leases")
        await at_once(
            [
                *(
                    self._take_on(node, [folder, str(here)] if node.local else [folder])
                    for node, folder in zip(nodes, folders, strict=True)
                ),
                *([] if any(node.local for node in nodes) else [self._take_here(here)]),
            ]
        )

    async def give_back(self) -> str:
        """End what is left everywhere; in words what could not be ended. The leases' own processes have left then, or
        will when they hear nothing more."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        said = await asyncio.gather(*(self._give_back(lease) for lease in self._held))
        self._held.clear()
        return "; ".join(filter(None, said))

    async def _take_on(self, node: NodeConfig, folders: Sequence[str]) -> None:
        place = await self._scene.place_of(node)
        argv = look_argv(place, node, "lease", self._nonce, str(LEASE_S), *folders)
        directory = PurePosixPath(place.bundle)
        await self._hold(node.name, await self._scene.transport(node).open(argv, directory=directory))

    async def _take_here(self, here: Path) -> None:
        """mlx.launch and its ssh run here also where no rank does."""
        argv = [sys.executable, "-m", "engine.worker.looks.lease", self._nonce, str(LEASE_S), str(here)]
        await self._hold("this machine", await LocalTransport().open(argv))

    async def _hold(self, name: str, channel: Channel) -> None:
        self._held.append(_Lease(name, channel))
        await heard(channel, name, Held, _TAKE_LIMIT_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_S)
            await asyncio.gather(*(_beat(lease.channel) for lease in self._held))

    async def _give_back(self, lease: _Lease) -> str:
        try:
            await lease.channel.write(b"end\n")
            left = (await heard(lease.channel, lease.name, Left, _GIVE_BACK_LIMIT_S)).left
        except (FlightDeckError, OSError) as error:
            # Not closed: that would wait for a node that does not answer. The lease ends by itself, as does the line.
            return f"whether anything is left on {lease.name} is not known, its lease ends it: {error}"
        with contextlib.suppress(NodeUnreachable, OSError):
            await lease.channel.close()
        return f"on {lease.name} is left: {left[0]}" if left else ""


async def _beat(channel: Channel) -> None:
    # One that cannot be reached is told of when the check ends.
    with contextlib.suppress(NodeUnreachable, OSError, TimeoutError):
        async with asyncio.timeout(_BEAT_S):
            await channel.write(b"\n")
