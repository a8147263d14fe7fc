"""State shared by the checks: a configuration, its nodes, and facts that are collected once for all checks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from engine.checks.interpreter import Interpreter, probe_interpreter
from engine.cluster.agent_client import AgentClient
from engine.cluster.facts import probe_all
from engine.cluster.probe_results import ProbeResult
from engine.cluster.staging import HostLayout, gather_all, hosts_of, prepare
from engine.cluster.topology import topology
from engine.cluster.transport.base import Transport
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, NodeConfig, on_node
from engine.errors import FlightDeckError, LaunchError, NodeUnreachable
from engine.measurements import Calibration, Division
from engine.models import NodeFacts, NoValue, Topology
from engine.plan.network import NetworkPlan, plan_network

T = TypeVar("T")
Result = TypeVar("Result", bound=ProbeResult)


class _Once(Generic[T]):
    """A result that is computed once, whoever calls first; a caller who is cancelled does not spoil it for the others.
    An error is a result too, and raised to each."""

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


class CheckContext:
    """A configuration, its nodes, and what is known of them. Its owner closes the fleet."""

    def __init__(
        self,
        config: Config,
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
        self.progress: Callable[[str, str], None] = _ignore_progress
        """Called with a check's name and one line about its progress."""
        self.facts = _Once(self._facts)
        """Node name → NodeFacts, with the `problem` of one that is unreachable."""
        self.topology = _Once(self._topology)
        self.network_plan = _Once(self._network_plan)
        """Raises LaunchError, naming what is in the way."""
        self.layouts = _Once(self._layouts)
        """One HostLayout per distinct host. Raises the first host's LaunchError or NodeUnreachable."""
        self.interpreters = _Once(self._interpreters)
        """Node name → Interpreter, without mlx-lm."""
        self._shared: dict[str, _Once[Any]] = {}
        self._hosts = {host: _Once(partial(self._layout, ranks)) for host, ranks in hosts_of(config.nodes).items()}

    @property
    def remote(self) -> bool:
        """Some node is reached by ssh."""
        return not all(node.local for node in self.config.nodes)

    def transport(self, node: NodeConfig) -> Transport:
        return self.fleet.to(node)

    def agent(self, node: NodeConfig) -> AgentClient:
        return self.fleet.agent(node)

    async def layout_of(self, node: NodeConfig) -> HostLayout:
        """The layout of the node's host, whatever other hosts lack. Raises LaunchError, NodeUnreachable."""
        return await self._hosts[node.ssh]()

    def path(self, node: NodeConfig, text: str) -> str:
        """A path of [job] as `node` has it, the same as for its rank; it may begin with `~/`."""
        base = self.config.file.parent if self.config.file is not None else Path("/")
        return on_node(text, node, base)

    async def shared(self, name: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, shared by all checks that ask by this name: the first one's `work` is run."""
        answer: T = await self._shared.setdefault(name, _Once(work))()
        return answer

    async def probe(
        self, node: NodeConfig, name: str, *arguments: str, result_type: type[Result], timeout_s: float
    ) -> Result:
        """Run a probe of engine.node.probes on `node` with the node's own python. Arguments may begin with
        `~/`. Raises LaunchError when it reports nothing that can be read, NodeUnreachable."""
        return value_of(
            await self.agent(node).probe(name, *arguments, result_type=result_type, timeout_s=timeout_s), node
        )

    async def on_all_nodes(self, ask: Callable[[NodeConfig], Awaitable[T]]) -> dict[str, T | FlightDeckError]:
        """`ask` for every node at once: node name → its result, or the error in its place."""

        async def one(node: NodeConfig) -> T | FlightDeckError:
            try:
                return await ask(node)
            except FlightDeckError as error:
                return error

        nodes: Sequence[NodeConfig] = self.config.nodes
        answers = await asyncio.gather(*(one(node) for node in nodes))
        return {node.name: answer for node, answer in zip(nodes, answers, strict=True)}

    async def __aenter__(self) -> CheckContext:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def of_interpreters(self, ask: Callable[[NodeConfig], Awaitable[T]]) -> dict[str, T]:
        """Node name → what `ask` gives, once for ranks of a host that share an interpreter. Raises what `ask` does."""
        asked = {(node.ssh, node.python): node for node in self.config.nodes}
        answers = dict(zip(asked, await asyncio.gather(*map(ask, asked.values())), strict=True))
        return {node.name: answers[node.ssh, node.python] for node in self.config.nodes}

    async def close(self) -> None:
        """Cancel what still runs."""
        found: tuple[_Once[Any], ...] = (self.network_plan, self.topology, self.facts, self.interpreters, self.layouts)
        for once in (*self._shared.values(), *found, *self._hosts.values()):
            await once.end()

    async def _facts(self) -> dict[str, NodeFacts]:
        return {facts.node: facts for facts in await probe_all(self.config, self.fleet)}

    async def _topology(self) -> Topology:
        return topology(list((await self.facts()).values()))

    async def _network_plan(self) -> NetworkPlan:
        return plan_network(self.config, list((await self.facts()).values()), await self.topology())

    async def _layout(self, ranks: tuple[int, ...]) -> HostLayout:
        (layout,) = await prepare(self.fleet, [self.config.nodes[rank] for rank in ranks])
        return replace(layout, ranks=ranks)

    async def _layouts(self) -> tuple[HostLayout, ...]:
        return tuple(await gather_all(layout() for layout in self._hosts.values()))

    async def _interpreters(self) -> dict[str, Interpreter]:
        return await self.of_interpreters(self._interpreter)

    async def _interpreter(self, node: NodeConfig) -> Interpreter:
        try:
            return await probe_interpreter(self.agent(node))
        except NodeUnreachable as error:
            return Interpreter(problem=str(error))


def value_of(outcome: Result | NoValue, node: NodeConfig) -> Result:
    """Raises LaunchError for an outcome without a value."""
    if isinstance(outcome, NoValue):
        raise LaunchError(str(outcome), where=node.name)
    return outcome


def _ignore_progress(check: str, line: str) -> None:
    """For a context whose owner shows no progress."""
