"""How a run ended, and who began it: from exit records, log tails and the launcher's words to one verdict. Pure.

The launcher's exit code is never asked: it is 0 whatever the ranks did. A rank that lost its peers, or was ended by us
or by the launcher, is a consequence; the cause is the first rank that went by itself.
"""

from __future__ import annotations

from engine.models import Reason, RunState
from engine.security.sanitise import sanitise
from engine.supervision.judging.cause import reason_and_cause
from engine.supervision.judging.evidence import Evidence, RankEvidence, Trigger
from engine.supervision.judging.quoting import cut, last_line
from engine.supervision.judging.verdict import Verdict
from engine.supervision.judging.weight import Fault, Weight, faults_of, lost_its_peers, succeeded
from engine.supervision.watchdog import Hang

_CORRUPTED_FIX = (
    "test the memory of the node that is named, then launch again; where the nodes' chips differ and it comes back in "
    'many parameters at once, set [consistency] on_corruption = "warn"'
)


def judge(evidence: Evidence) -> Verdict:
    """The verdict on an attempt whose processes are all gone, or on their way."""
    if evidence.trigger is Trigger.ABORT:
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as asked")
    if all(succeeded(rank, evidence.trainer) for rank in evidence.ranks):
        return Verdict(RunState.SUCCEEDED, Reason.COMPLETED)
    faults = sorted(faults_of(evidence), key=lambda fault: fault.order)
    if not evidence.trainer and not any(fault.weight is Weight.CONSEQUENCE for fault in faults):
        # A command that ends with 0 has done its part, unless somebody else was lost for it.
        faults = [fault for fault in faults if fault.weight is not Weight.EARLY]
    first = faults[0] if faults else None
    if first is not None and first.weight in (Weight.OWN, Weight.EARLY):
        return _of_rank(first, evidence)
    if first is not None and first.weight is Weight.LOST and _explains_the_end(first, evidence.trigger):
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


def _of_rank(fault: Fault, evidence: Evidence) -> Verdict:
    rank = fault.evidence
    if rank.failure is not None and rank.failure.get("error_type") == "Corrupted":
        return _corrupted(rank)
    reason, cause = reason_and_cause(fault, evidence)
    record = rank.record
    return Verdict(
        RunState.FAILED,
        reason,
        cut(cause),
        rank.rank,
        rank.node,
        record.code if record is not None else rank.launcher_code,
        record.signal if record is not None else None,
    )


def _explains_the_end(fault: Fault, trigger: Trigger) -> bool:
    """A node that is away while the launch fails is one thing among others then."""
    return fault.evidence.started or trigger in (Trigger.RANK, Trigger.ENDED)


def _corrupted(rank: RankEvidence) -> Verdict:
    """A rank is named only where it is known to be the one."""
    failure, record = rank.failure or {}, rank.record
    certain = failure.get("certain") is True
    return Verdict(
        RunState.FAILED,
        Reason.CORRUPTED,
        cut(sanitise(str(failure.get("message")).encode(errors="replace"))),
        rank.rank if certain else None,
        rank.node if certain else None,
        record.code if record is not None else None,
        fix=_CORRUPTED_FIX,
    )


def _not_started(evidence: Evidence) -> Verdict:
    missing = [rank for rank in evidence.ranks if not rank.started]
    said = last_line(evidence.launcher_tail)
    cause = f"rank {missing[0].rank} did not start in time" if missing else "the ranks did not start in time"
    cause += f"; mlx.launch said: {said}" if said else "; mlx.launch said nothing"
    rank, node = (missing[0].rank, missing[0].node) if missing else (None, None)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, cut(cause), rank, node)


def _of_launcher(evidence: Evidence, cause: str) -> Verdict:
    said = last_line(evidence.launcher_tail)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, cut(f"{cause}; it said: {said}" if said else cause))


def _hung(evidence: Evidence, hang: Hang) -> Verdict:
    rank, said = _stood_still(evidence, hang)
    limit = f"no step for {hang.silent_s:.0f} s, over the limit of {hang.limit_s:.0f} s for {hang.doing}"
    cause = f"{limit}; {said}" if said else limit
    named = (rank.rank, rank.node) if rank is not None else (None, None)
    return Verdict(RunState.FAILED, Reason.HUNG, cut(cause), *named)


def _stood_still(evidence: Evidence, hang: Hang) -> tuple[RankEvidence | None, str]:
    """Who it was, and how that is known: the one that was behind, or the one that alone had to be ended when all others
    left."""
    behind = next((rank for rank in evidence.ranks if rank.rank == hang.rank), None)
    if behind is not None:
        return behind, f"rank {behind.rank} on {behind.node} was the first to stand still"
    deaf = [rank for rank in evidence.ranks if rank.record is None or not lost_its_peers(rank)]
    if len(deaf) == 1 and len(evidence.ranks) > 1:
        return deaf[0], f"rank {deaf[0].rank} on {deaf[0].node} did not answer when the others left"
    return None, "which rank stood still first cannot be told"


def _lost(evidence: Evidence, cause: str) -> Verdict:
    unknown = next((rank for rank in evidence.ranks if rank.record is None), None)
    rank, node = (unknown.rank, unknown.node) if unknown else (None, None)
    return Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, rank, node)
