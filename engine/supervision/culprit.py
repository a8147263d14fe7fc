"""How a run ended, and who began it: from exit records, log tails and the launcher's words to one verdict. Pure.

The launcher's exit code is never asked: it is 0 whatever the ranks did. A rank that lost its peers, or was ended by us
or by the launcher, is a consequence; the cause is the first rank that went by itself.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from engine.models import Reason, RunState
from engine.runs.diagnosis import Finding, findings
from engine.runs.signatures import BY_ID, Kind
from engine.security.sanitise import sanitise
from engine.supervision.watchdog import Hang
from engine.worker.wire import ExitRecord

_CAUSE_LIMIT = 300
_FINAL_LINES = 15
_SSH_FAILED = 255
_LEASE_MARGIN_S = 2.0
"""A silence is counted from the last answer, a lease from the last beat."""
_CANNOT_BIND = re.compile(BY_ID["ring.bind"].pattern)
_NOT_OUR_ADDRESS = frozenset({"49", "99"})
_OF_MLX = ("ring.", "jaccl.", "metal.")
_LIKE_AN_ERROR = re.compile(r"[Ee]rror|[Ee]xception|[Ff]atal|[Aa]bort|[Aa]ssert|[Ii]nterrupt|[Ff]ail|^(?!warning)\w+: ")

_CORRUPTED_FIX = (
    "test the memory of the node that is named, then launch again; where the nodes' chips differ and it comes back in "
    'many parameters at once, set [consistency] on_corruption = "warn"'
)


class Trigger(Enum):
    """Why the attempt was being ended when it was judged."""

    ABORT = auto()
    ENDED = auto()
    """Every rank had gone by itself."""
    RANK = auto()
    """A rank had failed and the others were ended."""
    LAUNCHER_GONE = auto()
    NOT_STARTED = auto()
    """A rank had not appeared in time."""
    HUNG = auto()
    """No rank had made a step for too long."""


@dataclass(frozen=True)
class RankEvidence:
    """What is known of one rank's end."""

    rank: int
    node: str
    python: str
    started: bool = False
    """Its keeper has been seen."""
    record: ExitRecord | None = None
    vanished: bool = False
    """Its keeper is gone and has left no exit record."""
    restarted: bool = False
    """Its node has been restarted since it was started."""
    unreachable_s: float | None = None
    """How long its node has not answered by now, when that is why nothing is known of its end."""
    unreachable_why: str | None = None
    cut_off_s: float = 0.0
    """The longest time for which its node was away."""
    lease_s: float = float("inf")
    clock_ahead_s: float = 0.0
    """Its node's wall clock minus the head's."""
    remote: bool = False
    """Its node is another machine."""
    launcher_code: int | None = None
    """The exit code of its start, for a rank that no keeper speaks for."""
    launcher_words: str = ""
    """What ssh, or whoever else was to start it, has said."""
    tail: str = ""
    """The end of its log."""
    keeper_tail: str = ""
    """The end of its keeper's own log."""
    failure: dict[str, Any] | None = None
    """The trainer's `failure` event."""
    end: dict[str, Any] | None = None
    """The trainer's `end` event."""
    port: str | None = None
    """Which port it could not have, and who has it."""
    left_for_peers: bool = False
    """Our trainer left because a peer was lost, with the exit code that says so."""
    memory_killed: bool = False
    """Its system has killed processes for want of memory since the attempt began."""


@dataclass(frozen=True)
class Evidence:
    """What is known of an attempt's end."""

    ranks: Sequence[RankEvidence]
    trigger: Trigger
    trainer: bool
    """The job is ours and ends with an `end` event; a command of the user's own has none."""
    launcher_tail: str = ""
    adopted: bool = False
    rebooted: bool = False
    """The machine has been restarted since."""
    hang: Hang | None = None


@dataclass(frozen=True)
class Verdict:
    """How the run ended, as its record says it."""

    state: RunState
    reason: Reason
    cause: str | None = None
    rank: int | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    fix: str | None = None
    signature: str | None = None
    """Id of the known failure text that the cause is from."""


class _Weight(Enum):
    """How much a rank's end explains, most first."""

    OWN = 0
    EARLY = 1
    LOST = 2
    """Its node is gone. Like a lease, before the next two: the others lose their peer or the launcher ends them."""
    LEASE = 3
    OUTSIDE = 4
    CONSEQUENCE = 5


@dataclass(frozen=True)
class _Fault:
    weight: _Weight
    at: float
    evidence: RankEvidence

    @property
    def order(self) -> tuple[int, float, int]:
        return self.weight.value, self.at, self.evidence.rank


