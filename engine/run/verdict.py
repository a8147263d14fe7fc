"""The verdict on an attempt's end: which rank failed first, for which reason, and the cause in words.

The launcher's exit code is never used: it is 0 whatever the ranks did. A rank that lost its peers, or was ended by us
or by the launcher, is a consequence; the cause is the first rank that ended by itself. The part of its output that
explains the end is found by engine.failures.explanation."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from engine.failures.explanation import CAUSE_CHARACTERS, explain, findings
from engine.failures.signature import SignatureKind
from engine.models import Reason, RunState
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP, ExitRecord
from engine.protocol.exit_codes import ShellExit
from engine.run.command_watch import APART_FIX, IDLE, STOPPED, apart_cause
from engine.run.events import Hang, Trigger, Verdict
from engine.run.failure_cause import first_cause
from engine.run.failure_evidence import FailureEvidence, RankEvidence
from engine.security.redact import Redactor
from engine.security.sanitise import count_or_none, last_line, plain, sanitise, text_or_none
from engine.store.layout import RunDir


class Weight(Enum):
    """How much a rank's end explains, the most first."""

    OWN = 0
    EARLY = 1
    LOST = 2
    """Its node is gone. Like a lease, before the next two: the others lose their peer or the launcher ends them."""
    LEASE = 3
    OUTSIDE = 4
    SILENT = 5
    """Its node does not answer now, but did after the attempt had begun to be ended, or will after a sleep of
    the head."""
    CONSEQUENCE = 6
    FENCED = 7
    """It was killed when the attempt was ended."""


@dataclass(frozen=True)
class Fault:
    """The end of one rank that was not meant to end so."""

    weight: Weight
    at: float
    """By the head's wall clock, s; -inf where it is not known."""
    evidence: RankEvidence


def verdict_on(evidence: FailureEvidence) -> Verdict:
    """The verdict on an attempt whose processes are all gone, or being ended."""
    needed = [rank for rank in evidence.ranks if not rank.dispensable]
    counted = evidence.kind.success_ranks(len(evidence.ranks))
    completed = all(evidence.succeeded(evidence.ranks[number]) for number in counted)
    if evidence.apart and (completed or evidence.trigger is Trigger.APART):
        return Verdict(RunState.FAILED, Reason.SEPARATE_GROUPS, apart_cause(evidence.apart), fix=APART_FIX)
    if completed:
        # Also when an abort was requested: it came too late to change anything.
        return Verdict(RunState.SUCCEEDED, Reason.COMPLETED, _cut("; ".join(_notes_on_success(evidence))) or None)
    if awaited := _awaited(needed, evidence):
        return _completed_but_for(awaited, evidence.trainer)
    if evidence.trigger is Trigger.ABORT:
        return Verdict(RunState.ABORTED, Reason.USER_ABORT, "stopped as requested")
    whole, evidence = evidence, replace(evidence, ranks=needed)
    faults = _faults_of(evidence)
    follows = {fault.weight for fault in faults} == {Weight.CONSEQUENCE}
    if follows and evidence.trigger in (Trigger.RANK, Trigger.ENDED):
        # More were lost than could be spared: one of those is the cause.
        faults = _faults_of(whole)
    if not evidence.trainer and not any(fault.weight is Weight.CONSEQUENCE for fault in faults):
        # A command that ends with 0 has done its part, unless another rank was lost because of it.
        faults = [fault for fault in faults if fault.weight is not Weight.EARLY]
    first = faults[0] if faults else None
    explained = first is not None and _explains_the_end(first, evidence.trigger)
    of_attempt = None if explained else _of_attempt(evidence)
    if of_attempt is None and first is not None and not _why_is_lost(first, evidence):
        return _of_unseen_end(first, evidence) or _of_rank(first, evidence)
    return of_attempt or _unexplained(evidence)


_COMMANDS: Final = frozenset(command.decode().strip() for command in (STOP, END, EMERGENCY_CHECKPOINT))
"""In the exit record of a rank that a supervisor has told its keeper to end."""


