"""Why one rank ended, as its exit record, its log and its node tell: the reason, and the cause in words."""

from __future__ import annotations

import re
import signal

from engine.models import Reason
from engine.runs.signatures import BY_ID
from engine.supervision.judging.evidence import Evidence, RankEvidence
from engine.supervision.judging.quoting import final, known, last_line, said_in_failure
from engine.supervision.judging.weight import SSH_FAILED, Fault, Weight
from engine.worker.wire import ExitRecord

_LEASE_MARGIN_S = 2.0
"""A silence is counted from the last answer, a lease from the last beat."""
_CANNOT_BIND = re.compile(BY_ID["ring.bind"].pattern)
_NOT_OUR_ADDRESS = frozenset({"49", "99"})
_LIKE_AN_ERROR = re.compile(r"[Ee]rror|[Ee]xception|[Ff]atal|[Aa]bort|[Aa]ssert|[Ii]nterrupt|[Ff]ail|^(?!warning)\w+: ")


def reason_and_cause(fault: Fault, evidence: Evidence) -> tuple[Reason, str]:
    """Of the fault that has begun the end of what `evidence` tells of; the cause is quoted, and may be long."""
    rank, record = fault.evidence, fault.evidence.record
    if record is None:
        return _node_lost(rank) if fault.weight is Weight.LOST else _without_record(rank)
    if fault.weight is Weight.LEASE and rank.cut_off_s > rank.lease_s - _LEASE_MARGIN_S:
        cause = f"{rank.node} was cut off for {rank.cut_off_s:.0f} s"
        return Reason.NODE_LOST, f"{cause}; its lease of {rank.lease_s:g} s has ended its rank"
    if fault.weight is Weight.LEASE:
        return Reason.SUPERVISOR_LOST, "no supervisor was there for longer than the ranks' lease"
    if fault.weight is Weight.OUTSIDE:
        return Reason.RANK_KILLED, f"its keeper was told to stop from outside ({record.stopped_by})"
    if record.error is not None:
        return Reason.LAUNCH_FAILED, record.error
    text = _told_at_the_end(rank)
    if (bound := _CANNOT_BIND.search(text)) is not None:
        return Reason.LAUNCH_FAILED, _no_port(rank, bound["errno"])
    last = _last_words(rank)
    if rank.failure is not None and rank.failure.get("error_type") == "Diverged":
        return Reason.DIVERGED, last
    if record.code == 0:
        return Reason.RANK_FAILED, _left_early(rank, evidence)
    ended = _how(record)
    reasons = {found.signature.reason for found in known(text) if found.signature is not None}
    if Reason.OUT_OF_MEMORY in reasons or (record.signal == signal.SIGKILL and rank.memory_killed):
        return Reason.OUT_OF_MEMORY, f"out of memory: {last or ended}"
    if Reason.DISK_FULL in reasons:
        return Reason.DISK_FULL, f"disk full: {last or ended}"
    if record.signal is not None:
        return Reason.RANK_KILLED, f"{ended}: {last}" if _LIKE_AN_ERROR.search(last) else ended
    if not last:
        return Reason.RANK_FAILED, f"{ended} and said nothing"
    return Reason.RANK_FAILED, f"{ended}{': ' if _LIKE_AN_ERROR.search(last) else '; its last words: '}{last}"


def lacks_port(rank: RankEvidence) -> bool:
    """Whether a rank ended because it could not bind its ring port."""
    return _CANNOT_BIND.search(_told_at_the_end(rank)) is not None


def _without_record(rank: RankEvidence) -> tuple[Reason, str]:
    if not rank.started and rank.launcher_code is not None:
        said = last_line(rank.keeper_tail)
        if rank.remote and rank.launcher_code == SSH_FAILED and not said:
            said = last_line(rank.launcher_words) or "ssh said nothing"
            return Reason.LAUNCH_FAILED, f"{rank.node} could not be reached: {said}"
        said = said or last_line(rank.launcher_words)
        if rank.launcher_code == 127:
            return Reason.LAUNCH_FAILED, f"the interpreter {rank.python} is missing on {rank.node}"
        detail = f": {said}" if said else ""
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


def _told_at_the_end(rank: RankEvidence) -> str:
    return final(rank.tail) + "\n" + said_in_failure(rank)


def _last_words(rank: RankEvidence) -> str:
    if rank.failure is not None:
        return last_line(said_in_failure(rank))
    # A command that ends well may have printed anything; only what fails is quoted, and its last line says why.
    return last_line(rank.tail)