def judge(evidence: Evidence) -> Verdict:
    """The verdict on an attempt whose processes are all gone, or on their way."""
    if evidence.trigger is Trigger.ABORT:
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as asked")
    if all(_succeeded(rank, evidence.trainer) for rank in evidence.ranks):
        return Verdict(RunState.SUCCEEDED, Reason.COMPLETED)
    faults = sorted(_faults(evidence), key=lambda fault: fault.order)
    if not evidence.trainer and not any(fault.weight is _Weight.CONSEQUENCE for fault in faults):
        # A command that ends with 0 has done its part, unless somebody else was lost for it.
        faults = [fault for fault in faults if fault.weight is not _Weight.EARLY]
    first = faults[0] if faults else None
    if first is not None and first.weight in (_Weight.OWN, _Weight.EARLY):
        return _of_rank(first, evidence)
    if first is not None and first.weight is _Weight.LOST and _explains_the_end(first, evidence.trigger):
        return _of_rank(first, evidence)
    if evidence.hang is not None:
        return _hung(evidence, evidence.hang)
    if evidence.rebooted:
        return _lost(evidence, "the machine was restarted while the run was going")
    if evidence.trigger is Trigger.LAUNCHER_GONE:
        running = any(rank.started for rank in evidence.ranks)
        when = "was ended from outside while ranks were running" if running else "ended before the ranks had started"
        return _of_launcher(evidence, f"mlx.launch {when}")
    if evidence.trigger is Trigger.NOT_STARTED:
        return _not_started(evidence)
    if first is not None:
        return _of_rank(first, evidence)
    if evidence.adopted:
        return _lost(evidence, "the supervisor was lost, and with it how the ranks ended")
    return _of_launcher(evidence, "no rank has said how it ended")


def is_consequence(rank: RankEvidence) -> bool:
    """Whether a rank's end is another rank's fault: it lost its peers, or was ended by somebody."""
    if rank.record is not None and rank.record.stopped_by is not None:
        return True
    return _lost_its_peers(rank) or _left_together(rank)


def lacks_port(rank: RankEvidence) -> bool:
    """Whether a rank ended because it could not bind its ring port."""
    return _CANNOT_BIND.search(_final(rank.tail) + "\n" + _said_in_failure(rank)) is not None


def _succeeded(rank: RankEvidence, trainer: bool) -> bool:
    if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
        return False
    return not trainer or (rank.end is not None and rank.end.get("completed") is True)


def _faults(evidence: Evidence) -> list[_Fault]:
    faults = []
    for rank in evidence.ranks:
        weight = _weight(rank, evidence.trainer, evidence.rebooted)
        if weight is not None:
            at = rank.record.ended_at - rank.clock_ahead_s if rank.record is not None else float("-inf")
            faults.append(_Fault(weight, at, rank))
    return faults


def _weight(rank: RankEvidence, trainer: bool, rebooted: bool) -> _Weight | None:
    record = rank.record
    if record is None:
        if rank.launcher_code is not None and not rank.started:
            if rank.remote and rank.launcher_code == _SSH_FAILED and not (rank.launcher_words or rank.keeper_tail):
                # That is how ssh ends when the launcher ends it, because another rank did not start.
                return _Weight.CONSEQUENCE
            # The launcher ends with TERM the ranks that have not failed; -15 is a consequence.
            return _Weight.OWN if rank.launcher_code not in (0, -signal.SIGTERM) else None
        if rank.restarted or rank.unreachable_s is not None:
            return _Weight.LOST
        return _Weight.OWN if rank.vanished and not rebooted else None
    if record.stopped_by is not None:
        return _weight_of_stopped(rank, record)
    if _lost_its_peers(rank) or _left_together(rank):
        return _Weight.CONSEQUENCE
    if record.code == 0:
        return None if _succeeded(rank, trainer) and trainer else _Weight.EARLY
    return _Weight.OWN


def _weight_of_stopped(rank: RankEvidence, record: ExitRecord) -> _Weight | None:
    if rank.failure is not None and not _lost_its_peers(rank):
        # It had failed by itself when we came to end it.
        return _Weight.OWN
    if record.stopped_by == "lease":
        return _Weight.LEASE
    return _Weight.OUTSIDE if (record.stopped_by or "").startswith("signal") else None


def _lost_its_peers(rank: RankEvidence) -> bool:
    if rank.left_for_peers:
        return True
    if rank.failure is not None:
        if rank.failure.get("error_type") == "PeerLost":
            return True
        text = str(rank.failure.get("message", ""))
    else:
        text = _final(rank.tail)
    known = _known(text)
    # MLX says of its own failures too that a connection is gone then; of other texts nobody knows that they mattered.
    own = any(found.kind is Kind.CAUSE and _is_of(found, _OF_MLX) for found in known)
    return not own and any(found.kind is Kind.CONSEQUENCE for found in known)