def _why_is_lost(fault: Fault, evidence: FailureEvidence) -> bool:
    """The fault follows from that an earlier supervisor had ended ranks, and has left no reason."""
    if not evidence.adopted or fault.weight is not Weight.CONSEQUENCE:
        return False
    record, ended_at = fault.evidence.record, min(_ended_by_command(evidence), default=math.inf)
    # Where its end is recorded, so is what it followed from.
    margin_s = _RECORD_MARGIN_S if evidence.trigger is Trigger.ENDED else 0.0
    return (record is not None and record.asked_to_leave) or ended_at - margin_s < fault.at


_RECORD_MARGIN_S: Final = 3.0
"""A rank's peers lose it before its keeper has read the rest of its output and records its end."""


def _ended_by_command(evidence: FailureEvidence) -> list[float]:
    """When the ranks ended that a supervisor had told their keepers to end, as Fault.at."""
    return [_ended_at(rank) for rank in evidence.ranks if rank.record and rank.record.stopped_by in _COMMANDS]


def _of_unseen_end(fault: Fault, evidence: FailureEvidence) -> Verdict | None:
    """All that is known follows from another rank's end, and there are some of which the end is not known."""
    gone = [rank for rank in evidence.ranks if rank.record is None and (rank.started or rank.launcher_code is None)]
    unseen = [rank for rank in gone if rank.outlived or not rank.vanished]
    together = _left_together(fault.evidence)
    left = together or fault.evidence.left_for_peers or fault.evidence.error_type == "PeerLost"
    if not (fault.weight is Weight.CONSEQUENCE and left and evidence.over and unseen):
        return None
    if len(unseen) == 1:
        how = "stopped with it" if together else "lost their connection to it"
        return _failed(Reason.RANK_FAILED, f"the other ranks {how}, and its node has shown no exit record", unseen[0])
    nodes = ", ".join(dict.fromkeys(rank.node for rank in unseen))
    return _failed(Reason.RANK_FAILED, f"a rank on one of {nodes} was lost: each has shown no exit record")


def _awaited(needed: Sequence[RankEvidence], evidence: FailureEvidence) -> Sequence[RankEvidence]:
    """The needed ranks whose end is not known because their nodes do not answer, where others have completed, and none
    of the needed ones has failed."""
    left = [rank for rank in needed if not evidence.succeeded(rank)]
    unknown = [rank for rank in left if rank.record is None and not rank.vanished and rank.unreachable_s is not None]
    if unknown != left or not any(evidence.succeeded(rank) for rank in evidence.ranks):
        return ()
    # A command's rank may never have started; our trainers only complete together.
    return left if evidence.trainer or all(rank.started for rank in left) else ()


def _completed_but_for(awaited: Sequence[RankEvidence], trainer: bool) -> Verdict:
    nodes = ", ".join(dict.fromkeys(rank.node for rank in awaited))
    where = ", ".join(f"rank {rank.rank} on {rank.node}, silent for {_silence(rank)}" for rank in awaited)
    missing = "the exit record" if len(awaited) == 1 else "the exit records"
    adapters = "; the adapters are on its node, too" if trainer and awaited[0].rank == 0 else ""
    cause = f"every rank that answers has completed; not known yet is {missing} of {where}{adapters}"
    fix = f"see that {nodes} can be reached: the run then becomes succeeded by itself, and is not trained again"
    return Verdict(RunState.COMPLETED, Reason.COMPLETED, _cut(" ".join(cause.split())), fix=fix)


def _notes_on_success(evidence: FailureEvidence) -> Iterator[str]:
    """Why it ended before its last iteration, and which ranks were not there to the end."""
    ends = (rank.end or {} for rank in evidence.ranks if evidence.trainer and not rank.dispensable)
    yield from [text for end in ends if (text := text_or_none(end.get("early"), CAUSE_CHARACTERS))][:1]
    left = [rank for rank in evidence.ranks if not evidence.succeeded(rank)]
    if len(left) == 1:
        yield f"rank {left[0].rank} on {left[0].node} did not complete: the others went on without it"
    elif left:
        yield f"ranks {', '.join(str(rank.rank) for rank in left)} did not complete: the others went on without them"


def is_consequence(rank: RankEvidence) -> bool:
    """The rank's end follows from another's: it lost its peers, or was ended from outside."""
    if rank.record is not None and rank.record.stopped_by is not None:
        return True
    return _lost_its_peers(rank) or _left_together(rank)


