"""The next step of a run, as a pure function of what is observed: whether an attempt is stopped, and whether a run
whose attempt has failed restarts, waits for nodes, or finishes.

Nothing is retried that a restart cannot fix, and nothing without end: at most `max_restarts` restarts, at most
STALLED_LIMIT attempts in a row without progress, and none after the same failure at the same iteration. Between
restarts without progress the wait doubles, with jitter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from engine.config.mlx_lm_keys import DEFAULTS
from engine.config.models import RecoveryConfig, needs_all_nodes
from engine.failures.signature import SignatureKind
from engine.failures.signatures import BY_ID
from engine.models import Reason
from engine.plan.checkpoints import state_every
from engine.run.events import AttemptFailed, Trigger
from engine.run.history import RunHistory
from engine.run.node_health import lost_after_s
from engine.run.run_plan import RunPlan


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet."""

    why: str


@dataclass(frozen=True)
class Restart:
    """Start another attempt, `delay_s` from now."""

    members: tuple[str, ...]
    left_out: tuple[str, ...]
    delay_s: float
    why: str


@dataclass(frozen=True)
class Finish:
    why: str


START_LIMIT_S = 60.0
"""For every rank to appear."""
SETTLE_S = 1.0
"""A rank that has only lost its peers waits this long for the one that failed first."""
LINGER_S = 30.0
"""For the dispensable ranks, and for those whose trainer has completed, once all others have: what they still do is in
no result."""


@dataclass(frozen=True)
class RankState:
    started: bool = False
    ended: bool = False
    failed: bool = False
    """It ended, was not meant to end so, and is not dispensable."""
    consequence: bool = False
    """Its failure follows from another rank's."""
    node_silent_s: float = 0.0
    """How long ago its node last answered; infinite before the first answer."""
    dispensable: bool = False
    completed: bool = False
    """Its trainer has reported that it has done its work; its keeper may not have answered since."""


@dataclass(frozen=True)
class RunningAttempt:
    """An attempt as it is observed now. Times are seconds up to now."""

    ranks: tuple[RankState, ...]
    age_s: float = 0.0
    failing_s: float = 0.0
    """Since the first failed rank was noticed."""
    launched: bool = True
    """This supervisor knows, or knew, a launcher."""
    launcher_gone_s: float | None = None
    """None while the launcher lives."""
    abort: bool = False
    completed_s: float = 0.0
    """Since all ranks but the dispensable ones completed."""
    apart: bool = False
    """The ranks train in groups of their own."""

    @property
    def over(self) -> bool:
        """Every rank has ended, or only those have not that need not, and had their time to."""
        running = [rank for rank in self.ranks if not rank.ended]
        idle = all(rank.dispensable or rank.completed for rank in running)
        return not running or (self.completed_s > LINGER_S and idle)

    @property
    def all_completed(self) -> bool:
        """Every rank but the dispensable ones has done its work."""
        return all(rank.dispensable or rank.completed or (rank.ended and not rank.failed) for rank in self.ranks)

    @property
    def all_finished(self) -> bool:
        """Every rank has done what it was meant to do: there is nothing left to abort."""
        return all(rank.ended and not rank.failed for rank in self.ranks)

    @property
    def first_failure_known(self) -> bool:
        """A rank failed by itself, or none that did was found in time."""
        failed = [rank for rank in self.ranks if rank.failed]
        return bool(failed) and (self.failing_s > SETTLE_S or any(not rank.consequence for rank in failed))

    @cached_property
    def starting(self) -> bool:
        """Ranks are missing, and none that started has failed."""
        return not all(rank.started for rank in self.ranks) and not any(rank.failed for rank in self.ranks)

    @property
    def nobody_else_will_start(self) -> bool:
        """The nodes of the missing ranks have answered since the launcher ended, and the ranks were not there."""
        gone_s = self.launcher_gone_s
        if not self.starting or gone_s is None or gone_s <= SETTLE_S:
            return False
        return all(rank.started or rank.node_silent_s < gone_s - SETTLE_S / 2 for rank in self.ranks)


STOPS: Final[Sequence[tuple[Callable[[RunningAttempt], bool], Trigger]]] = (
    (lambda state: state.abort and not state.all_finished, Trigger.ABORT),
    (lambda state: state.over, Trigger.ENDED),
    (lambda state: state.first_failure_known, Trigger.RANK),
    (lambda state: state.launched and state.nobody_else_will_start, Trigger.LAUNCHER_GONE),
    (lambda state: state.nobody_else_will_start, Trigger.NOT_STARTED),
    (lambda state: state.starting and state.age_s > START_LIMIT_S, Trigger.NOT_STARTED),
    (lambda state: state.apart, Trigger.APART),
)
"""Why a running attempt is stopped: the first row that holds; if none does, it may hang."""


def stop_trigger(state: RunningAttempt) -> Trigger | None:
    """None while the attempt goes on."""
    return next((trigger for holds, trigger in STOPS if holds(state)), None)


