"""The nodes of a configuration: their facts and telemetry, their cabling, and single commands on one of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncIterator, Sequence

from engine.api.session import Session, named_nodes
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.discovery import FoundHost, FoundPython, discover, find_python
from engine.cluster.facts import probe_as_completed
from engine.cluster.telemetry import telemetry
from engine.cluster.topology import topology
from engine.cluster.transport.base import Completed, for_any_shell
from engine.cluster.transport.ssh_config import shell_argv, write_openssh_config
from engine.config.load import named_programs
from engine.config.models import Config, NodeConfig
from engine.errors import HostKeyChanged, StateError
from engine.models import HostKeyOffer, NodeFacts, NodeTelemetry, Topology
from engine.plan.addresses import setup_commands, setup_script
from engine.plan.network import NetworkPlan, plan_network
from engine.protocol.attempt import read_regular, regular_descriptor
from engine.security.audit import audit_log
from engine.security.identifiers import SshTarget
from engine.security.paths import make_home
from engine.security.redact import redact
from engine.security.sanitise import plain

_ACCEPTED = "accepted-files"
"""The digest of each configuration whose programs a person has accepted, a line each."""
_FIX_LIMIT_S = 600.0
"""A fix command's time limit: it may install packages."""


class NodesApi:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._home = session.home

    async def probe(self, config: Config) -> list[NodeFacts]:
        """Probe every node once, concurrently, and store the facts; in the configuration's order."""
        by_name = {facts.node: facts async for facts in self.probe_each(config)}
        return [by_name[node.name] for node in config.nodes]

    async def probe_each(self, config: Config) -> AsyncIterator[NodeFacts]:
        """As `probe`, each node's facts when it answers. Closing the iterator ends the probes."""
        seen: list[NodeFacts] = []
        try:
            async with contextlib.aclosing(probe_as_completed(config, self._session.fleet)) as answers:
                async for facts in answers:
                    seen.append(facts)
                    yield facts
        finally:
            # A state that cannot be written is no reason to withhold the facts.
            with contextlib.suppress(StateError):
                await asyncio.to_thread(self._session.store.put_facts, config.cluster.name, seen)

    def last_facts(self, config: Config) -> list[NodeFacts]:
        """The stored facts of the configuration's nodes, as old as `probed_at`; nodes without any are left out.
        Raises StateError."""
        store = self._session.store
        by_node = {(facts.node, facts.host): facts for facts in store.last_facts(config.cluster.name)}
        self._session.report_damage(store)
        return [facts for node in config.nodes if (facts := by_node.get((node.name, node.ssh))) is not None]

    def is_accepted(self, config: Config, *, launch: bool = False) -> bool:
        """Nobody has to be asked before its nodes are probed and checked, or it is launched: that runs no program which
        the file names, or a person has accepted the same content."""
        if config.file is None or not named_programs(config, launch=launch):
            return True
        with contextlib.suppress(OSError):
            return config.digest.encode() in read_regular(self._home / _ACCEPTED).split()
        return False

    def programs(self, config: Config) -> list[tuple[str, str]]:
        """All that the configuration makes run: where or as what, and its name; sanitised."""
        return [(plain(label, 200), redact(plain(text, 2000))) for label, text in named_programs(config, launch=True)]

    def accept(self, digest: str) -> None:
        """Let run what a configuration with this `Config.digest` names. Raises StateError."""
        make_home(self._home)
        file = self._home / _ACCEPTED
        try:
            with os.fdopen(regular_descriptor(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w") as accepted:
                # After what a full disk has left of a line.
                accepted.write(f"\n{digest}\n")
        except OSError as error:
            todo = "make room, or move that file away"
            raise StateError("what is accepted cannot be kept", where=str(file), why=error, todo=todo) from error

    def topology(self, facts: Sequence[NodeFacts]) -> Topology:
        """The cables, with the commands that give them networks where they have none."""
        cabling = topology(facts)
        setup = {node: tuple(commands) for node, commands in setup_commands(cabling, facts).items()}
        return cabling.model_copy(update={"setup": setup})

    def network_plan(self, config: Config, facts: Sequence[NodeFacts]) -> NetworkPlan:
        """The backend and each rank's addresses and RDMA devices. Raises LaunchError, naming each node in the way."""
        return plan_network(config, facts, topology(facts))

    def telemetry(self, config: Config) -> AsyncIterator[NodeTelemetry]:
        """Resource use of every node, as it arrives, without end; closing the iterator stops it on the nodes."""
        return telemetry(config, self._session.fleet)

    async def discover(self, *, ssh_config: bool = True, bonjour: bool = True) -> list[FoundHost]:
        """This machine, and hosts that could be nodes (about 3 s with Bonjour)."""
        return await discover(ssh_config=ssh_config, bonjour=bonjour)

    async def find_pythons(self, hosts: Sequence[str]) -> list[FoundPython]:
        """On each `[user@]host[:port]` a python with mlx and mlx-lm, or why there is none. Raises InputError for no
        host."""
        transports = [self._session.fleet.reach(host) for host in hosts]
        return await asyncio.gather(*map(find_python, transports))

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        """Accept the host key that a person has compared. Raises HostKeyChanged when the node shows another one by now,
        NodeUnreachable, OSError."""
        context = {"host": offer.target, "fingerprint": offer.fingerprint}
        try:
            await self._session.fleet.accept(offer.target, offer.fingerprint)
        except HostKeyChanged as changed:
            audit_log("host_key", "refused", context | {"found": changed.shown}, home=self._home)
            raise
        audit_log("host_key", "accepted", context, home=self._home)

    async def run_on(self, config: Config, node: str, command: str, *, timeout_s: float = _FIX_LIMIT_S) -> Completed:
        """Run a command line on a node as its user would type it: through a login shell, in their home.
        Raises InputError for a node that is none, NodeUnreachable."""
        target = _node(config, node)
        audit_log("command", "asked", {"node": node, "command": command}, home=self._home)
        # Not by its agent: that needs the node's python, and the command may be the one that installs it.
        argv = ["/bin/sh", "-c", f"cd || exit; {_as_typed(command)}"]
        return await self._session.fleet.to(target).run(argv, timeout_s=timeout_s)

    def fix_argv(self, config: Config, node: str, command: str) -> list[str]:
        """The program that does what `run_on` does, in a terminal where sudo can ask. Raises InputError, OSError."""
        audit_log("command", "asked", {"node": node, "command": command}, home=self._home)
        return self.shell_argv(config, node, f"cd || exit; {_as_typed(command)}")

    def setup_argv(self, config: Config, node: str, commands: Sequence[str]) -> list[str]:
        """The program that runs a node's `Topology.setup`, and may ask for a password. Raises InputError, OSError."""
        audit_log("command", "asked", {"node": node, "command": " ; ".join(commands)}, home=self._home)
        return self.shell_argv(config, node, setup_script(commands))

    def shell_argv(self, config: Config, node: str, command: str | None = None) -> list[str]:
        """The program of an interactive shell on a node, or of a command in a terminal. Raises InputError, OSError."""
        target = SshTarget.parse(_node(config, node).ssh)
        file = self._home / "ssh_config"
        if not target.local:
            make_home(self._home)
            write_openssh_config(file, self._home, unattended=False)
        return shell_argv(target, file, for_any_shell(command) if command else None)


def _as_typed(command: str) -> str:
    """For a POSIX shell. tcsh takes -l alone only, and reads its settings without it too."""
    options = 'case "$SHELL" in *csh) set -- -c;; *) set -- -lc;; esac'
    return f'{options}; exec "${{SHELL:-/bin/sh}}" "$@" {shlex.quote(command)}'


def _node(config: Config, name: str) -> NodeConfig:
    if name == THIS_MACHINE.name:
        return THIS_MACHINE
    return named_nodes(config, [name])[0]
