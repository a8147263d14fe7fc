"""From the evidence of an attempt's end to one verdict: its reason, the first failure, the cause and its fix.

The launcher's exit code is never used: it is 0 whatever the ranks did. A rank that lost its peers, or was ended by us
or by the launcher, is a consequence; the cause is the first rank that ended by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.models import Reason, RunState
from engine.run.decide import Trigger
from engine.run.diagnosis import first_cause
from engine.run.events import Hang, Verdict
from engine.run.failure_evidence import (
    FailureEvidence,
    RankEvidence,
    last_line,
    one_line,
    reported_exception,
    sanitised_lines,
)
from engine.run.first_failure import Fault, Weight, faults_of, lost_its_peers, reason_and_cause, succeeded
from engine.security.sanitise import sanitise
from engine.store.layout import RunDir

_CORRUPTED_FIX = (
    "test the memory of the node that is named, then launch again; where the nodes' chips differ and it comes back in "
    'many parameters at once, set [consistency] on_corruption = "warn"'
)


def verdict_on(evidence: FailureEvidence) -> Verdict:
    """The verdict on an attempt whose processes are all gone, or being ended."""
    if evidence.trigger is Trigger.ABORT:
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as requested")
    if all(succeeded(rank, evidence.trainer) for rank in evidence.ranks):
        return Verdict(RunState.SUCCEEDED, Reason.COMPLETED)
    faults = sorted(faults_of(evidence), key=lambda fault: fault.order)
    if not evidence.trainer and not any(fault.weight is Weight.CONSEQUENCE for fault in faults):
        # A command that ends with 0 has done its part, unless another rank was lost because of it.
        faults = [fault for fault in faults if fault.weight is not Weight.EARLY]
    first = faults[0] if faults else None
    if first is not None and _explains_the_end(first, evidence.trigger):
        return _of_rank(first, evidence)
    of_attempt = _of_attempt(evidence)
    if of_attempt is None and first is not None:
        return _of_rank(first, evidence)
    return of_attempt or _unexplained(evidence)


def _of_attempt(evidence: FailureEvidence) -> Verdict | None:
    """Ends that no rank's own end explains."""
    if evidence.hang is not None:
        return _hung(evidence, evidence.hang)
    if evidence.rebooted:
        return _lost(evidence, "the machine was restarted while the run was going")
    if evidence.trigger is Trigger.LAUNCHER_GONE:
        running = any(rank.started for rank in evidence.ranks)
        when = "was ended from outside while ranks were running" if running else "ended before the ranks had started"
        return _of_launcher(evidence, f"mlx.launch {when}")
    return _not_started(evidence) if evidence.trigger is Trigger.NOT_STARTED else None


def _unexplained(evidence: FailureEvidence) -> Verdict:
    if evidence.adopted:
        return _lost(evidence, "the supervisor was lost, and with it how the ranks ended")
    return _of_launcher(evidence, "no rank has reported how it ended")


def _of_rank(fault: Fault, evidence: FailureEvidence) -> Verdict:
    rank = fault.evidence
    if rank.failure is not None and rank.failure.get("error_type") == "Corrupted":
        return _corrupted(rank)
    reason, cause = reason_and_cause(fault, evidence)
    record = rank.record
    return Verdict(
        RunState.FAILED,
        reason,
        one_line(cause),
        rank.rank,
        rank.node,
        record.code if record is not None else rank.launcher_code,
        record.signal if record is not None else None,
    )


def _explains_the_end(fault: Fault, trigger: Trigger) -> bool:
    if fault.weight is Weight.LOST:
        # A node that is away while the launch fails may not be the cause.
        return fault.evidence.started or trigger in (Trigger.RANK, Trigger.ENDED)
    return fault.weight in (Weight.OWN, Weight.EARLY)


def _corrupted(rank: RankEvidence) -> Verdict:
    """A rank is named only when it is certain."""
    failure, record = rank.failure or {}, rank.record
    certain = failure.get("certain") is True
    return Verdict(
        RunState.FAILED,
        Reason.CORRUPTED,
        one_line(sanitise(str(failure.get("message")).encode(errors="replace"))),
        rank.rank if certain else None,
        rank.node if certain else None,
        record.code if record is not None else None,
        fix=_CORRUPTED_FIX,
    )