STALLED_LIMIT = 3
"""Attempts in a row without progress."""
_LONGEST_BACKOFF_S = 60.0
_FIRST_BACKOFF_S = 0.2

_REFUSED_BY_TRAINER = re.compile(r"\bJobError: (.*)")


def describe_failure(failed: AttemptFailed) -> str:
    """ "rank 1's death at iteration 37"."""
    verdict = failed.verdict
    who = f"rank {verdict.rank}'s" if verdict.rank is not None else "the"
    if verdict.reason is Reason.NODE_LOST:
        who = f"{verdict.host}'s" if verdict.host else "a node's"
    what = f"{who} {verdict.reason.traits.noun}"
    return what if failed.ran_long else f"{what} {_place(failed)}"


def _kind(failed: AttemptFailed) -> tuple[object, ...]:
    verdict = failed.verdict
    return verdict.reason, verdict.host, verdict.exit_code, verdict.signal, verdict.signature, failed.reached


@dataclass(frozen=True)
class NodePresence:
    node: str
    proved: bool
    """It answers, and nothing of any attempt is left there."""
    silent_s: float = 0.0


@dataclass(frozen=True)
class FailedRun:
    """A run whose last attempt has failed and was stopped."""

    recovery: RecoveryConfig
    failures: tuple[AttemptFailed, ...]
    """Since the run was launched or reopened, oldest first; at least one."""
    needed: int
    """Nodes that a restart needs at least."""
    lost_after_s: float | None
    """The lease of a node that was silent for as long has ended its ranks; None: the lease lets them go on."""
    why_never: str | None = None
    """Why this job is never restarted."""
    unattended: bool = False
    """As in RunPlan."""
    nodes: tuple[NodePresence, ...] = ()
    """All nodes of the run."""
    waited_s: float = 0.0
    """Since the last attempt was stopped."""
    jitter: float = 1.0
    """0.5 to 1: the part of the back-off that is waited."""

    @property
    def last(self) -> AttemptFailed:
        return self.failures[-1]

    @property
    def earlier(self) -> tuple[AttemptFailed, ...]:
        return self.failures[:-1]

    @property
    def lost_with_head(self) -> bool:
        """Its last attempt was lost with its supervisor alone, and it goes on without a person."""
        return self.unattended and self.last.verdict.reason is Reason.SUPERVISOR_LOST

    @cached_property
    def furthest_before(self) -> int:
        """The furthest iteration of the attempts before the last; -1 where there are none."""
        return max((failure.reached for failure in self.earlier), default=-1)


def _known_cause(run: FailedRun) -> bool:
    signature = BY_ID.get(run.last.verdict.signature or "")
    return signature is not None and signature.kind is SignatureKind.CAUSE and not signature.transient


def _transient(failed: AttemptFailed) -> bool:
    signature = BY_ID.get(failed.verdict.signature or "")
    return signature is not None and signature.transient


def _never(run: FailedRun) -> str | None:
    return run.why_never or (None if run.lost_with_head else run.last.verdict.reason.traits.never_restarted)


def _never_stepped(run: FailedRun) -> bool:
    last = run.last
    if run.earlier or last.under_way or run.lost_with_head:
        return False
    return not last.verdict.reason.traits.from_outside and not _transient(last)


def _repeated(run: FailedRun) -> bool:
    """The same failure at the same iteration."""
    if run.last.ran_long:
        return False
    return run.last.reached <= run.furthest_before and _kind(run.last) in map(_kind, run.earlier)


def _refused(run: FailedRun) -> str | None:
    """Why the trainer refused its job, or the state that it was to go on from."""
    refused = _REFUSED_BY_TRAINER.search(run.last.verdict.cause or "")
    return refused[1] if refused is not None and run.last.reached <= max(0, run.furthest_before) else None


def _restarted(run: FailedRun) -> str:
    restarts = run.recovery.max_restarts
    times = "not restarted" if restarts == 0 else f"restarted {'once' if restarts == 1 else f'{restarts} times'}"
    return f"{times}: [recovery] max_restarts allows no more"


REFUSALS: Final[Sequence[tuple[Callable[[FailedRun], object], Callable[[FailedRun], str | None]]]] = (
    (_never, _never),
    (_refused, lambda run: f"a restart does not fix what a trainer refuses: {_refused(run)}"),
    (_known_cause, lambda _: "a restart does not fix that"),
    (_never_stepped, lambda _: "it never made a step, or none that is read: what was launched has to be fixed first"),
    (lambda run: len(run.failures) > run.recovery.max_restarts, _restarted),
    (_repeated, lambda run: f"the same failure came again {_place(run.last)}, without progress in between"),
    (
        lambda run: stalled(run.failures) >= STALLED_LIMIT,
        lambda _: f"{STALLED_LIMIT} attempts in a row made no progress",
    ),
)
"""Why no other attempt follows: the first row that holds."""


def refusal(run: FailedRun) -> Finish | None:
    """Why no other attempt may follow the last failure; None when one may."""
    return next((Finish(why(run) or "") for holds, why in REFUSALS if holds(run)), None)


