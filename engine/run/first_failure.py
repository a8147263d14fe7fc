"""Which rank failed first, and why: how much each rank's end explains, its reason, and its cause as one line.

The first rank that ended by itself is the cause; one that lost a peer or was ended from outside is a consequence.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import Enum

from engine.models import Reason
from engine.protocol.attempt import ExitRecord
from engine.run.diagnosis import Finding
from engine.run.failure_evidence import (
    CANNOT_BIND,
    FailureEvidence,
    RankEvidence,
    final_lines,
    final_output,
    known_failures,
    last_line,
    reported_exception,
)
from engine.run.signatures import SignatureKind

SSH_FAILED = 255
"""ssh's own exit code; all others are the command's."""
_OF_MLX = ("ring.", "jaccl.", "metal.")


class Weight(Enum):
    """How much a rank's end explains, the most first."""

    OWN = 0
    EARLY = 1
    LOST = 2
    """Its node is gone. Like a lease, before the next two: the others lose their peer or the launcher ends them."""
    LEASE = 3
    OUTSIDE = 4
    CONSEQUENCE = 5


@dataclass(frozen=True)
class Fault:
    """The end of one rank that was not meant to end so."""

    weight: Weight
    at: float
    """By the head's wall clock, s; -inf where it is not known."""
    evidence: RankEvidence

    @property
    def order(self) -> tuple[int, float, int]:
        """The fault that explains the end sorts first."""
        return self.weight.value, self.at, self.evidence.rank


def faults_of(evidence: FailureEvidence) -> list[Fault]:
    """In the order of the ranks."""
    faults = []
    for rank in evidence.ranks:
        weight = _weight(rank, evidence.trainer, evidence.rebooted)
        if weight is not None:
            at = rank.record.ended_at - rank.clock_ahead_s if rank.record is not None else float("-inf")
            faults.append(Fault(weight, at, rank))
    return faults


def is_consequence(rank: RankEvidence) -> bool:
    """The rank's end follows from another's: it lost its peers, or was ended from outside."""
    if rank.record is not None and rank.record.stopped_by is not None:
        return True
    return lost_its_peers(rank) or _left_together(rank)


def succeeded(rank: RankEvidence, trainer: bool) -> bool:
    """The rank completed its work; our `trainer` reports that itself."""
    if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
        return False
    return not trainer or (rank.end is not None and rank.end.get("completed") is True)


def lost_its_peers(rank: RankEvidence) -> bool:
    """The rank ended because a connection to another rank was gone."""
    if rank.left_for_peers:
        return True
    if rank.failure is not None:
        if rank.failure.get("error_type") == "PeerLost":
            return True
        text = str(rank.failure.get("message", ""))
    else:
        text = final_lines(rank.tail)
    known = known_failures(text)
    # After its own failures too MLX reports that a connection is gone; whether other failures mattered is not known.
    own = any(found.kind is SignatureKind.CAUSE and _is_from(found, _OF_MLX) for found in known)
    return not own and any(found.kind is SignatureKind.CONSEQUENCE for found in known)


def _weight(rank: RankEvidence, trainer: bool, rebooted: bool) -> Weight | None:
    record = rank.record
    if record is None:
        return _weight_without_record(rank, rebooted)
    if record.stopped_by is not None:
        return _weight_of_stopped(rank, record)
    if lost_its_peers(rank) or _left_together(rank):
        return Weight.CONSEQUENCE
    if record.code == 0:
        return None if succeeded(rank, trainer) and trainer else Weight.EARLY
    return Weight.OWN


def _weight_without_record(rank: RankEvidence, rebooted: bool) -> Weight | None:
    if rank.launcher_code is not None and not rank.started:
        if rank.remote and rank.launcher_code == SSH_FAILED and not (rank.launcher_output or rank.keeper_tail):
            # That is how ssh ends when the launcher ends it, because another rank did not start.
            return Weight.CONSEQUENCE
        # The launcher ends with TERM the ranks that have not failed; -15 is a consequence.
        return Weight.OWN if rank.launcher_code not in (0, -signal.SIGTERM) else None
    if rank.restarted or rank.unreachable_s is not None:
        return Weight.LOST
    return Weight.OWN if rank.vanished and not rebooted else None


def _weight_of_stopped(rank: RankEvidence, record: ExitRecord) -> Weight | None:
    if rank.failure is not None and not lost_its_peers(rank):
        # It had failed by itself before it was ended.
        return Weight.OWN
    if record.stopped_by == "lease":
        return Weight.LEASE
    return Weight.OUTSIDE if (record.stopped_by or "").startswith("signal") else None


