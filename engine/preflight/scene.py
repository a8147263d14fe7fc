"""What the checks look at: a configuration and its nodes. What several of them need is found out once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from engine.config.models import FlightConfig, NodeConfig
from engine.config.places import on_node
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.launch.asking import at_once
from engine.launch.place import Place
from engine.launch.staging import hosts_of, prepare
from engine.measured import Calibration, Division
from engine.models import NodeFacts, Topology
from engine.nodes.probe import probe_all
from engine.nodes.topology import topology
from engine.planning.wire import wire
from engine.planning.wiring import Wiring
from engine.preflight.answers import Answer
from engine.preflight.desk import Desk
from engine.preflight.interpreter import Interpreter, ask
from engine.security.sanitise import plain
from engine.transport.base import Channel, Transport
from engine.transport.fleet import Fleet

_ANSWER_BYTES = 1 << 20
T = TypeVar("T")
Said = TypeVar("Said", bound=Answer)


class _Once(Generic[T]):
    """An answer that is worked out once, whoever asks first; a caller who gives up does not spoil it for the others.
    An error is as good an answer, and told to each."""

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._task: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(self._task)

    async def _run(self) -> T:
        return await self._work()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Scene:
    """A configuration, the ways to its nodes, and what is known of them. To be closed; the fleet is its owner's."""

    def __init__(
        self,
        config: FlightConfig,
        fleet: Fleet,
        *,
        division: Division | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        """`division` is that of the launch that is checked, `calibration` what it was made of: both may know of nodes
        that `config` has no longer. Without a division, whoever wants one looks for a calibration of `config`."""
        self.config = config
        self.fleet = fleet
        self.division = division
        self.calibration = calibration
        self.progress: Callable[[str, str], None] = _unheard
        """Hears how far a check has come: its name, and one line."""
        self.facts = _Once(self._facts)
        """Node name → NodeFacts; of an unreachable one they say why."""
        self.topology = _Once(self._topology)
        self.wiring = _Once(self._wiring)
        """Raises LaunchError, naming what is in the way."""
        self.places = _Once(self._places)
        """One Place per distinct host. Raises the first host's LaunchError or NodeUnreachable."""
        self.interpreters = _Once(self._interpreters)
        """Node name → Interpreter, mlx-lm not asked for."""
        self._shared: dict[str, _Once[Any]] = {}
        self._desks: dict[tuple[str, str], Desk] = {}
        self._hosts = {host: _Once(partial(self._place, ranks)) for host, ranks in hosts_of(config.nodes).items()}

    @property
    def remote(self) -> bool:
        """Whether any node is reached by ssh."""
        return not all(node.local for node in self.config.nodes)

    def transport(self, node: NodeConfig) -> Transport:
        return self.fleet.to(node)

    async def place_of(self, node: NodeConfig) -> Place:
        """Where the worker is on the host of `node`, whatever other hosts lack. Raises LaunchError, NodeUnreachable."""
        return await self._hosts[node.ssh]()

    def path(self, node: NodeConfig, text: str) -> str:
        """A path of [job] as `node` has it, the same as for its rank; it may begin with `~/`."""
        base = self.config.file.parent if self.config.file is not None else Path("/")
        return on_node(text, node, base)

    async def shared(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` finds out, for all checks that ask by this name: the first one's is done."""
        answer: T = await self._shared.setdefault(name, _Once(work))()
        return answer

    async def look(self, node: NodeConfig, name: str, *arguments: str, said: type[Said], timeout_s: float) -> Said:
        """What `worker.looks.<name>` says on `node`, with the node's own python. Paths may begin with `~/`.
        Raises LaunchError when it says nothing that can be read, NodeUnreachable."""
        place = await self.place_of(node)
        python, *expanded = (place.expanded(text) for text in (node.python, *arguments))
        if (node.ssh, python) not in self._desks:
            self._desks[node.ssh, python] = Desk(self.transport(node), python, place.bundle)
        try:
            done = await self._desks[node.ssh, python].ask(name, expanded, timeout_s=timeout_s)
        except OSError as error:
            raise LaunchError(f"{python} cannot be run", where=node.name, why=error.strerror or str(error)) from error
        if done.code is None:
            raise LaunchError(f"no answer within {timeout_s:g} s", where=node.name)
        for line in reversed(done.stdout.splitlines()):
            if (answer := read(line, said)) is not None:
                return answer
        words = plain(done.last_words, 200)
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
        found: tuple[_Once[Any], ...] = (self.wiring, self.topology, self.facts, self.interpreters, self.places)
        for once in (*self._shared.values(), *found, *self._hosts.values()):
            await once.end()
        await asyncio.gather(*(desk.close() for desk in self._desks.values()))

    async def _facts(self) -> dict[str, NodeFacts]:
        return {facts.node: facts for facts in await probe_all(self.config, self.fleet)}

    async def _topology(self) -> Topology:
        return topology(list((await self.facts()).values()))

    async def _wiring(self) -> Wiring:
        return wire(self.config, list((await self.facts()).values()), await self.topology())

    async def _place(self, ranks: tuple[int, ...]) -> Place:
        (place,) = await prepare(self.fleet, [self.config.nodes[rank] for rank in ranks])
        return replace(place, ranks=ranks)

    async def _places(self) -> tuple[Place, ...]:
        return tuple(await at_once(place() for place in self._hosts.values()))

    async def _interpreters(self) -> dict[str, Interpreter]:
        # Several ranks of a host may share an interpreter: it is asked once.
        asked = {(node.ssh, node.python): node for node in self.config.nodes}
        answers = await asyncio.gather(*(self._interpreter(node) for node in asked.values()))
        found = dict(zip(asked, answers, strict=True))
        return {node.name: found[node.ssh, node.python] for node in self.config.nodes}

    async def _interpreter(self, node: NodeConfig) -> Interpreter:
        try:
            return await ask(self.transport(node), node.python)
        except NodeUnreachable as error:
            return Interpreter(problem=str(error))


def _unheard(check: str, words: str) -> None:
    """Where nobody looks on."""


def look_argv(place: Place, node: NodeConfig, name: str, *arguments: str) -> list[str]:
    """What runs `worker.looks.<name>` in the folder of the place's bundle."""
    python, *expanded = (place.expanded(text) for text in (node.python, *arguments))
    return [python, "-m", f"worker.looks.{name}", *expanded]


def read(line: bytes, said: type[Said]) -> Said | None:
    """One line of a look as its answer; None for a line of something else, a login shell's say."""
    try:
        return said.model_validate(json.loads(line))
    except (ValueError, RecursionError, ValidationError):
        return None


async def heard(channel: Channel, where: str, said: type[Said], timeout_s: float) -> Said:
    """The next answer of a look that goes on. Raises LaunchError when it ends without one, NodeUnreachable."""
    words = b""
    try:
        async with asyncio.timeout(timeout_s):
            while block := await channel.read(4096):
                words = (words + block)[-_ANSWER_BYTES:]
                for line in words.split(b"\n")[:-1]:
                    if (answer := read(line, said)) is not None:
                        return answer
    except TimeoutError:
        raise LaunchError(f"no answer within {timeout_s:g} s", where=where) from None
    raise LaunchError("looking there has ended", where=where, why=plain(channel.last_words, 200))