def _left_together(rank: RankEvidence) -> bool:
    """A trainer stops when any rank has been told to: one that has only agreed has not begun it."""
    return rank.end is not None and rank.end.get("stopped") is True


def _of_rank(fault: _Fault, evidence: Evidence) -> Verdict:
    rank = fault.evidence
    if rank.failure is not None and rank.failure.get("error_type") == "Corrupted":
        return _corrupted(rank)
    reason, cause = _explained(fault, evidence)
    record = rank.record
    return Verdict(
        RunState.FAILED,
        reason,
        _cut(cause),
        rank.rank,
        rank.node,
        record.code if record is not None else rank.launcher_code,
        record.signal if record is not None else None,
    )


def _corrupted(rank: RankEvidence) -> Verdict:
    """A rank is named only where it is known to be the one."""
    failure, record = rank.failure or {}, rank.record
    certain = failure.get("certain") is True
    return Verdict(
        RunState.FAILED,
        Reason.CORRUPTED,
        _cut(sanitise(str(failure.get("message")).encode(errors="replace"))),
        rank.rank if certain else None,
        rank.node if certain else None,
        record.code if record is not None else None,
        fix=_CORRUPTED_FIX,
    )


def _explained(fault: _Fault, evidence: Evidence) -> tuple[Reason, str]:
    rank, record = fault.evidence, fault.evidence.record
    if record is None:
        return _node_lost(rank) if fault.weight is _Weight.LOST else _without_record(rank)
    if fault.weight is _Weight.LEASE and rank.cut_off_s > rank.lease_s - _LEASE_MARGIN_S:
        cause = f"{rank.node} was cut off for {rank.cut_off_s:.0f} s"
        return Reason.NODE_LOST, f"{cause}; its lease of {rank.lease_s:g} s has ended its rank"
    if fault.weight is _Weight.LEASE:
        return Reason.SUPERVISOR_LOST, "no supervisor was there for longer than the ranks' lease"
    if fault.weight is _Weight.OUTSIDE:
        return Reason.RANK_KILLED, f"its keeper was told to stop from outside ({record.stopped_by})"
    if record.error is not None:
        return Reason.LAUNCH_FAILED, record.error
    text = _final(rank.tail) + "\n" + _said_in_failure(rank)
    if (bound := _CANNOT_BIND.search(text)) is not None:
        return Reason.LAUNCH_FAILED, _no_port(rank, bound["errno"])
    last = _last_words(rank)
    if rank.failure is not None and rank.failure.get("error_type") == "Diverged":
        return Reason.DIVERGED, last
    if record.code == 0:
        return Reason.RANK_FAILED, _left_early(rank, evidence)
    ended = _how(record)
    reasons = {found.signature.reason for found in _known(text) if found.signature is not None}
    if Reason.OUT_OF_MEMORY in reasons or (record.signal == signal.SIGKILL and rank.memory_killed):
        return Reason.OUT_OF_MEMORY, f"out of memory: {last or ended}"
    if Reason.DISK_FULL in reasons:
        return Reason.DISK_FULL, f"disk full: {last or ended}"
    if record.signal is not None:
        return Reason.RANK_KILLED, f"{ended}: {last}" if _LIKE_AN_ERROR.search(last) else ended
    if not last:
        return Reason.RANK_FAILED, f"{ended} and said nothing"
    return Reason.RANK_FAILED, f"{ended}{': ' if _LIKE_AN_ERROR.search(last) else '; its last words: '}{last}"


def _without_record(rank: RankEvidence) -> tuple[Reason, str]:
    if not rank.started and rank.launcher_code is not None:
        said = _last_line(rank.keeper_tail)
        if rank.remote and rank.launcher_code == _SSH_FAILED and not said:
            said = _last_line(rank.launcher_words) or "ssh said nothing"
            return Reason.LAUNCH_FAILED, f"{rank.node} could not be reached: {said}"
        said = said or _last_line(rank.launcher_words)
        if rank.launcher_code == 127:
            return Reason.LAUNCH_FAILED, f"the interpreter {rank.python} is missing on {rank.node}"
        detail = f": {said}" if said else ""
        return Reason.LAUNCH_FAILED, f"{rank.python} did not start the rank (exit code {rank.launcher_code}){detail}"
    return Reason.RANK_KILLED, "its keeper was killed and left no exit record"


def _explains_the_end(fault: _Fault, trigger: Trigger) -> bool:
    """A node that is away while the launch fails is one thing among others then."""
    return fault.evidence.started or trigger in (Trigger.RANK, Trigger.ENDED)


