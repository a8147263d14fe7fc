"""The evidence of an attempt's end: exit records, exit output, the launcher and its ssh, the nodes themselves."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.cluster.host_connection import HostConnection
from engine.failures.explanation import FRAME, WORKER_FAILED, last_round
from engine.failures.signatures import BY_ID
from engine.job.kinds import JobKind
from engine.launch.hostfile import ports_of
from engine.launch.ssh_shim import ssh_log_path
from engine.node.processes import oom_kill_count
from engine.protocol.attempt import ExitRecord
from engine.protocol.events import tail
from engine.protocol.exit_codes import ShellExit, TrainerExit
from engine.run.attempt import AttemptOrigin
from engine.run.effects import Judge, Standing
from engine.run.events import Hang, Trigger
from engine.run.observation import RankView
from engine.run.run_context import AttemptContext
from engine.security.sanitise import text_or_none

_FINAL_LINES = 15
_OF_RANK = re.compile(r"\[(?:rank ?|default)(\d{1,6})\]")
"""Before lines of a worker, by torchrun, and before those of an exception, by torch."""
_CANNOT_BIND = re.compile(BY_ID["ring.bind"].pattern)
_CANNOT_LISTEN = re.compile(BY_ID["c10d.port_in_use"].pattern)


@dataclass(frozen=True)
class RankEvidence:
    """How one rank ended; what is not explained is as in RankView and Standing."""

    rank: int
    node: str
    python: str
    started: bool = False
    record: ExitRecord | None = None
    vanished: bool = False
    restarted: bool = False
    unreachable_s: float | None = None
    """How long its node has not answered, when that is why its end is not known."""
    unreachable_why: str | None = None
    cut_off_s: float = 0.0
    """The longest time for which its node was away."""
    head_slept_s: float = 0.0
    lease_s: float = float("inf")
    clock_ahead_s: float = 0.0
    """Its node's wall clock minus the head's."""
    remote: bool = False
    """Its node is another machine."""
    launcher_code: int | None = None
    launcher_output: str = ""
    """The output of ssh, or of whatever else was to start it."""
    tail: str = ""
    """The end of its log."""
    keeper_tail: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's `failure` event."""
    end: dict[str, Any] | None = None
    """The trainer's `end` event."""
    port: str | None = None
    """Which port it could not bind, and who holds it."""
    left_for_peers: bool = False
    """The trainer's exit code means that it left because a peer was lost."""
    lost: bool = False
    dispensable: bool = False
    outlived: bool = False
    answered_since: bool = False
    memory_killed: bool = False
    """Its system has killed processes for lack of memory since the attempt began."""

    @property
    def ssh_failed(self) -> bool:
        """Its start over ssh failed in ssh itself."""
        return self.remote and self.launcher_code == ShellExit.SSH_FAILED

    @property
    def error_type(self) -> str | None:
        return text_or_none(self.failure.get("error_type")) if self.failure is not None else None

    @property
    def exception(self) -> str:
        """The exception that its trainer reported; "" without one."""
        return f"{self.error_type}: {self.failure.get('message')}" if self.failure is not None else ""

    @property
    def final_lines(self) -> str:
        """The lines of its log that may report the end: what was logged long before is no part of it."""
        lines = [line for line in self.tail.splitlines() if not FRAME.match(line)]
        if not self.is_torchrun:
            return "\n".join(lines[-_FINAL_LINES:])
        # Each of its workers may print a traceback.
        kept: list[str] = []
        seen: Counter[str | None] = Counter()
        for place in reversed(last_round(lines)):
            line = lines[place]
            ranks = set(_OF_RANK.findall(line)) or {None}
            seen.update(ranks)
            if any(seen[rank] <= _FINAL_LINES for rank in ranks):
                kept.append(line)
        return "\n".join(reversed(kept))

    @property
    def is_torchrun(self) -> bool:
        """Its log is torchrun's, with the output of all the workers of its node."""
        return WORKER_FAILED.search(self.tail) is not None

    @property
    def bind_error(self) -> str | None:
        """The error number with which the ring could not bind its port."""
        match = _CANNOT_BIND.search(f"{self.final_lines}\n{self.exception}")
        return match["errno"] if match is not None else None

    @property
    def busy_master_port(self) -> int | None:
        """The port on which PyTorch's store could not listen, since another program had it."""
        match = _CANNOT_LISTEN.search(f"{self.final_lines}\n{self.exception}")
        return int(match["port"]) if match is not None else None


@dataclass(frozen=True)
class FailureEvidence:
    ranks: Sequence[RankEvidence]
    trigger: Trigger
    kind: JobKind
    launcher_tail: str = ""
    adopted: bool = False
    rebooted: bool = False
    """This machine was restarted since."""
    hang: Hang | None = None
    apart: tuple[int, ...] = ()
    """The ranks of a command that trained in groups of their own."""
    over: bool = True
    """Nothing of the attempt runs any more."""

    @property
    def trainer(self) -> bool:
        """The job runs our trainer, which ends with an `end` event; a command of the user's own has none."""
        return self.kind.reports

    def succeeded(self, rank: RankEvidence) -> bool:
        return self.kind.succeeded(rank.record, rank.end)


_ANSWER_LIMIT_S = 10.0
_POLL_S = 0.02


