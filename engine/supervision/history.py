"""The failed attempts of a run, as its journal holds them, and what its configuration says of restarts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.models import Reason, RunState
from engine.runs.plan_file import Plan
from engine.supervision.conditions import lost_after_s
from engine.supervision.culprit import Verdict
from engine.supervision.recovery import Failure, Policy

_OWN_STATE = "a program of the user's own has its own state ([recovery] restart_commands is false)"

_OF_THE_JOB = re.compile(r"\bJobError: ")
"""What our trainer says of what its job is or lacks, a lost state too."""


@dataclass(frozen=True)
class Ended:
    """One attempt that has failed."""

    failure: Failure
    verdict: Verdict
    failed_at: str
    """When it was noticed, on the head (UTC, ISO)."""

    @classmethod
    def of(cls, attempt: int, verdict: Verdict, reached: int, failed_at: str) -> Ended:
        failure = Failure(
            attempt=attempt,
            reason=verdict.reason,
            host=verdict.host,
            exit_code=verdict.exit_code,
            signal=verdict.signal,
            signature=verdict.signature,
            reached=reached,
            rank=verdict.rank,
            of_the_job=_OF_THE_JOB.search(verdict.cause or "") is not None,
        )
        return cls(failure, verdict, failed_at)

    def entry(self, unconfirmed: Sequence[str]) -> dict[str, Any]:
        """The journal's `attempt_ended`."""
        told = {key: value for key, value in asdict(self.verdict).items() if key != "state"}
        of = {"attempt": self.failure.attempt, "reached": self.failure.reached, "failed_at": self.failed_at}
        return {**of, **told, "unconfirmed": list(unconfirmed)}

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Ended:
        told = {key: entry.get(key) for key in ("rank", "host", "cause", "fix", "signature", "exit_code", "signal")}
        verdict = Verdict(RunState.FAILED, Reason(entry["reason"]), **told)
        return cls.of(int(entry["attempt"]), verdict, int(entry["reached"]), str(entry["failed_at"]))


def failed_attempts(entries: Sequence[dict[str, Any]]) -> list[Ended]:
    """Since the run was launched, or last taken up by its user, in their order."""
    begun = max((at for at, entry in enumerate(entries) if entry["event"] == "reopened"), default=0)
    return [Ended.from_entry(entry) for entry in entries[begun:] if entry["event"] == "attempt_ended"]


def reached_before(entries: Sequence[dict[str, Any]]) -> int:
    """The iteration that the run is known to have reached, over everything that the journal holds; 0 when none."""
    told = [entry.get("reached") for entry in entries if entry["event"] == "attempt_ended"]
    told += [entry.get("iteration") for entry in entries if entry["event"] == "state"]
    return max((int(each) for each in told if each is not None), default=0)


def policy_of(plan: Plan) -> Policy:
    """What the run's configuration says of restarts."""
    recovery, nodes = plan.config.recovery, len(plan.config.nodes)
    command = plan.config.job.command is not None and not recovery.restart_commands
    return Policy(
        max_restarts=recovery.max_restarts,
        needed=min(recovery.min_nodes or nodes, nodes),
        backoff_s=recovery.backoff_s,
        node_wait_s=recovery.node_wait_s,
        lost_after_s=lost_after_s(plan.config),
        why_never=_OWN_STATE if command else None,
    )
