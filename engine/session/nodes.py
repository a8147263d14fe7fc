"""Nodes: what they are and use, how they are joined, and what is done on one of them by hand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import HostKeyChanged, InputError, StateError
from engine.models import CheckResult, HostKeyOffer, NodeFacts, NodeTelemetry, Topology
from engine.security.home import make_home
from engine.session.room import Room

if TYPE_CHECKING:
    from engine.nodes.discover import FoundHost
    from engine.nodes.find_python import FoundPython
    from engine.planning.wiring import Wiring
    from engine.transport.base import Completed

_FIX_LIMIT_S = 600.0
"""Of a command that mends something on a node: it may install packages."""


class Nodes(Room):
    """The configuration's nodes, this machine, and hosts that could be nodes."""

    async def facts(self, config: FlightConfig) -> list[NodeFacts]:
        """Probe every node once, concurrently, and keep what was seen."""
        found = {facts.node: facts async for facts in self.probing(config)}
        return [found[node.name] for node in config.nodes]

    async def probing(self, config: FlightConfig) -> AsyncIterator[NodeFacts]:
        """The same, each node's facts as it answers. Closing the iterator ends the probes."""
        from engine.nodes.probe import probing

        seen: list[NodeFacts] = []
        try:
            async with contextlib.aclosing(probing(config, self.fleet(config))) as answers:
                async for facts in answers:
                    seen.append(facts)
                    yield facts
        finally:
            # A state that cannot be written is no reason to keep back what the nodes said.
            with contextlib.suppress(StateError):
                await asyncio.to_thread(self._store().put_facts, config.cluster.name, seen)

    def last_facts(self, config: FlightConfig) -> list[NodeFacts]:
        """What was last seen of the configuration's nodes, as old as `probed_at` says; nothing of the others.
        Raises StateError."""
        store = self._store()
        known = {(facts.node, facts.host): facts for facts in store.last_facts(config.cluster.name)}
        self.notices += [notice for notice in store.notices if notice not in self.notices]
        return [facts for node in config.nodes if (facts := known.get((node.name, node.ssh))) is not None]

    def topology(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> Topology:
        """Who is cabled to whom over Thunderbolt."""
        from engine.nodes.topology import topology

        return topology(facts)

    def link_commands(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> dict[str, list[str]]:
        """Per node, what a person runs there to give each Thunderbolt cable its addresses; {} when all have them."""
        from engine.planning.links import setup_commands

        return setup_commands(self.topology(config, facts), facts)

    def wiring(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> Wiring:
        """The backend and each rank's addresses and RDMA devices. Raises LaunchError, naming each node in the way."""
        from engine.planning.wire import wire

        return wire(config, facts, self.topology(config, facts))

    def telemetry(self, config: FlightConfig) -> AsyncIterator[NodeTelemetry]:
        """What every node uses, as it comes, without end; closing the iterator ends it on the nodes."""
        from engine.nodes.telemetry import telemetry

        return telemetry(config, self.fleet(config))

    async def discover(self, *, ssh_config: bool = True, bonjour: bool = True) -> list[FoundHost]:
        """This machine, and hosts that could be nodes (about 3 s when Bonjour is asked)."""
        from engine.nodes.discover import discover

        return await discover(ssh_config=ssh_config, bonjour=bonjour)

    async def find_pythons(self, hosts: Sequence[str]) -> list[FoundPython]:
        """Of each `[user@]host[:port]`, a python there with mlx and mlx-lm, or why there is none."""
        from engine.nodes.find_python import find_pythons

        return await find_pythons(hosts, self.home)

    async def doctor(self) -> list[CheckResult]:
        """What this machine has and lacks for a run of its own."""
        from engine.preflight.machine import examine

        return await examine(self.home)

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        """Accept the host key that a person has compared. Raises HostKeyChanged when the node shows another one by now,
        NodeUnreachable, OSError."""
        from engine.security.audit import audit_log
        from engine.transport.fleet import Fleet

        context = {"host": offer.target, "fingerprint": offer.fingerprint}
        try:
            async with Fleet((), self.home) as fleet:
                await fleet.accept(offer.target, offer.fingerprint)
        except HostKeyChanged as changed:
            audit_log("host_key", "refused", context | {"found": changed.found}, home=self.home)
            raise
        audit_log("host_key", "accepted", context, home=self.home)

    async def run_on(
        self, config: FlightConfig, node: str, command: str, *, timeout_s: float = _FIX_LIMIT_S
    ) -> Completed:
        """Run a command line on a node as its user would type it: through a login shell, in their home.
        Raises InputError for a node that is none, NodeUnreachable."""
        from engine.security.audit import audit_log

        found = _node(config, node)
        audit_log("command", "asked", {"node": node, "command": command}, home=self.home)
        argv = ["/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}" -lc "$1"', "flightdeck", command]
        return await self.fleet(config).to(found).run(argv, timeout_s=timeout_s)

    def shell_argv(self, config: FlightConfig, node: str) -> list[str]:
        """The program of an interactive shell on a node. Raises InputError, OSError."""
        from engine.security.hosts import SshTarget
        from engine.transport.openssh import shell_argv, write_openssh_config

        target = SshTarget.parse(_node(config, node).ssh)
        file = self.home / "ssh_config"
        if not target.local:
            make_home(self.home)
            write_openssh_config(file, self.home, unattended=False)
        return shell_argv(target, file)


def _node(config: FlightConfig, name: str) -> NodeConfig:
    found = next((node for node in config.nodes if node.name == name), None)
    if found is None:
        raise InputError(f"no node {name!r}", todo=f"nodes: {', '.join(node.name for node in config.nodes)}")
    return found
