"""A host of an attempt without an agent: its files are read where the test writes them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from engine.cluster.host_connection import (
    AttemptOnHost,
    ConnectionState,
    HostConnection,
    RankObservation,
)
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.node import processes
from engine.node.processes import Process
from engine.protocol.attempt import NodeFiles, read_exit, read_identity
from engine.protocol.events import ExitOutput, exit_output
from engine.security.identifiers import LOCAL


class FileHost(HostConnection):
    """A connection that answers at once, and whose state and processes the test may set."""

    def __init__(self, files: NodeFiles, ranks: Sequence[int], names: Sequence[str], *, ssh: str = LOCAL) -> None:
        node = NodeConfig(name=names[0], ssh=ssh, python=sys.executable, workdir="/")
        super().__init__(node, LocalTransport(), AttemptOnHost(files, "nonce", dict(zip(ranks, names, strict=True))))
        self.left: list[Process] | None = []
        self.commands: list[tuple[int, bytes]] = []
        self.requests: list[str] = []
        """What else was asked of it, in its order."""
        self.closed = False
        self.shown = ConnectionState(silent_s=0.0, answered=True)

    @property
    def state(self) -> ConnectionState:
        return self.shown

    def observe(self, rank: int) -> RankObservation:
        identity = read_identity(self._attempt.files.identity(rank))
        gone = identity is not None and not processes.alive(identity.keeper_pid, identity.keeper_start)
        record = read_exit(self._attempt.files.exit(rank))
        return RankObservation(identity, record, vanished=gone and record is None)

    def exit_output(self, rank: int) -> ExitOutput:
        return exit_output(self._attempt.files, rank)

    def send_command(self, rank: int, command: bytes) -> None:
        self.commands.append((rank, command))

    def start(self) -> None:
        pass

    async def close(self) -> None:
        self.closed = True

    def kill_ranks(self) -> None:
        self.requests.append("kill ranks")

    def request_exit_output(self) -> None:
        self.requests.append("exit output")

    def request_processes(self, *, kill: bool) -> None:
        self.requests.append("kill processes" if kill else "list processes")

    def processes(self) -> list[Process] | None:
        return self.left

    def request_port_holders(self, ports: Sequence[int]) -> None:
        self.port_holders = {}