def _left_together(rank: RankEvidence) -> bool:
    """The trainer stopped because another rank received a stop."""
    return rank.end is not None and rank.end.get("stopped") is True


def _is_from(found: Finding, families: tuple[str, ...]) -> bool:
    return found.signature is not None and found.signature.id.startswith(families)


_LEASE_MARGIN_S = 2.0
"""A silence is counted from the last answer, a lease from the last heartbeat."""
_NOT_OUR_ADDRESS = frozenset({"49", "99"})
_LIKE_AN_ERROR = re.compile(r"[Ee]rror|[Ee]xception|[Ff]atal|[Aa]bort|[Aa]ssert|[Ii]nterrupt|[Ff]ail|^(?!warning)\w+: ")


def reason_and_cause(fault: Fault, evidence: FailureEvidence) -> tuple[Reason, str]:
    """The reason and cause of the fault that began the attempt's end; the cause quotes output and may be long."""
    rank, record = fault.evidence, fault.evidence.record
    if record is None:
        return _node_lost(rank) if fault.weight is Weight.LOST else _without_record(rank)
    if fault.weight is Weight.LEASE and rank.cut_off_s > rank.lease_s - _LEASE_MARGIN_S:
        cause = f"{rank.node} was cut off for {rank.cut_off_s:.0f} s"
        return Reason.NODE_LOST, f"{cause}; its lease of {rank.lease_s:g} s has ended its rank"
    if fault.weight is Weight.LEASE:
        return Reason.SUPERVISOR_LOST, "no supervisor was there for longer than the ranks' lease"
    if fault.weight is Weight.OUTSIDE:
        return Reason.RANK_KILLED, f"its keeper was stopped from outside ({record.stopped_by})"
    if record.error is not None:
        return Reason.LAUNCH_FAILED, record.error
    text = final_output(rank)
    if (bound := CANNOT_BIND.search(text)) is not None:
        return Reason.LAUNCH_FAILED, _no_port(rank, bound["errno"])
    last = _last_output(rank)
    if rank.failure is not None and rank.failure.get("error_type") == "Diverged":
        return Reason.DIVERGED, last
    if record.code == 0:
        return Reason.RANK_FAILED, _left_early(rank, evidence)
    ended = _how_ended(record)
    reasons = {found.signature.reason for found in known_failures(text) if found.signature is not None}
    if Reason.OUT_OF_MEMORY in reasons or (record.signal == signal.SIGKILL and rank.memory_killed):
        return Reason.OUT_OF_MEMORY, f"out of memory: {last or ended}"
    if Reason.DISK_FULL in reasons:
        return Reason.DISK_FULL, f"disk full: {last or ended}"
    if record.signal is not None:
        return Reason.RANK_KILLED, f"{ended}: {last}" if _LIKE_AN_ERROR.search(last) else ended
    if not last:
        return Reason.RANK_FAILED, f"{ended} without output"
    return Reason.RANK_FAILED, f"{ended}{': ' if _LIKE_AN_ERROR.search(last) else '; its last output: '}{last}"


def _without_record(rank: RankEvidence) -> tuple[Reason, str]:
    if not rank.started and rank.launcher_code is not None:
        output = last_line(rank.keeper_tail)
        if rank.remote and rank.launcher_code == SSH_FAILED and not output:
            output = last_line(rank.launcher_output) or "ssh reported nothing"
            return Reason.LAUNCH_FAILED, f"{rank.node} could not be reached: {output}"
        output = output or last_line(rank.launcher_output)
        if rank.launcher_code == 127:
            return Reason.LAUNCH_FAILED, f"the interpreter {rank.python} is missing on {rank.node}"
        detail = f": {output}" if output else ""
        return Reason.LAUNCH_FAILED, f"{rank.python} did not start the rank (exit code {rank.launcher_code}){detail}"
    return Reason.RANK_KILLED, "its keeper was killed and left no exit record"


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


def _left_early(rank: RankEvidence, evidence: FailureEvidence) -> str:
    if rank.end is not None and rank.end.get("stopped") is True:
        return f"stopped at iteration {rank.end.get('iteration')} though that was not requested"
    if evidence.trainer:
        return "left with exit code 0 before its training was complete"
    return "left early with exit code 0 while others still needed it"


def _how_ended(record: ExitRecord) -> str:
    if record.signal is None:
        return f"exited with code {record.code}"
    try:
        name = signal.Signals(record.signal).name
    except ValueError:
        name = "a signal"
    return f"killed by {name} (signal {record.signal})"


def _last_output(rank: RankEvidence) -> str:
    if rank.failure is not None:
        return last_line(reported_exception(rank))
    # A command that ends well may have printed anything; only what fails is quoted, and its last line has the reason.
    return last_line(rank.tail)
