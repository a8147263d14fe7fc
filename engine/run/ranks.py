"""The hosts and ranks of one attempt: the connection to every host, and the state of every rank as its host shows
it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.cluster.agent_client import THIS_MACHINE, TransportProvider
from engine.cluster.host_connection import AttemptOnHost, HostConnection
from engine.protocol.attempt import ExitRecord, Identity, NodeFiles
from engine.run.events import Attempt, Note, RankExited, RankLaunched
from engine.run.history import AttemptHistory
from engine.run.journal import RunRecorder
from engine.run.run_plan import RunPlan
from engine.store.layout import RunDir


class HostConnections:
    def __init__(self, connections: Sequence[HostConnection]) -> None:
        self._all = tuple(connections)
        self._of_rank = {rank: connection for connection in connections for rank in connection.ranks}
        self._news = asyncio.Event()
        for connection in connections:
            connection.on_news = self._news.set

    def __iter__(self) -> Iterator[HostConnection]:
        return iter(self._all)

    def to(self, rank: int) -> HostConnection:
        return self._of_rank[rank]

    async def await_news(self, limit_s: float) -> None:
        """Until a rank has started or ended, or a host has no process left, but no longer than `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        self._news.clear()


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
        nodes = {rank: plan.nodes[rank] for rank in layout.ranks}
        part = AttemptOnHost(attempt.files_at(layout, plan.run_id), attempt.nonce, nodes, known)
        connections.append(HostConnection(node, fleet.to(node), part))
    if not any(connection.local for connection in connections):
        part = AttemptOnHost(NodeFiles.for_attempt(here, plan.run_id, attempt.number), attempt.nonce)
        connections.append(HostConnection(THIS_MACHINE, fleet.to(THIS_MACHINE), part))
    return HostConnections(connections)


@dataclass(frozen=True)
class AttemptContext:
    run_dir: RunDir
    plan: RunPlan
    """With the attempt's own nodes only."""
    attempt: Attempt
    connections: HostConnections
    """Started."""
    recorder: RunRecorder

    @property
    def history(self) -> AttemptHistory:
        return self.recorder.history.attempt(self.attempt.number)


@dataclass
class Rank:
    """One rank as its host last showed it."""

    number: int
    node: str
    identity: Identity | None = None
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone without an exit record."""
    restarted: bool = False
    """Its node has been restarted since it started."""
    lost: bool = False
    """Its node has been away for longer than its lease: by now it has ended there, and only its exit record tells
    how."""
    launcher_code: int | None = None
    """The exit code of its start, where no keeper has reported another."""
    dispensable: bool = False
    """The others go on without it."""
    completed: bool = False
    """Its trainer has reported that it has done its work."""
    head_slept_s: float = 0.0
    """The longest sleep of this machine, or stop of its supervisor, before its end was known."""

    @property
    def started(self) -> bool:
        return self.identity is not None

    @property
    def ended(self) -> bool:
        """Nothing more will come of it: it has a record, or no keeper is left to write one."""
        refused = self.launcher_code is not None and not self.started
        return self.record is not None or self.vanished or self.lost or refused


class Ranks:
    def __init__(self, connections: HostConnections, nodes: Sequence[str]) -> None:
        """`nodes`: the names of the ranks' nodes, in the order of the ranks."""
        self.connections = connections
        self.all = [Rank(number, node) for number, node in enumerate(nodes)]

    @property
    def ends_known(self) -> int:
        """How many ranks have left an exit record, or will leave none."""
        return sum(rank.record is not None or rank.vanished for rank in self.all)

    def poll(self) -> list[Rank]:
        """Update all ranks; those that have changed. One that is lost changes when its exit record comes."""
        changed = []
        for rank in (rank for rank in self.all if rank.record is None):
            before = rank.started, rank.ended, rank.record
            seen = self.connections.to(rank.number).observe(rank.number)
            rank.identity = rank.identity or seen.identity
            rank.record = seen.record
            rank.vanished = rank.record is None and (rank.vanished or seen.vanished)
            rank.restarted = rank.restarted or seen.restarted
            if (rank.started, rank.ended, rank.record) != before:
                changed.append(rank)
        return changed

    def send_command(self, command: bytes, *, only: int | None = None, but: int | None = None) -> None:
        """Send `command` to every keeper that may still take it, or to that of rank `only`, or to all but one."""
        for rank in self.all:
            if only not in (None, rank.number) or (but is not None and rank.number == but):
                continue
            if rank.record is None and not rank.vanished:
                self.connections.to(rank.number).send_command(rank.number, command)

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


NODE_LOST = "its node is lost"
"""The end of a rank whose exit record has not been read yet."""


def record_rank_changes(context: AttemptContext, changed: Sequence[Rank]) -> None:
    """Enter the starts and ends of these ranks, each once, also over supervisors; the end of a lost one again once it
    is known."""
    record = context.recorder.append
    for rank in changed:
        number, node = rank.number, rank.node
        if rank.identity is not None and number not in context.history.started:
            record(RankLaunched(rank=number, node=node, identity=rank.identity))
        before = context.history.ended.get(number)
        if not rank.ended or (before is not None and (before.error != NODE_LOST or rank.record is None)):
            continue
        if (end := rank.record) is None:
            why = NODE_LOST if rank.lost else "no exit record"
            record(RankExited(rank=number, node=node, code=rank.launcher_code, error=why))
            continue
        record(RankExited.model_validate({**vars(end), "rank": number, "node": node}))
        if end.dropped_bytes:
            lost = f"rank {number}: {end.dropped_bytes} bytes of output were lost to a full disk"
            record(Note(message=f"{lost} on {node}"))


_ANSWER_LIMIT_S = 20.0
_POLL_S = 0.1


async def any_rank_started(connections: HostConnections) -> bool:
    """A rank of the attempt, or its end, or one that is about to start is there; a node that does not answer may have
    one. A shell that a node was still starting is not seen at first, so that "nothing" counts only once the node is
    fenced and nothing can start there any more."""
    for fence in (False, True):
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        for connection in connections:
            await asyncio.to_thread(connection.request_processes, kill=fence)
        left: list[object] = [None]
        while None in left:
            seen = [connection.observe(rank) for connection in connections for rank in connection.ranks]
            left = [connection.processes() for connection in connections]
            if any(left) or any(each.record is not None for each in seen) or time.monotonic() > deadline:
                return True
            await asyncio.sleep(_POLL_S)
    return False
