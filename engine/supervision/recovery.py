"""What follows when an attempt has failed: another one, with which nodes and when, or the run's end. Pure.

Nothing is retried that a restart cannot mend, and nothing without end: at most `max_restarts` restarts, at most
STALLED_LIMIT attempts in a row that bring the run no further, and none after the same failure at the same iteration.
Between restarts that bring nothing the wait doubles, with jitter.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.models import Reason
from engine.runs.signatures import BY_ID, Kind

STALLED_LIMIT = 3
"""Attempts in a row without progress."""
_LONGEST_BACKOFF_S = 60.0
_FIRST_BACKOFF_S = 0.2

_NEVER = {
    Reason.USER_ABORT: "it was asked to stop",
    Reason.DIVERGED: "the training has diverged, and would again",
    Reason.CORRUPTED: "parameters differ between the ranks, and what is wrong must be found first",
    Reason.PREFLIGHT_FAILED: "preflight failed",
    Reason.DISK_FULL: "a restart makes no room on a full disk",
    Reason.SUPERVISOR_LOST: "its supervisor was lost: nothing is started by surprise",
}
"""Reasons after which there is no restart → why."""
_PASSING = frozenset(
    {
        "ring.bind",
        "ring.connect",
        "ring.connect_retry",
        "ring.neighbor",
        "jaccl.connect",
        "jaccl.wc",
        "metal.timeout",
        "metal.interactivity",
        "metal.internal",
        "memory.killed",
        "ssh.refused",
    }
)
"""Known failures that may be over at the next start: a port that was taken, a peer that came late, a GPU that was busy.
All other known causes lie in the job, the software or the wiring."""
_FROM_OUTSIDE = frozenset({Reason.RANK_KILLED, Reason.NODE_LOST, Reason.HUNG})
"""Reasons that say nothing against what was launched, however early they come."""


@dataclass(frozen=True)
class Policy:
    """What the configuration says of restarts."""

    max_restarts: int
    needed: int
    """Nodes that a restart needs at least."""
    backoff_s: float
    node_wait_s: float
    lost_after_s: float | None
    """A node that has been silent for as long has ended its ranks by their lease; None: it lets them go on."""
    why_never: str | None = None
    """Why this job is never restarted."""


@dataclass(frozen=True)
class Failure:
    """One attempt that has failed."""

    attempt: int
    reason: Reason
    host: str | None = None
    """Name of the node that began it."""
    exit_code: int | None = None
    signal: int | None = None
    signature: str | None = None
    """Id of the known failure text that explains it."""
    reached: int = 0
    """The last iteration that any rank finished, or that it went on from; 0 when none."""
    rank: int | None = None
    of_the_job: bool = False
    """A trainer of ours has refused its job, or what it was to go on from."""

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same failure at the same iteration."""
        return self._kind == other._kind and self.reached == other.reached

    @property
    def _kind(self) -> tuple[object, ...]:
        return self.reason, self.host, self.exit_code, self.signal, self.signature

    @property
    def words(self) -> str:
        """ "rank 1's death at iteration 37"."""
        who = f"rank {self.rank}'s" if self.rank is not None else "the"
        what = _WORDS.get(self.reason, "failure")
        if self.reason is Reason.NODE_LOST:
            who = f"{self.host}'s" if self.host else "a node's"
        return f"{who} {what}" + (f" at iteration {self.reached}" if self.reached else " before the first step")


_WORDS = {
    Reason.RANK_KILLED: "death",
    Reason.NODE_LOST: "loss",
    Reason.HUNG: "hang",
    Reason.OUT_OF_MEMORY: "death for want of memory",
    Reason.LAUNCH_FAILED: "failure to start",
}


@dataclass(frozen=True)
class Present:
    """One node of the run, after an attempt has been fenced."""

    node: str
    proved: bool
    """It answers, and nothing of any attempt is left there."""
    silent_s: float = 0.0


@dataclass(frozen=True)
class Retry:
    """Start another attempt, `delay_s` after now."""

    members: tuple[str, ...]
    left_out: tuple[str, ...]
    delay_s: float
    why: str


