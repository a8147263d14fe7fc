"""State shared by the checks: a configuration, its nodes, and facts that are collected once for all checks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from engine.checks.interpreter import Interpreter, probe_interpreter
from engine.checks.placement import located
from engine.cluster.agent_client import AgentClient, value_of
from engine.cluster.facts import probe_all
from engine.cluster.staging import HostLayout, gather_all, hosts_of, prepare
from engine.cluster.topology import topology
from engine.cluster.transport.fleet import Fleet
from engine.config.models import Config, NodeConfig, on_node
from engine.errors import FlightDeckError, LaunchError
from engine.measurements import Calibration, Division
from engine.models import FrozenModel, NodeFacts
from engine.plan.document import PlannedCheck
from engine.plan.network import NetworkPlan, plan_network

T = TypeVar("T")
Result = TypeVar("Result", bound=FrozenModel)


def once(work: Callable[[CheckContext], Coroutine[Any, Any, T]]) -> Callable[[CheckContext], Coroutine[Any, Any, T]]:
    """`work` as it is done once for a context, and shared by all who call it."""

    @functools.wraps(work)
    async def shared(context: CheckContext) -> T:
        return await context.shared(work.__qualname__, lambda: work(context))

    return shared


class CheckContext:
    """A configuration, its nodes, and what is known of them. Its owner closes the fleet."""

    def __init__(
        self,
        config: Config,
        fleet: Fleet,
        *,
        division: Division | None = None,
        calibration: Calibration | None = None,
        planned: tuple[PlannedCheck, ...] = (),
    ) -> None:
        """`division` is that of the launch that is checked, `calibration` what it was made of: both may know of nodes
        that `config` has no longer. Without a division, whoever wants one looks for a calibration of `config`.
        `planned`: the checks as the training plan lists them."""
        self.config = config
        self.fleet = fleet
        self.division = division
        self.calibration = calibration
        self.planned = planned
        self.progress: Callable[[str, str], None] = lambda check, line: None
        """Called with a check's name and one line about its progress."""
        self._shared: dict[str, asyncio.Task[Any]] = {}

    def agent(self, node: NodeConfig) -> AgentClient:
        return self.fleet.agent(node)

    @once
    async def facts(self) -> dict[str, NodeFacts]:
        """Node name → its facts, with the `problem` of one that is unreachable."""
        return {facts.node: facts for facts in await probe_all(self.config, self.fleet)}

    @once
    async def network_plan(self) -> NetworkPlan:
        """Raises LaunchError, naming what is in the way."""
        facts = list((await self.facts()).values())
        return plan_network(self.config, facts, topology(facts))

    async def possible_network(self) -> NetworkPlan | None:
        """None where the ranks cannot be connected, which hostfile_valid reports."""
        try:
            return await self.network_plan()
        except LaunchError:
            return None

    @once
    async def interpreters(self) -> dict[str, Interpreter]:
        """Node name → Interpreter, without what takes seconds to import."""
        return await self.of_interpreters(lambda node: probe_interpreter(self.agent(node), self.config.job))

    @once
    async def layouts(self) -> tuple[HostLayout, ...]:
        """One HostLayout per distinct host. Raises the first host's LaunchError or NodeUnreachable."""
        hosts = {node.ssh: node for node in self.config.nodes}
        return tuple(await gather_all(map(self.layout_of, hosts.values())))

    async def layout_of(self, node: NodeConfig) -> HostLayout:
        """The layout of the node's host, whatever other hosts lack. Raises LaunchError, NodeUnreachable."""

        async def prepared() -> HostLayout:
            ranks = hosts_of(self.config.nodes).get(node.ssh, ())
            (layout,) = await prepare(self.fleet, [self.config.nodes[rank] for rank in ranks] or [node])
            return replace(layout, ranks=ranks)

        return await self.shared(f"layout of {node.ssh}", prepared)

    def path(self, node: NodeConfig, text: str) -> str:
        """A path of [job] as `node` has it, the same as for its rank; it may begin with `~/`."""
        return on_node(text, node, self.config.folder)

    async def shared(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of `work`, shared by all who ask by this name: the first one's `work` is run. One who is
        cancelled does not spoil it for the others; an error is a result too, and raised to each."""
        if name not in self._shared:
            self._shared[name] = asyncio.create_task(work())
        answer: T = await asyncio.shield(self._shared[name])
        return answer

    async def probe(
        self, node: NodeConfig, name: str, *arguments: str, result_type: type[Result], timeout_s: float
    ) -> Result:
        """Run a probe of engine.node.probes on `node` with the node's own python. Arguments may begin with
        `~/`. Raises LaunchError when it reports nothing that can be read, NodeUnreachable."""
        return value_of(
            await self.agent(node).probe(name, *arguments, result_type=result_type, timeout_s=timeout_s), node
        )

    async def on_all_nodes(
        self, ask: Callable[[NodeConfig], Awaitable[T]], nodes: Iterable[NodeConfig] | None = None
    ) -> dict[str, T | FlightDeckError]:
        """`ask` for every node, or these, at once: node name → its result, or the error in its place."""

        async def one(node: NodeConfig) -> T | FlightDeckError:
            try:
                return await ask(node)
            except FlightDeckError as error:
                return error

        asked = self.config.nodes if nodes is None else tuple(nodes)
        answers = await asyncio.gather(*map(one, asked))
        return {node.name: answer for node, answer in zip(asked, answers, strict=True)}

    async def __aenter__(self) -> CheckContext:
        """With the paths of the copies of what the job names, on the nodes that have them."""
        self.config = await located(self.config, self.fleet)
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
        for task in self._shared.values():
            task.cancel()
        await asyncio.gather(*self._shared.values(), return_exceptions=True)