def _explains_the_end(fault: Fault, trigger: Trigger) -> bool:
    if fault.weight is Weight.LOST:
        # A node that is away while the launch fails may not be the cause.
        return fault.evidence.started or trigger in (Trigger.RANK, Trigger.ENDED)
    return fault.weight in (Weight.OWN, Weight.EARLY)


def _faults_of(evidence: FailureEvidence) -> list[Fault]:
    """Those that explain the most, and then those that came first, first."""
    faults = []
    for rank in evidence.ranks:
        weight = _weight(rank, evidence)
        if weight is not None:
            # An earlier supervisor that ended the attempt, of which nothing is recorded, may have killed its keeper.
            unseen = evidence.adopted and rank.vanished
            at = min(_ended_by_command(evidence), default=_ended_at(rank)) if unseen else _ended_at(rank)
            faults.append(Fault(weight, at, rank))
    return sorted(faults, key=lambda fault: (fault.weight.value, fault.at, fault.evidence.rank))


def _ended_at(rank: RankEvidence) -> float:
    """As Fault.at."""
    return rank.record.ended_at - rank.clock_ahead_s if rank.record is not None else float("-inf")


def _weight(rank: RankEvidence, evidence: FailureEvidence) -> Weight | None:
    record = rank.record
    if evidence.trainer and evidence.succeeded(rank):
        # The others had to leave, although it had done its work unseen.
        return Weight.LOST if rank.lost else None
    if record is None:
        return _weight_without_record(rank, evidence)
    if record.stopped_by is not None:
        return _weight_of_stopped(rank, record.stopped_by)
    if _lost_its_peers(rank) or _left_together(rank):
        # A node that comes back finds that its peers were ended because it was lost.
        return Weight.LOST if rank.lost else Weight.CONSEQUENCE
    return Weight.EARLY if record.code == 0 else Weight.OWN


def _weight_without_record(rank: RankEvidence, evidence: FailureEvidence) -> Weight | None:
    if rank.launcher_code is not None and not rank.started:
        if rank.ssh_failed and not (rank.launcher_output or rank.keeper_tail):
            # That is how ssh ends when the launcher ends it, because another rank did not start.
            return Weight.CONSEQUENCE
        # The launcher ends with TERM the ranks that have not failed; -15 is a consequence.
        return Weight.OWN if rank.launcher_code not in (0, -signal.SIGTERM) else None
    if rank.restarted or rank.lost:
        return Weight.LOST
    if rank.unreachable_s is not None:
        # After a sleep of the head that ended leases it is not connected again yet.
        lease_ended = any(one.record is not None and one.record.stopped_by == "lease" for one in evidence.ranks)
        not_yet = lease_ended and rank.head_slept_s > 0 and rank.unreachable_s < rank.lease_s
        silent = rank.answered_since or not_yet
        return Weight.SILENT if silent else Weight.LOST
    if rank.vanished and rank.outlived:
        return Weight.FENCED
    # `rebooted` is this machine alone.
    return Weight.OWN if rank.vanished and (rank.remote or not evidence.rebooted) else None


def _weight_of_stopped(rank: RankEvidence, stopped_by: str) -> Weight | None:
    if rank.failure is not None and not _lost_its_peers(rank):
        # It had failed by itself before it was ended.
        return Weight.OWN
    if stopped_by == "lease":
        return Weight.LEASE
    return Weight.OUTSIDE if stopped_by.startswith("signal") else None


def _left_together(rank: RankEvidence) -> bool:
    """The trainer stopped because another rank received a stop."""
    return rank.end is not None and rank.end.get("stopped") is True


def _lost_its_peers(rank: RankEvidence) -> bool:
    """The rank ended because a connection to another rank was gone."""
    if rank.left_for_peers or rank.error_type == "PeerLost":
        return True
    explained = findings(_lines(rank.final_lines if rank.failure is None else str(rank.failure.get("message", ""))))
    causes = [finding for finding in explained if finding.kind is SignatureKind.CAUSE]
    own_fault = any(cause.signature is not None and cause.signature.own_fault for cause in causes)
    # One worker's exception is why the others of its torchrun lost it.
    own_fault = own_fault or (bool(causes) and rank.failure is None and rank.is_torchrun)
    return not own_fault and any(finding.kind is SignatureKind.CONSEQUENCE for finding in explained)