def _node_lost(rank: RankEvidence) -> tuple[Reason, str]:
    if rank.restarted:
        return Reason.NODE_LOST, f"{rank.node} was restarted while its rank was running"
    why = f" ({rank.unreachable_why})" if rank.unreachable_why else ""
    cause = f"{rank.node} has not answered for {rank.unreachable_s or 0.0:.0f} s{why}"
    over = (rank.unreachable_s or 0.0) > rank.lease_s
    return Reason.NODE_LOST, f"{cause}; its lease of {rank.lease_s:g} s has ended its rank" if over else cause


def _no_port(rank: RankEvidence, errno: str) -> str:
    if errno in _NOT_OUR_ADDRESS:
        return f"its ring address is not one of {rank.node} (error {errno})"
    return rank.port or f"a ring port is in use (error {errno})"


def _left_early(rank: RankEvidence, evidence: Evidence) -> str:
    if rank.end is not None and rank.end.get("stopped") is True:
        return f"stopped at iteration {rank.end.get('iteration')} though nobody asked"
    if evidence.trainer:
        return "left with exit code 0 before its training was complete"
    return "left early with exit code 0 while others still needed it"


def _how(record: ExitRecord) -> str:
    if record.signal is None:
        return f"exited with code {record.code}"
    try:
        name = signal.Signals(record.signal).name
    except ValueError:
        name = "a signal"
    return f"killed by {name} (signal {record.signal})"


def _not_started(evidence: Evidence) -> Verdict:
    missing = [rank for rank in evidence.ranks if not rank.started]
    said = _last_line(evidence.launcher_tail)
    cause = f"rank {missing[0].rank} did not start in time" if missing else "the ranks did not start in time"
    cause += f"; mlx.launch said: {said}" if said else "; mlx.launch said nothing"
    rank, node = (missing[0].rank, missing[0].node) if missing else (None, None)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, _cut(cause), rank, node)


def _of_launcher(evidence: Evidence, cause: str) -> Verdict:
    said = _last_line(evidence.launcher_tail)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, _cut(f"{cause}; it said: {said}" if said else cause))


def _hung(evidence: Evidence, hang: Hang) -> Verdict:
    rank, said = _stood_still(evidence, hang)
    limit = f"no step for {hang.silent_s:.0f} s, over the limit of {hang.limit_s:.0f} s for {hang.doing}"
    cause = f"{limit}; {said}" if said else limit
    named = (rank.rank, rank.node) if rank is not None else (None, None)
    return Verdict(RunState.FAILED, Reason.HUNG, _cut(cause), *named)


def _stood_still(evidence: Evidence, hang: Hang) -> tuple[RankEvidence | None, str]:
    """Who it was, and how that is known: the one that was behind, or the one that alone had to be ended when all others
    left."""
    behind = next((rank for rank in evidence.ranks if rank.rank == hang.rank), None)
    if behind is not None:
        return behind, f"rank {behind.rank} on {behind.node} was the first to stand still"
    deaf = [rank for rank in evidence.ranks if rank.record is None or not _lost_its_peers(rank)]
    if len(deaf) == 1 and len(evidence.ranks) > 1:
        return deaf[0], f"rank {deaf[0].rank} on {deaf[0].node} did not answer when the others left"
    return None, "which rank stood still first cannot be told"


def _lost(evidence: Evidence, cause: str) -> Verdict:
    unknown = next((rank for rank in evidence.ranks if rank.record is None), None)
    rank, node = (unknown.rank, unknown.node) if unknown else (None, None)
    return Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, rank, node)


def _last_words(rank: RankEvidence) -> str:
    if rank.failure is not None:
        return _last_line(f"{rank.failure.get('error_type')}: {rank.failure.get('message')}")
    # A command that ends well may have printed anything; only what fails is quoted, and its last line says why.
    return _last_line(rank.tail)


def _said_in_failure(rank: RankEvidence) -> str:
    return f"{rank.failure.get('error_type')}: {rank.failure.get('message')}" if rank.failure is not None else ""


def _known(text: str) -> list[Finding]:
    return findings(sanitise(line.encode(errors="replace")) for line in text.splitlines())


def _is_of(found: Finding, families: tuple[str, ...]) -> bool:
    return found.signature is not None and found.signature.id.startswith(families)


def _final(text: str) -> str:
    return "\n".join(text.splitlines()[-_FINAL_LINES:])


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return sanitise(lines[-1].strip().encode(errors="replace"), _CAUSE_LIMIT) if lines else ""


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _CAUSE_LIMIT else line[: _CAUSE_LIMIT - 1] + "…"