@dataclass(frozen=True)
class Wait:
    """Look again in a moment."""

    why: str


@dataclass(frozen=True)
class End:
    """No restart."""

    why: str


def refusal(policy: Policy, history: Sequence[Failure]) -> End | None:
    """Why nothing more is tried after the last of `history`; None when it may be. Of one run, since it was launched or
    taken up by its user."""
    last, earlier = history[-1], history[:-1]
    if policy.why_never is not None:
        return End(policy.why_never)
    if last.reason in _NEVER:
        return End(_NEVER[last.reason])
    furthest = max((each.reached for each in earlier), default=0)
    if last.of_the_job and last.reached <= furthest:
        return End("a restart does not mend what a trainer refuses")
    if (why := _cannot_mend(last, first=not earlier)) is not None:
        return End(why)
    if len(history) > policy.max_restarts:
        return End(f"{_times(policy.max_restarts)}: [recovery] max_restarts allows no more")
    if last.reached <= max((each.reached for each in earlier), default=-1) and any(map(last.is_like, earlier)):
        return End(f"the same failure came again {_place(last)}, without a step in between")
    if stalled(history) >= STALLED_LIMIT:
        return End(f"{STALLED_LIMIT} attempts in a row made no progress")
    return None


def next_step(
    policy: Policy, history: Sequence[Failure], roll: Sequence[Present], waited_s: float, rng: random.Random
) -> Retry | Wait | End:
    """What to do now, `waited_s` after the last of `history` was fenced; `roll` is every node of the run."""
    if (no := refusal(policy, history)) is not None:
        return no
    there = tuple(each.node for each in roll if each.proved)
    missing = [each for each in roll if not each.proved]
    names = ", ".join(each.node for each in missing)
    if missing and not (len(there) >= policy.needed and all(_surely_ended(each, policy) for each in missing)):
        if waited_s > policy.node_wait_s:
            return End(
                f"{names} has not come back within {policy.node_wait_s:g} s, and {policy.needed} nodes are needed"
            )
        return Wait(f"waits for {names}")
    left_out = tuple(each.node for each in missing)
    why = f"recovers from {history[-1].words}" + (f", without {names}" if missing else "")
    return Retry(there, left_out, backoff_s(policy, history, rng), why)


def backoff_s(policy: Policy, history: Sequence[Failure], rng: random.Random) -> float:
    """Seconds to wait: next to nothing after an attempt that made progress."""
    in_vain = stalled(history)
    longest = policy.backoff_s * 2.0 ** max(0, in_vain - 1) if in_vain else min(_FIRST_BACKOFF_S, policy.backoff_s)
    return min(longest, _LONGEST_BACKOFF_S) * rng.uniform(0.5, 1.0)


def stalled(history: Sequence[Failure]) -> int:
    """How many attempts at the end of `history` brought the run no further than it had been."""
    furthest, in_vain = 0, 0
    for failure in history:
        in_vain = 0 if failure.reached > furthest else in_vain + 1
        furthest = max(furthest, failure.reached)
    return in_vain


def first_cause(history: Sequence[Failure]) -> Failure:
    """Of the last failures the one that began them: those after it, in attempts that made no step, follow from it."""
    return history[max(0, len(history) - 1 - stalled(history))]


def _cannot_mend(last: Failure, *, first: bool) -> str | None:
    signature = BY_ID.get(last.signature or "")
    if signature is not None and signature.kind is Kind.CAUSE and signature.id not in _PASSING:
        return "a restart does not mend that"
    if first and last.reached == 0 and last.reason not in _FROM_OUTSIDE and last.signature not in _PASSING:
        return "it never made a step: what was launched is to be mended first"
    return None


def _surely_ended(missing: Present, policy: Policy) -> bool:
    """Whether a silent node's own keepers have ended its ranks by now."""
    return policy.lost_after_s is not None and missing.silent_s > policy.lost_after_s


def _times(restarts: int) -> str:
    return "not restarted" if restarts == 0 else f"restarted {'once' if restarts == 1 else f'{restarts} times'}"


def _place(last: Failure) -> str:
    return f"at iteration {last.reached}" if last.reached else "before the first step"
