"""What the checks look at: a configuration and its nodes. What several of them need is found out once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import FlightDeckError, LaunchError
from engine.launch.place import Place
from engine.launch.staging import prepare
from engine.models import NodeFacts, Topology
from engine.nodes.probe import probe_all
from engine.nodes.topology import topology
from engine.planning.wire import wire
from engine.planning.wiring import Wiring
from engine.security.sanitise import sanitise
from engine.transport.base import Transport
from engine.transport.fleet import Fleet

T = TypeVar("T")


class _Once(Generic[T]):
    """An answer that is worked out once, whoever asks first; a caller who gives up does not spoil it for the others."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        return await self._work()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Scene:
    """A configuration, the ways to its nodes, and what is known of them. To be closed; the fleet is its owner's."""

    def __init__(self, config: FlightConfig, fleet: Fleet) -> None:
        self.config = config
        self.fleet = fleet
        self.facts = _Once(self._facts)
        """Node name → NodeFacts; of an unreachable one they say why."""
        self.topology = _Once(self._topology)
        self.wiring = _Once(self._wiring)
        """Raises LaunchError, naming what is in the way."""
        self.places = _Once(self._places)
        """One Place per distinct host. Raises LaunchError, NodeUnreachable."""

    @property
    def remote(self) -> bool:
        """Whether any node is reached by ssh."""
        return not all(node.local for node in self.config.nodes)

    def transport(self, node: NodeConfig) -> Transport:
        return self.fleet.to(node)

    async def place_of(self, node: NodeConfig) -> Place:
        return next(place for place in await self.places() if place.target == node.ssh)

    async def look(self, node: NodeConfig, name: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
        """What `worker.looks.<name>` says on `node`, with the node's own python. Paths may begin with `~/`.
        Raises LaunchError when it says nothing that can be read, NodeUnreachable."""
        place = await self.place_of(node)
        python = place.expanded(node.python)
        argv = [python, "-m", f"worker.looks.{name}", *(place.expanded(argument) for argument in arguments)]
        try:
            done = await self.transport(node).run(argv, timeout_s=timeout_s, directory=PurePosixPath(place.bundle))
        except OSError as error:
            raise LaunchError(f"{python} cannot be run", where=node.name, why=error.strerror or str(error)) from error
        if done.code is None:
            raise LaunchError(f"no answer within {timeout_s:g} s", where=node.name)
        for line in reversed(done.stdout.splitlines()):
            try:
                said = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(said, dict):
                return said
        words = sanitise(done.last_words.encode(), 200)
        raise LaunchError(f"looking there ended with {done.code}", where=node.name, why=words)

    async def on_all(self, ask: Callable[[NodeConfig], Awaitable[T]]) -> dict[str, T | FlightDeckError]:
        """Every node's answer by its name, all asked at once; where it fails, the error in its place."""

        async def one(node: NodeConfig) -> T | FlightDeckError:
            try:
                return await ask(node)
            except FlightDeckError as error:
                return error

        nodes: Sequence[NodeConfig] = self.config.nodes
        answers = await asyncio.gather(*(one(node) for node in nodes))
        return {node.name: answer for node, answer in zip(nodes, answers, strict=True)}

    async def close(self) -> None:
        """End what is still being found out."""
        for once in (self.facts, self.topology, self.wiring, self.places):
            await once.end()

    async def _facts(self) -> dict[str, NodeFacts]:
        return {facts.node: facts for facts in await probe_all(self.config, self.fleet)}

    async def _topology(self) -> Topology:
        return topology(list((await self.facts()).values()))

    async def _wiring(self) -> Wiring:
        return wire(self.config, list((await self.facts()).values()), await self.topology())

    async def _places(self) -> tuple[Place, ...]:
        return await prepare(self.fleet, self.config.nodes)
