"""The failed attempts of a run, as its journal holds them, and what its configuration says of restarts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from engine.config.divided import parted
from engine.models import Reason, RunState
from engine.runs.plan_file import Plan
from engine.supervision.conditions import lost_after_s
from engine.supervision.judging.verdict import Verdict
from engine.supervision.logbook import Logbook
from engine.supervision.progress import Progress, Resumed
from engine.supervision.rank_entries import of_attempt
from engine.supervision.recovery import End, Failure, Policy, first_cause, refusal

_OWN_STATE = "a program of the user's own has its own state ([recovery] restart_commands is false)"

_STAGES = 2
"""That a pipeline has at least."""
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


class Failures:
    """Of one run, since it was launched or last taken up by its user; each is in the journal."""

    def __init__(self, plan: Plan, logbook: Logbook) -> None:
        self._plan = plan
        self._logbook = logbook
        self._ended = failed_attempts(logbook.entries)
        self._reached_before = reached_before(logbook.entries)

    def __bool__(self) -> bool:
        return bool(self._ended)

    @property
    def policy(self) -> Policy:
        """As it is by now."""
        return policy_of(self._plan, begun=self.reached > 0)

    @property
    def all(self) -> list[Failure]:
        return [ended.failure for ended in self._ended]

    @property
    def last(self) -> Ended:
        """There must be one."""
        return self._ended[-1]

    @property
    def reached(self) -> int:
        """The iteration that the run is known to have reached; 0 when none."""
        return self.last.failure.reached if self else self._reached_before

    def enter(self, attempt: int, verdict: Verdict, reached: int, failed_at: str, unconfirmed: Sequence[str]) -> None:
        """One more: it reached that iteration (0: it never got going), and `unconfirmed` are not proved to be rid of
        it."""
        ended = Ended.of(attempt, verdict, self._at_least(reached), failed_at)
        self._ended.append(ended)
        self._logbook.append("attempt_ended", **ended.entry(unconfirmed))

    def may_follow(self, attempt: int, verdict: Verdict, reached: int) -> bool:
        """Whether another attempt may follow if this one ends so."""
        if verdict.state is not RunState.FAILED:
            return False
        ended = Ended.of(attempt, verdict, self._at_least(reached), utc_now())
        return refusal(self.policy, [*self.all, ended.failure]) is None

    def refusal(self) -> End | None:
        """Why no other attempt may follow; None when one may."""
        return refusal(self.policy, self.all)

    def give_up(self, end: End) -> Verdict:
        """The run's own: of the last failures the one that the others follow from."""
        self._logbook.append("given_up", after=self.last.failure.attempt, why=end.why)
        first = first_cause(self.all)
        return next(ended.verdict for ended in self._ended if ended.failure is first)

    def overcome(self, attempt: int, progress: Progress) -> None:
        """That attempt has made its first step: the journal tells, once, what it went on from."""
        if any(entry["event"] == "recovered" for entry in of_attempt(self._logbook, attempt)):
            return
        resumed, repeated, seconds = progress.resumed or Resumed("none"), None, None
        if self:
            repeated = max(0, self.last.failure.reached - resumed.iteration)
            failed_at = datetime.fromisoformat(self.last.failed_at)
            seconds = round((datetime.now(UTC) - failed_at).total_seconds(), 2)
        self._logbook.append("recovered", attempt=attempt, **asdict(resumed), repeated=repeated, seconds=seconds)

    def _at_least(self, reached: int) -> int:
        """An attempt that never got going leaves the run where it was."""
        return reached or (self.last.failure.reached if self else 0)


def failed_attempts(entries: Sequence[dict[str, Any]]) -> list[Ended]:
    """Since the run was launched, or last taken up by its user, in their order."""
    begun = max((at for at, entry in enumerate(entries) if entry["event"] == "reopened"), default=0)
    return [Ended.from_entry(entry) for entry in entries[begun:] if entry["event"] == "attempt_ended"]


def reached_before(entries: Sequence[dict[str, Any]]) -> int:
    """The iteration that the run is known to have reached, over everything that the journal holds; 0 when none."""
    told = [entry.get("reached") for entry in entries if entry["event"] == "attempt_ended"]
    told += [entry.get("iteration") for entry in entries if entry["event"] == "state"]
    return max((int(each) for each in told if each is not None), default=0)


def policy_of(plan: Plan, *, begun: bool = True) -> Policy:
    """What the run's configuration says of restarts. `begun`: it has made a step, so that there is a state to keep."""
    config, nodes = plan.config, len(plan.config.nodes)
    recovery = config.recovery
    command = config.job.command is not None and not recovery.restart_commands
    asked = max(recovery.min_nodes or nodes, _STAGES if config.job.strategy == "pipeline" else 1)
    return Policy(
        max_restarts=recovery.max_restarts,
        needed=nodes if begun and parted(config) else min(asked, nodes),
        backoff_s=recovery.backoff_s,
        node_wait_s=recovery.node_wait_s,
        lost_after_s=lost_after_s(config),
        why_never=_OWN_STATE if command else None,
    )


def utc_now() -> str:
    """On the head: UTC, ISO."""
    return datetime.now(UTC).isoformat()