def _failed(reason: Reason, cause: str, rank: RankEvidence | None = None) -> Verdict:
    number, node = (rank.rank, rank.node) if rank is not None else (None, None)
    return Verdict(RunState.FAILED, reason, _cut(" ".join(cause.split())), number, node)


def _cut(line: str) -> str:
    return line if len(line) <= CAUSE_CHARACTERS else line[: CAUSE_CHARACTERS - 1] + "…"


_CORRUPTED_FIX = (
    "test the memory of the node that is named, then launch again; where the nodes' chips differ and it comes back in "
    'many parameters at once, set [consistency] on_corruption = "warn"'
)


def _of_rank(fault: Fault, evidence: FailureEvidence) -> Verdict:
    rank = fault.evidence
    record = rank.record
    if rank.failure is not None and rank.error_type == "Corrupted":
        cause = sanitise(str(rank.failure.get("message")).encode(errors="replace"))
        # A rank is named only when it is certain.
        verdict = _failed(Reason.CORRUPTED, cause, rank if rank.failure.get("certain") is True else None)
        return replace(verdict, exit_code=record.code if record is not None else None, fix=_CORRUPTED_FIX)
    reason, cause = _reason_and_cause(fault, evidence)
    if reason is Reason.HEAD_SLEPT:
        return _failed(reason, cause)
    verdict = _failed(reason, cause, rank)
    if record is None:
        return replace(verdict, exit_code=rank.launcher_code)
    return replace(verdict, exit_code=record.code, signal=record.signal)


_LEASE_MARGIN_S = 2.0
"""A silence is counted from the last answer, a lease from the last heartbeat."""


def _reason_and_cause(fault: Fault, evidence: FailureEvidence) -> tuple[Reason, str]:
    """The reason and cause of the fault that began the attempt's end; the cause quotes output and may be long."""
    rank, record = fault.evidence, fault.evidence.record
    if fault.weight in (Weight.LOST, Weight.SILENT):
        return Reason.NODE_LOST, _node_lost(rank)
    if record is None:
        return _without_record(rank)
    if fault.weight is Weight.LEASE:
        return _lease_ended(rank)
    if fault.weight is Weight.OUTSIDE:
        return Reason.RANK_KILLED, f"its keeper was stopped from outside ({record.stopped_by})"
    if record.error is not None or rank.bind_error is not None:
        return Reason.LAUNCH_FAILED, record.error or _no_port(rank)
    return _ended_by_itself(rank, record, evidence.trainer)


def _lease_ended(rank: RankEvidence) -> tuple[Reason, str]:
    if rank.cut_off_s > rank.lease_s - _LEASE_MARGIN_S:
        lease = f"its lease of {rank.lease_s:g} s has ended its rank"
        return Reason.NODE_LOST, f"{rank.node} was cut off for {rank.cut_off_s:.0f} s; {lease}"
    # After a sleep its node had to be connected again.
    if rank.head_slept_s > 0 and rank.head_slept_s + rank.cut_off_s > rank.lease_s - _LEASE_MARGIN_S:
        slept = f"this machine slept, or its supervisor was stopped, for {rank.head_slept_s:.0f} s"
        return Reason.HEAD_SLEPT, f"{slept}: no heartbeat renewed the ranks' lease of {rank.lease_s:g} s"
    return Reason.SUPERVISOR_LOST, "no supervisor was there for longer than the ranks' lease"