class EvidenceCollector:
    """Collects the evidence of one attempt. It reads the nodes' own files: the head's disk may be full."""

    def __init__(self, context: AttemptContext) -> None:
        self.origin = AttemptOrigin(adopted=True)
        self._context = context
        config = context.plan.config
        self._kind = config.job.kind
        # Secrets that a rank has printed must not be quoted.
        self._redactor = config.job.redactor()

    def succeeded(self, rank: RankView, completed: Collection[int]) -> bool:
        """`completed`: the ranks whose trainer has reported that it has done its work."""
        return self._kind.succeeded(rank.record, self._end(rank, completed))

    def _end(self, rank: RankView, completed: Collection[int]) -> dict[str, Any] | None:
        """The trainer's last event; without an exit record the head's copy of its events has it before its node's own
        answer comes. A node that is away, or has not answered yet, may have a record that tells more."""
        connection = self._connection(rank.number)
        there = connection.state.answered and connection.state.answering
        copied = rank.number in completed and rank.record is None and there
        return connection.exit_output(rank.number).end or ({"completed": True} if copied else None)

    def rank_evidence(self, rank: RankView, completed: Collection[int], standing: Standing) -> RankEvidence:
        connection = self._connection(rank.number)
        output, state = connection.exit_output(rank.number), connection.state
        config, record = self._context.plan.config, rank.record
        ended = (rank.end_known or rank.refused) and not standing.lost
        return RankEvidence(
            rank=rank.number,
            node=rank.node,
            python=config.nodes[rank.number].python,
            started=rank.started,
            record=record,
            vanished=rank.vanished,
            restarted=rank.restarted,
            unreachable_s=None if state.answering or ended else state.silent_s,
            unreachable_why=state.problem,
            cut_off_s=standing.cut_off_s,
            head_slept_s=standing.head_slept_s,
            lease_s=config.recovery.lease_s,
            clock_ahead_s=connection.facts.clock_ahead_s if connection.facts and not connection.local else 0.0,
            remote=not connection.local,
            launcher_code=rank.launcher_code,
            launcher_output=self._quotable(self._start_output(rank.number)),
            tail=self._quotable(output.log),
            keeper_tail=self._quotable(output.keeper),
            failure=self._quotable_event(output.failure),
            end=self._quotable_event(self._end(rank, completed)),
            left_for_peers=self._kind.reports and record is not None and record.code == TrainerExit.PEER_LOST,
            lost=standing.lost,
            dispensable=standing.dispensable,
            outlived=standing.outlived,
            answered_since=standing.answered_since,
            memory_killed=self._memory_killed(rank),
        )

    def collect(self, ranks: Sequence[RankView], completed: Collection[int], request: Judge) -> FailureEvidence:
        """All evidence. Port holders are only looked up once the attempt is over, when they cannot be our own ranks."""
        launcher = self.origin.launcher
        views = zip(ranks, request.standings, strict=True)
        evidence = [self.rank_evidence(rank, completed, standing) for rank, standing in views]
        return FailureEvidence(
            ranks=self._with_ports(evidence) if request.over else evidence,
            trigger=request.trigger,
            kind=self._kind,
            launcher_tail=self._quotable(launcher.tail()) if launcher is not None else "",
            adopted=self.origin.adopted,
            rebooted=self.origin.rebooted,
            hang=request.hang,
            over=request.over,
        )

    def _connection(self, rank: int) -> HostConnection:
        return self._context.connections.to(rank)

    def _quotable(self, text: str) -> str:
        return self._redactor(text)

    def _quotable_event(self, event: dict[str, Any] | None) -> dict[str, Any] | None:
        return dict(self._redactor.document(event)) if event is not None else None

    def _start_output(self, rank: int) -> str:
        message = next((failed.message for failed in self.origin.start_failures if failed.rank == rank), "")
        return message or tail(ssh_log_path(self._context.run_dir.attempt(self._context.attempt.number), rank))

    def _memory_killed(self, rank: RankView) -> bool:
        connection = self._connection(rank.number)
        if connection.local:
            return (oom_kill_count() or 0) > (self._context.attempt.memory_kills or 0)
        before = self._context.history.memory_kills(rank.node)
        now = connection.facts.memory_kills if connection.facts is not None else None
        return before is not None and now is not None and now > before

    def _with_ports(self, ranks: Sequence[RankEvidence]) -> list[RankEvidence]:
        """The same with `port`, where the host answers in time: each host is asked once, all at the same time."""
        ports, decisions = dict[int, range](), self._context.history.decisions
        if decisions is not None:
            unbound = [evidence.rank for evidence in ranks if evidence.bind_error is not None]
            first = self._context.attempt.starting_port
            ports |= {rank: ports_of(rank, decisions.network, first) for rank in unbound}
        ports |= {rank.rank: range(port, port + 1) for rank in ranks if (port := rank.busy_master_port) is not None}
        asked = {self._connection(rank) for rank in ports}
        for connection in asked:
            connection.request_port_holders([port for rank in connection.ranks for port in ports.get(rank, ())])
        deadline = time.monotonic() + _ANSWER_LIMIT_S
        while any(connection.port_holders is None for connection in asked) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        holders = {rank: self._connection(rank).port_holders for rank in ports}
        causes = {rank: _port(ports[rank], held) for rank, held in holders.items() if held is not None}
        return [replace(rank, port=causes.get(rank.rank)) for rank in ranks]


def _port(ports: range, holders: Mapping[int, str]) -> str | None:
    held = next((f"port {port} is in use by {holders[port]}" for port in ports if port in holders), None)
    return held or (f"port {ports[0]} was in use; it is free again" if ports else None)