def _not_started(evidence: FailureEvidence) -> Verdict:
    missing = [rank for rank in evidence.ranks if not rank.started]
    output = last_line(evidence.launcher_tail)
    cause = f"rank {missing[0].rank} did not start in time" if missing else "the ranks did not start in time"
    cause += f"; mlx.launch reported: {output}" if output else "; mlx.launch reported nothing"
    rank, node = (missing[0].rank, missing[0].node) if missing else (None, None)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, one_line(cause), rank, node)


def _of_launcher(evidence: FailureEvidence, cause: str) -> Verdict:
    output = last_line(evidence.launcher_tail)
    cause = one_line(f"{cause}; its last output: {output}" if output else cause)
    return Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, cause)


def _hung(evidence: FailureEvidence, hang: Hang) -> Verdict:
    rank, how = _stalled_rank(evidence, hang)
    limit = f"no step for {hang.silent_s:.0f} s, over the limit of {hang.limit_s:.0f} s for {hang.doing}"
    cause = f"{limit}; {how}" if how else limit
    named = (rank.rank, rank.node) if rank is not None else (None, None)
    return Verdict(RunState.FAILED, Reason.HUNG, one_line(cause), *named)


def _stalled_rank(evidence: FailureEvidence, hang: Hang) -> tuple[RankEvidence | None, str]:
    """The rank that stalled, and how that is known: it was behind, or it alone did not leave with the others."""
    behind = next((rank for rank in evidence.ranks if rank.rank == hang.rank), None)
    if behind is not None:
        return behind, f"rank {behind.rank} on {behind.node} was the first to stall"
    unresponsive = [rank for rank in evidence.ranks if rank.record is None or not lost_its_peers(rank)]
    if len(unresponsive) == 1 and len(evidence.ranks) > 1:
        return unresponsive[
            0
        ], f"rank {unresponsive[0].rank} on {unresponsive[0].node} did not answer when the others left"
    return None, "which rank stalled first is not known"


def _lost(evidence: FailureEvidence, cause: str) -> Verdict:
    unknown = next((rank for rank in evidence.ranks if rank.record is None), None)
    rank, node = (unknown.rank, unknown.node) if unknown else (None, None)
    return Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, rank, node)


def with_diagnosis(
    verdict: Verdict,
    evidence: FailureEvidence,
    run_dir: RunDir,
    log_bases: Mapping[int, int],
    environment: Mapping[str, str],
) -> Verdict:
    """A failure's verdict with its first cause and its fix, where they are known, without the secrets of
    `environment`. Reads the mirrors from `log_bases` on, and the evidence where they lack something."""
    if verdict.state is not RunState.FAILED:
        return verdict
    output, reported = _exit_output(verdict, evidence), _reported_exceptions(verdict, evidence)
    found = first_cause(run_dir, verdict, log_bases, exit_output=output, reported=reported, environment=environment)
    return verdict if found is None else replace(verdict, cause=found.cause, fix=found.fix, signature=found.signature)


def _exit_output(verdict: Verdict, evidence: FailureEvidence) -> list[str]:
    blamed = [rank for rank in evidence.ranks if rank.rank == verdict.rank]
    texts = [text for rank in blamed for text in (rank.keeper_tail, rank.launcher_output, rank.tail)]
    texts += [str(rank.failure.get("message", "")) for rank in blamed if rank.failure is not None]
    texts += [evidence.launcher_tail] if not blamed else []
    return [line for text in texts for line in sanitised_lines(text)]


def _reported_exceptions(verdict: Verdict, evidence: FailureEvidence) -> list[str]:
    """The exception that the trainer of the verdict's rank reported; that another rank has gone is no cause."""
    return [
        line
        for rank in evidence.ranks
        if rank.rank == verdict.rank and rank.failure is not None and rank.failure.get("error_type") != "PeerLost"
        for text in (str(rank.failure.get("traceback") or ""), reported_exception(rank))
        for line in sanitised_lines(text)
    ]