def _ended_by_itself(rank: RankEvidence, record: ExitRecord, trainer: bool) -> tuple[Reason, str]:
    # A command that ends well may have printed anything; only what fails is quoted, and its last line has the reason.
    last = _last_line(rank.exception if rank.failure is not None else rank.final_lines)
    diverged = rank.error_type == "Diverged"
    if diverged or record.code == 0:
        return (Reason.DIVERGED, last) if diverged else (Reason.RANK_FAILED, _left_early(rank, trainer))
    ended = _how_ended(record)
    lines = _lines(rank.final_lines, rank.exception)
    cause = explain(lines)
    # The end of a torchrun is that of all its workers, of whose troubles only the last counts.
    causes = [cause] if rank.is_torchrun else findings(lines)
    reasons = {failure.signature.reason for failure in causes if failure is not None and failure.signature is not None}
    if Reason.OUT_OF_MEMORY in reasons or (record.signal == signal.SIGKILL and rank.memory_killed):
        return Reason.OUT_OF_MEMORY, f"out of memory: {last or ended}"
    if Reason.DISK_FULL in reasons:
        return Reason.DISK_FULL, f"disk full: {last or ended}"
    if cause is not None and cause.signature is not None and cause.signature.reason is Reason.LAUNCH_FAILED:
        return Reason.LAUNCH_FAILED, rank.port or cause.cause
    like_an_error = _LIKE_AN_ERROR.search(last) is not None
    if record.signal is not None:
        # After its exception a script may abort in the interpreter's own end, by a thread of PyTorch's group.
        aborted = record.signal == signal.SIGABRT and rank.failure is not None and not trainer
        return Reason.RANK_FAILED if aborted else Reason.RANK_KILLED, f"{ended}: {last}" if like_an_error else ended
    output = f"{': ' if like_an_error else '; its last output: '}{last}" if last else " without output"
    return Reason.RANK_FAILED, ended + output


_LIKE_AN_ERROR = re.compile(r"[Ee]rror|[Ee]xception|[Ff]atal|[Aa]bort|[Aa]ssert|[Ii]nterrupt|[Ff]ail|^(?!warning)\w+: ")


def _without_record(rank: RankEvidence) -> tuple[Reason, str]:
    if rank.started or rank.launcher_code is None:
        return Reason.RANK_KILLED, "its keeper was killed and left no exit record"
    output = _last_line(rank.keeper_tail)
    if rank.ssh_failed and not output:
        output = _last_line(rank.launcher_output) or "ssh reported nothing"
        return Reason.LAUNCH_FAILED, f"{rank.node} could not be reached: {output}"
    output = output or _last_line(rank.launcher_output)
    if rank.launcher_code == ShellExit.NOT_FOUND:
        return Reason.LAUNCH_FAILED, f"the interpreter {rank.python} is missing on {rank.node}"
    detail = f": {output}" if output else ""
    return Reason.LAUNCH_FAILED, f"{rank.python} did not start the rank (exit code {rank.launcher_code}){detail}"


def _node_lost(rank: RankEvidence) -> str:
    if rank.restarted and rank.record is None:
        return f"{rank.node} was restarted while its rank was running"
    if rank.record is not None or rank.unreachable_s is None:
        # Only an earlier supervisor may have seen for how long.
        long = f" for {rank.cut_off_s:.0f} s" if rank.cut_off_s > rank.lease_s else ""
        completed = rank.record is not None and rank.record.code == 0
        return f"{rank.node} was cut off{long}, and {'the others left' if completed else 'its rank lost the others'}"
    over = f", longer than its lease of {rank.lease_s:g} s" if (rank.unreachable_s or 0.0) > rank.lease_s else ""
    return f"{rank.node} has not answered for {_silence(rank)}{over}"


def _silence(rank: RankEvidence) -> str:
    why = f" ({rank.unreachable_why})" if rank.unreachable_why else ""
    return f"{rank.unreachable_s or 0.0:.0f} s{why}"


_NOT_OUR_ADDRESS = frozenset({"49", "99"})


def _no_port(rank: RankEvidence) -> str:
    if rank.bind_error in _NOT_OUR_ADDRESS:
        return f"its ring address is not one of {rank.node} (error {rank.bind_error})"
    return rank.port or f"a ring port is in use (error {rank.bind_error})"


def _left_early(rank: RankEvidence, trainer: bool) -> str:
    if rank.end is not None and rank.end.get("stopped") is True:
        return f"stopped at iteration {count_or_none(rank.end.get('iteration'))} though that was not requested"
    if trainer:
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


def _not_started(evidence: FailureEvidence) -> Verdict:
    missing = next((rank for rank in evidence.ranks if not rank.started), None)
    who = f"rank {missing.rank}" if missing is not None else "the ranks"
    output = _last_line(evidence.launcher_tail)
    reported = f"mlx.launch reported: {output}" if output else "mlx.launch reported nothing"
    return _failed(Reason.LAUNCH_FAILED, f"{who} did not start in time; {reported}", missing)