def decide(run: FailedRun) -> Wait | Restart | Finish:
    return refusal(run) or _restart_or_wait(run)


def _restart_or_wait(run: FailedRun) -> Wait | Restart | Finish:
    members = tuple(presence.node for presence in run.nodes if presence.proved)
    missing = [presence for presence in run.nodes if not presence.proved]
    left_out = tuple(presence.node for presence in missing)
    names = ", ".join(left_out)
    # The own keepers of a node that was silent for so long have ended its ranks by now.
    surely_ended = all(run.lost_after_s is not None and presence.silent_s > run.lost_after_s for presence in missing)
    if missing and not (len(members) >= run.needed and surely_ended):
        limit_s = run.recovery.node_wait_s
        if run.waited_s > limit_s:
            return Finish(f"{names} has not come back within {limit_s:g} s, and {run.needed} nodes are needed")
        return Wait(f"waits for {names}")
    why = f"recovers from {describe_failure(run.last)}" + (f", without {names}" if missing else "")
    return Restart(members, left_out, backoff_s(run), why)


def backoff_s(run: FailedRun) -> float:
    """Next to nothing after an attempt that made progress."""
    in_vain, unit = stalled(run.failures), run.recovery.backoff_s
    longest = unit * 2.0 ** max(0, in_vain - 1) if in_vain else min(_FIRST_BACKOFF_S, unit)
    return min(longest, _LONGEST_BACKOFF_S) * run.jitter


def stalled(failures: Sequence[AttemptFailed]) -> int:
    """How many attempts at the end of `failures` brought the run no further than it had been."""
    furthest, in_vain = 0, 0
    for failure in failures:
        in_vain = 0 if failure.reached > furthest or failure.ran_long else in_vain + 1
        furthest = max(furthest, failure.reached)
    return in_vain


def original_failure(failures: Sequence[AttemptFailed]) -> int:
    """The place of the failure that began the last ones: those after it, in attempts without a step, follow from it."""
    return max(0, len(failures) - 1 - stalled(failures))


def _place(failed: AttemptFailed) -> str:
    early = "soon after the start" if failed.outputs else "before the first step"
    return f"at iteration {failed.reached}" if failed.reached else early


def failed_run(plan: RunPlan, history: RunHistory, *more: AttemptFailed) -> FailedRun:
    """The state to decide on after the failures of `history` and `more`."""
    config, nodes = plan.config, len(plan.nodes)
    recovery, kind = config.recovery, config.job.kind
    wanted = max(recovery.min_nodes or nodes, kind.strategy.least_ranks)
    # Before its first step a run has no state that could be lost with a node.
    needs_all = history.newest_reached > 0 and needs_all_nodes(config)
    failures = (*history.failures, *more)
    allowed, nothing_ran = recovery.restart_commands, _nothing_ran(failures[-1])
    return FailedRun(
        recovery,
        failures,
        needed=nodes if needs_all else min(wanted, nodes),
        lost_after_s=lost_after_s(config),
        why_never=kind.why_never_restarted(restart_commands=allowed, nothing_ran=nothing_ran),
        unattended=plan.unattended,
    )


def needs_state(plan: RunPlan, history: RunHistory) -> str:
    """Why the next attempt, on the nodes of `plan`, must not begin anew where no rank has a state; "" where it may."""
    recovery, reached = plan.config.recovery, history.newest_reached
    kept = plan.config.job.kind.keeps_state
    if not kept or history.reopened.without_state or not (reached or history.manifests):
        return ""
    if history.manifests:
        update, rank = max((int(saved[-1][0].split(".")[0]), rank) for rank, saved in history.manifests.items())
        nodes = {node for attempt in history.attempts for node in attempt.plan.nodes[rank : rank + 1]}
        return f"rank {rank} on {' or '.join(sorted(nodes))} had saved that of update {update}"
    if recovery.without_state == "fail":
        return f'the run had reached iteration {reached} ([recovery] without_state is "fail")'
    if absent := {node for attempt in history.attempts for node in attempt.plan.nodes} - set(plan.nodes):
        return f"{', '.join(sorted(absent))}, which is left out, may have that of iteration {reached}"
    limit, limit_s = recovery.restart_from_scratch_within, recovery.restart_from_scratch_within_s
    if limit is None:
        job = {**DEFAULTS, **plan.config.job.mlx_lm}
        limit = state_every(plan.config) * int(job["grad_accumulation_steps"]) or int(job["save_every"])
    ran_s = max((attempt.ran_s(history.state_since) for attempt in history.attempts), default=0.0)
    limits = f"more than [recovery] restart_from_scratch_within lets it repeat ({limit} in {limit_s:g} s)"
    made = f"the run had made {reached} iterations in {ran_s:.0f} s, {limits}"
    return made if reached > limit or ran_s > limit_s else ""


def _nothing_ran(failed: AttemptFailed) -> bool:
    """A port was taken, for example: the program has no state that could be lost."""
    return failed.verdict.reason is Reason.LAUNCH_FAILED and _transient(failed) and not failed.under_way
