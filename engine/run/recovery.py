"""The part of a step between two attempts: whether, when and on which nodes another one follows a failure."""

from __future__ import annotations

from dataclasses import replace

from engine.models import RunState
from engine.run import events
from engine.run.decide import Finish, Restart, Wait, decide, failed_run, original_failure, refusal
from engine.run.effects import PlanAttempt
from engine.run.outcome import (
    aborted,
    attempt_failure,
    end_run,
    judge_again,
    judged,
    presence,
    seek_proofs,
    unproved,
)
from engine.run.shutdown import SILENT_S
from engine.run.state import HEAD, Ending, Phase, Transition


def plan_attempt(t: Transition, members: tuple[str, ...], placement: events.Attempt | None = None) -> None:
    t.change(RunState.LAUNCHING)
    t.enter(Phase.PLANNING)
    t.do(PlanAttempt(members, placement))


def _reusable_placement(t: Transition, members: tuple[str, ...]) -> events.Attempt | None:
    """The last attempt, when it was on the same nodes and its failure does not change what is known of them. If
    something was removed there meanwhile, the launch fails, and the nodes are probed again."""
    last, failures = t.state.planned, t.history.failures
    unchanged = bool(failures) and failures[-1].verdict.reason.traits.nodes_unchanged
    return last if last is not None and unchanged and last.nodes == members else None


def after_failure(t: Transition) -> None:
    if t.run_state is RunState.RECOVERING:
        t.enter(Phase.DECIDING, restart=None, delay=None)
    elif (refused := refusal(failed_run(t.state.plan, t.history))) is not None:
        _refuse_restart(t, refused)
    else:
        end_run(t, t.history.failures[-1].verdict)


def deciding(t: Transition) -> None:
    if t.history.abort is not None:
        abandon(t)
        return
    seek_proofs(t)
    verdict = judged(t)
    if verdict is not None and (
        verdict.state is RunState.SUCCEEDED or (verdict.state is RunState.COMPLETED and t.history.end_unseen)
    ):
        # It has not failed, as its nodes show only now.
        end_run(t, verdict)
    elif not judge_again(t):
        _decide(t)


def _decide(t: Transition) -> None:
    failed = replace(failed_run(t.state.plan, t.history), nodes=presence(t), waited_s=t.waited_s, jitter=t.seen.jitter)
    match decide(failed):
        case Wait(why):
            if why != t.state.delay:
                t.set(delay=why)
                t.record(events.RestartDelayed(after=failed.last.attempt, why=why))
        case Finish() as finish:
            _refuse_restart(t, finish)
        case Restart() as restart:
            planned = events.RestartPlanned(
                attempt=t.state.next_attempt,
                after=failed.last.attempt,
                members=restart.members,
                left_out=restart.left_out,
                delay_s=round(restart.delay_s, 3),
                why=restart.why,
            )
            t.record(planned)
            t.enter(Phase.BACKING_OFF, restart=restart)


def _refuse_restart(t: Transition, finish: Finish) -> None:
    """The run's verdict: of the last failures the one that the others follow from."""
    failures = t.history.failures
    t.record(events.RestartRefused(after=failures[-1].attempt, why=finish.why))
    end_run(t, failures[original_failure(failures)].verdict)


def backing_off(t: Transition) -> None:
    assert t.state.restart is not None
    if t.history.abort is not None:
        abandon(t)
        return
    seek_proofs(t)
    if t.waited_s >= t.state.restart.delay_s and not t.ending.settling:
        plan_attempt(t, t.state.restart.members, _reusable_placement(t, t.state.restart.members))


def abandon(t: Transition) -> None:
    """There is nothing to stop but what was fenced, and that is proved, except for nodes that do not answer."""
    t.record(events.StopStageReached(stage=events.StopStage.ASKED))
    t.enter(Phase.ABANDONING)


def abandoning(t: Transition) -> None:
    seek_proofs(t)
    left = unproved(t)
    if left and t.waited_s <= SILENT_S:
        return
    stage = events.StopStage.UNCONFIRMED if left else events.StopStage.STOPPED
    t.record(events.StopStageReached(stage=stage))
    end_run(t, aborted(t))


def fail_again(t: Transition, verdict: events.Verdict) -> None:
    """Prove once more that nothing is left of an attempt that never got going."""
    t.set(sought=frozenset((*t.state.attempt.plan.nodes, HEAD)), ending=Ending())
    t.change(RunState.RECOVERING)
    t.record(attempt_failure(t, t.watch.number, verdict))
    after_failure(t)
