"""The hosts and ranks of one attempt: the connection to every host, and the state of every rank as its host shows
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.cluster.agent_client import THIS_MACHINE, TransportProvider
from engine.cluster.host_connection import AttemptOnHost, HostConnection
from engine.protocol.attempt import ExitRecord, Identity, NodeFiles
from engine.run.events import Attempt, Note, RankExited, RankLaunched
from engine.run.history import AttemptHistory
from engine.run.recorder import RunRecorder
from engine.run.run_plan import PlannedRank, RunPlan
from engine.store.layout import RunDir


class HostConnections:
    """The connections to the hosts of one attempt."""

    def __init__(self, connections: Sequence[HostConnection]) -> None:
        self._all = tuple(connections)
        self._of_rank = {rank: connection for connection in connections for rank in connection.ranks}

    def __iter__(self) -> Iterator[HostConnection]:
        return iter(self._all)

    def to(self, rank: int) -> HostConnection:
        return self._of_rank[rank]

    def start(self) -> None:
        """On the running loop."""
        for connection in self._all:
            connection.start()

    async def close(self) -> None:
        # All at once: each may wait for a host that does not answer any more.
        await asyncio.gather(*(connection.close() for connection in self._all))


def host_connections(
    plan: RunPlan, attempt: Attempt, fleet: TransportProvider, here: Path, known: Mapping[int, Identity]
) -> HostConnections:
    """The connections of an attempt, not started yet. `here` is this machine's own node root, for an attempt without a
    rank on it; `known` are the identities that an earlier supervisor recorded."""
    connections: list[HostConnection] = []
    for layout in attempt.layouts:
        node = plan.config.nodes[layout.ranks[0]]
        # On this machine with the python that runs us: a rank's broken one must not leave its processes unproved.
        node = THIS_MACHINE if node.local else node
        nodes = {rank: plan.ranks[rank].node for rank in layout.ranks}
        part = AttemptOnHost(attempt.files_at(layout, plan.run_id), attempt.nonce, nodes, known)
        connections.append(HostConnection(node, fleet.to(node), part))
    if not any(connection.local for connection in connections):
        part = AttemptOnHost(NodeFiles.for_attempt(here, plan.run_id, attempt.number), attempt.nonce)
        connections.append(HostConnection(THIS_MACHINE, fleet.to(THIS_MACHINE), part))
    return HostConnections(connections)


@dataclass(frozen=True)
class AttemptContext:
    """One attempt with its connections and its journal."""

    run_dir: RunDir
    plan: RunPlan
    """With the attempt's own nodes only."""
    attempt: Attempt
    connections: HostConnections
    """Started."""
    recorder: RunRecorder

    @property
    def history(self) -> AttemptHistory:
        """As far as the journal has it."""
        history = self.recorder.attempt(self.attempt.number)
        return history or AttemptHistory(self.attempt, datetime.now(UTC))


@dataclass
class Rank:
    """One rank as its host last showed it."""

    planned: PlannedRank
    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Its node has been restarted since it started."""
    lost: bool = False
    """Its node has been away for longer than its lease, which has ended it there."""
    launcher_code: int | None = None
    """The exit code of its start, where no keeper has reported another."""

    @property
    def number(self) -> int:
        return self.planned.rank

    @property
    def started(self) -> bool:
        return self.identity is not None

    @property
    def ended(self) -> bool:
        """Nothing more will come of it: it has a record, or no keeper is left to write one."""
        refused = self.launcher_code is not None and not self.started
        return self.record is not None or self.vanished or self.lost or refused


class Ranks:
    """All ranks of one attempt, and the way to their keepers."""

    def __init__(self, connections: HostConnections, planned: Sequence[PlannedRank]) -> None:
        self._connections = connections
        self.all = [Rank(rank) for rank in planned]

    def poll(self) -> list[Rank]:
        """Update all ranks; those that have changed."""
        changed = []
        for rank in self.all:
            before = rank.started, rank.ended
            self._update(rank)
            if (rank.started, rank.ended) != before:
                changed.append(rank)
        return changed

    def send_command(self, command: bytes, *, only: int | None = None, but: int | None = None) -> None:
        """Send `command` to every keeper that may still take it, or to that of rank `only`, or to all but one."""
        for rank in self.all:
            if only not in (None, rank.number) or (but is not None and rank.number == but):
                continue
            if rank.record is None and not rank.vanished:
                self._connections.to(rank.number).send_command(rank.number, command)

    def fail_to_start(self, codes: Sequence[tuple[int, int]]) -> list[Rank]:
        """Take in the starts that failed (rank, exit code), for ranks without a keeper; those that have ended by it."""
        changed = []
        for number, code in codes:
            rank = self.all[number] if 0 <= number < len(self.all) else None
            if rank is not None and rank.record is None and not rank.started:
                rank.launcher_code = code
                changed.append(rank)
        return changed

    def lose(self, numbers: Sequence[int]) -> list[Rank]:
        """Mark ranks whose node has been away for too long as ended; those that were not ended before."""
        lost = [rank for rank in self.all if rank.number in numbers and not rank.ended]
        for rank in lost:
            rank.lost = True
        return lost

    def _update(self, rank: Rank) -> None:
        if rank.record is not None:
            return
        seen = self._connections.to(rank.number).observe(rank.number)
        rank.identity = rank.identity or seen.identity
        rank.record = seen.record
        rank.vanished = rank.record is None and (rank.vanished or seen.vanished)
        rank.restarted = rank.restarted or seen.restarted


def record_rank_changes(recorder: RunRecorder, number: int, changed: Sequence[Rank]) -> None:
    """Enter the starts and ends of these ranks of attempt `number`, each once, also over supervisors."""
    for rank in changed:
        attempt = recorder.attempt(number)
        started, ended = (attempt.started, attempt.ended) if attempt is not None else ({}, {})
        if rank.identity is not None and rank.number not in started:
            recorder.append(RankLaunched(rank=rank.number, node=rank.planned.node, identity=rank.identity))
        if rank.ended and rank.number not in ended:
            _record_end(recorder, rank)


def _record_end(recorder: RunRecorder, rank: Rank) -> None:
    node, record = rank.planned.node, rank.record
    if record is None:
        why = "its node is lost" if rank.lost else "no exit record"
        recorder.append(RankExited(rank=rank.number, node=node, code=rank.launcher_code, error=why))
        return
    recorder.append(
        RankExited(
            rank=rank.number,
            node=node,
            code=record.code,
            signal=record.signal,
            stopped_by=record.stopped_by,
            error=record.error,
        )
    )
    if record.dropped_bytes:
        lost = f"rank {rank.number}: {record.dropped_bytes} bytes of output were lost to a full disk"
        recorder.append(Note(message=f"{lost} on {node}"))
