"""How much each rank's end explains: the first that went by itself is the cause, and who lost a peer or was ended by
somebody a consequence."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import Enum

from engine.runs.diagnosis import Finding
from engine.runs.signatures import Kind
from engine.supervision.judging.evidence import Evidence, RankEvidence
from engine.supervision.judging.quoting import final, known
from engine.worker.wire import ExitRecord

SSH_FAILED = 255
"""ssh's own exit code; all others are the command's."""
_OF_MLX = ("ring.", "jaccl.", "metal.")


class Weight(Enum):
    """How much a rank's end explains, most first."""

    OWN = 0
    EARLY = 1
    LOST = 2
    """Its node is gone. Like a lease, before the next two: the others lose their peer or the launcher ends them."""
    LEASE = 3
    OUTSIDE = 4
    CONSEQUENCE = 5


@dataclass(frozen=True)
class Fault:
    """The end of one rank that was not to end so."""

    weight: Weight
    at: float
    """By the head's wall clock, s; before everything else where nobody knows."""
    evidence: RankEvidence

    @property
    def order(self) -> tuple[int, float, int]:
        """Of two, the one that explains the end goes first."""
        return self.weight.value, self.at, self.evidence.rank


def faults_of(evidence: Evidence) -> list[Fault]:
    """Of all ranks, in their order."""
    faults = []
    for rank in evidence.ranks:
        weight = _weight(rank, evidence.trainer, evidence.rebooted)
        if weight is not None:
            at = rank.record.ended_at - rank.clock_ahead_s if rank.record is not None else float("-inf")
            faults.append(Fault(weight, at, rank))
    return faults


def is_consequence(rank: RankEvidence) -> bool:
    """Whether a rank's end is another rank's fault: it lost its peers, or was ended by somebody."""
    if rank.record is not None and rank.record.stopped_by is not None:
        return True
    return lost_its_peers(rank) or _left_together(rank)


def succeeded(rank: RankEvidence, trainer: bool) -> bool:
    """Whether it has done all that it was to do; our `trainer` says so itself."""
    if rank.record is None or rank.record.code != 0 or rank.record.stopped_by is not None:
        return False
    return not trainer or (rank.end is not None and rank.end.get("completed") is True)


def lost_its_peers(rank: RankEvidence) -> bool:
    """Whether it ended because a connection to another rank was gone."""
    if rank.left_for_peers:
        return True
    if rank.failure is not None:
        if rank.failure.get("error_type") == "PeerLost":
            return True
        text = str(rank.failure.get("message", ""))
    else:
        text = final(rank.tail)
    said = known(text)
    # MLX says of its own failures too that a connection is gone then; of other texts nobody knows that they mattered.
    own = any(found.kind is Kind.CAUSE and _is_of(found, _OF_MLX) for found in said)
    return not own and any(found.kind is Kind.CONSEQUENCE for found in said)


def _weight(rank: RankEvidence, trainer: bool, rebooted: bool) -> Weight | None:
    record = rank.record
    if record is None:
        if rank.launcher_code is not None and not rank.started:
            if rank.remote and rank.launcher_code == SSH_FAILED and not (rank.launcher_words or rank.keeper_tail):
                # That is how ssh ends when the launcher ends it, because another rank did not start.
                return Weight.CONSEQUENCE
            # The launcher ends with TERM the ranks that have not failed; -15 is a consequence.
            return Weight.OWN if rank.launcher_code not in (0, -signal.SIGTERM) else None
        if rank.restarted or rank.unreachable_s is not None:
            return Weight.LOST
        return Weight.OWN if rank.vanished and not rebooted else None
    if record.stopped_by is not None:
        return _weight_of_stopped(rank, record)
    if lost_its_peers(rank) or _left_together(rank):
        return Weight.CONSEQUENCE
    if record.code == 0:
        return None if succeeded(rank, trainer) and trainer else Weight.EARLY
    return Weight.OWN


def _weight_of_stopped(rank: RankEvidence, record: ExitRecord) -> Weight | None:
    if rank.failure is not None and not lost_its_peers(rank):
        # It had failed by itself when we came to end it.
        return Weight.OWN
    if record.stopped_by == "lease":
        return Weight.LEASE
    return Weight.OUTSIDE if (record.stopped_by or "").startswith("signal") else None


def _left_together(rank: RankEvidence) -> bool:
    """A trainer stops when any rank has been told to: one that has only agreed has not begun it."""
    return rank.end is not None and rank.end.get("stopped") is True


def _is_of(found: Finding, families: tuple[str, ...]) -> bool:
    return found.signature is not None and found.signature.id.startswith(families)