def _of_launcher(evidence: FailureEvidence, cause: str) -> Verdict:
    output = _last_line(evidence.launcher_tail)
    return _failed(Reason.LAUNCH_FAILED, f"{cause}; its last output: {output}" if output else cause)


_STILL = {
    STOPPED: "a process was stopped (SIGSTOP or a debugger) for {silent}, over the limit of {limit}",
    IDLE: "nothing was printed or computed for {silent}, over the limit of {limit}",
}
"""Cause of a hang by what the processes of a command did."""


def _hung(evidence: FailureEvidence, hang: Hang) -> Verdict:
    rank, how = _stalled_rank(evidence, hang)
    text = _STILL.get(hang.doing, "no step for {silent}, over the limit of {limit} for {doing}")
    limit = text.format(silent=f"{hang.silent_s:.0f} s", limit=f"{hang.limit_s:.0f} s", doing=hang.doing)
    return _failed(Reason.HUNG, f"{limit}; {how}", rank)


def _stalled_rank(evidence: FailureEvidence, hang: Hang) -> tuple[RankEvidence | None, str]:
    """The rank that stalled, and how that is known: it was behind, or it alone did not leave when all were to."""
    behind = next((rank for rank in evidence.ranks if rank.rank == hang.rank), None)
    if behind is not None:
        return behind, f"rank {behind.rank} on {behind.node} was the first to stall"
    stayed = [rank for rank in evidence.ranks if not evidence.succeeded(rank)]
    unresponsive = [one for one in stayed if not _has_left(one)]
    asked = evidence.kind.survivors_keep_state and hang.iteration > 0
    # Who has done its work while the attempt was ended might have hung as well.
    unclear = any(rank.outlived for rank in evidence.ranks if rank not in stayed)
    alone = len(unresponsive) == 1 < len(evidence.ranks) and (asked or unresponsive == stayed)
    # Whose keeper was killed meanwhile left no word of whether it answered.
    if alone and not unclear and not unresponsive[0].vanished:
        (rank,) = unresponsive
        return rank, f"rank {rank.rank} on {rank.node} did not answer when the others left"
    return None, "which rank stalled first is not known"


def _has_left(rank: RankEvidence) -> bool:
    """When it was told to; or its lease had ended it before, in a sleep of the head."""
    stopped_by = rank.record.stopped_by if rank.record is not None else "no record"
    by_sleep = stopped_by == "lease" and rank.head_slept_s > 0
    return by_sleep or (not stopped_by and _lost_its_peers(rank))


def _lost(evidence: FailureEvidence, cause: str) -> Verdict:
    unknown = next((rank for rank in evidence.ranks if rank.record is None), None)
    return replace(_failed(Reason.SUPERVISOR_LOST, cause, unknown), state=RunState.LOST)


def with_cause(
    verdict: Verdict, evidence: FailureEvidence, run_dir: RunDir, log_bases: Mapping[int, int], redactor: Redactor
) -> Verdict:
    """A failure's verdict with its first cause and its fix, where they are known, without secrets.
    Reads the mirrors from `log_bases` on, and the evidence where they lack something."""
    if verdict.state is not RunState.FAILED:
        return verdict
    blamed = next((rank for rank in evidence.ranks if rank.rank == verdict.rank), None)
    output, reported = [evidence.launcher_tail], []
    if blamed is not None:
        output = [blamed.keeper_tail, blamed.launcher_output, blamed.tail]
    if blamed is not None and blamed.failure is not None:
        output.append(str(blamed.failure.get("message", "")))
        if blamed.error_type != "PeerLost":
            # That another rank has gone is no cause.
            reported = [str(blamed.failure.get("traceback") or ""), blamed.exception]
    diagnosis = first_cause(run_dir, verdict, log_bases, exit_output=_lines(*output), reported=_lines(*reported))
    if diagnosis is None:
        return verdict
    return replace(verdict, cause=redactor(diagnosis.cause), fix=diagnosis.fix, signature=diagnosis.signature)


def _lines(*texts: str) -> list[str]:
    return [sanitise(line.encode(errors="replace")) for text in texts for line in text.splitlines()]


def _last_line(text: str) -> str:
    return plain(last_line(text), CAUSE_CHARACTERS)
