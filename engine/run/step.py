"""The life of a run, one step at a time: what follows from its state and from what is seen of it. Pure: the same state
and observation always give the same next state and effects. PHASES has a function for every phase of a life.

Nothing runs twice at once: the next attempt is planned when nothing of the last is left on any node that answers, and
when the lease of every node that does not answer has expired. The proof is still sought on nodes that a run goes on
without."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from engine.config.models import needs_all_nodes
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckStatus, PreflightReport, Reason, RunState
from engine.run import events
from engine.run.adopt import adopt, ending_unknown, finding, prove_end, take_up, taking_up
from engine.run.decide import failed_run, refusal, stop_trigger
from engine.run.effects import Cancel, Connect, Effect, RequestExitOutput, RunPreflight, Settle, Start
from engine.run.events import Trigger
from engine.run.history import RunHistory
from engine.run.observation import Cancelled, Checked, Observation, Planned, Settled, Started
from engine.run.outcome import (
    ABORTED_EARLY,
    aborted,
    aftermath,
    attempt_failure,
    end_run,
    judge,
    judge_again,
    judged,
    launch_failed,
    proof_of,
    record_missing,
)
from engine.run.preparation import excluded_nodes, preflight_verdict
from engine.run.recovery import abandon, abandoning, after_failure, backing_off, deciding, fail_again, plan_attempt
from engine.run.run_plan import RunPlan
from engine.run.running import (
    attempt_now,
    begin_running,
    begin_watch,
    find_hang,
    note_losses,
    note_missing_launcher,
    raise_command_alarm,
    take_in,
)
from engine.run.shutdown import Shutdown, StopPlan, advance, begin_shutdown, skip_grace
from engine.run.state import Ending, Phase, State, Transition, attempt_view
from engine.run.supervisor_process import AFTERMATH_S

_PURPOSES: Final[Mapping[Trigger, Literal["abort", "fence", "end"]]] = {Trigger.ABORT: "abort", Trigger.ENDED: "end"}


def begin(plan: RunPlan, history: RunHistory, newest_attempt: int, *, adopting: bool) -> State:
    """The state of a run that a supervisor begins with. `newest_attempt`: the number of the newest attempt of which
    there are files on the head; 0 for none."""
    return State(plan, history.plan(plan), history, newest_attempt, adopting=adopting, aftermath_s=AFTERMATH_S)


def step(state: State, seen: Observation) -> tuple[State, list[Effect]]:
    t = Transition(state, seen)
    for event in seen.news:
        t.record(event)
    if t.state.phase in _STOPPABLE and _time_is_up(t):
        t.record(events.RequestReceived(request="budget", by="its budget"))
    PHASES[t.state.phase](t)
    return t.state, t.effects


_STOPPABLE: Final = frozenset({Phase.PLANNING, Phase.RUNNING, Phase.DECIDING, Phase.BACKING_OFF})
"""In the others nothing trains yet, or the attempt is about to end."""


def _time_is_up(t: Transition) -> bool:
    """By the wall clock, which goes on over supervisors: also while the run waits for its nodes."""
    budget_s, began = t.state.launched_plan.budget_s, t.history.launched_at
    if budget_s is None or began is None or t.history.abort is not None or t.history.reopened.without_budget:
        return False
    return (t.seen.at - began).total_seconds() >= budget_s


def _begin(t: Transition) -> None:
    if t.run_state.ended:
        prove_end(t)
    elif t.state.adopting:
        adopt(t)
    elif t.history.abort is not None:
        end_run(t, ABORTED_EARLY)
    else:
        t.change(RunState.PREFLIGHT)
        t.enter(Phase.PREFLIGHT)
        t.do(RunPreflight())


def _preflight(t: Transition) -> None:
    if _cancelled(t):
        end_run(t, ABORTED_EARLY)
    elif checked := t.result(Checked):
        if checked.report is None:
            end_run(t, events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, checked.error))
        else:
            _take_report(t, checked.report)


def _take_report(t: Transition, report: PreflightReport) -> None:
    if excluded := excluded_nodes(report):
        _exclude(t, excluded)
    elif failed := next((result for result in report.checks if result.status is CheckStatus.FAIL), None):
        end_run(t, preflight_verdict(failed))
    elif t.history.attempts or t.state.unknown_attempt is not None:
        take_up(t)
    else:
        plan_attempt(t, t.state.plan.nodes)


def _exclude(t: Transition, excluded: Mapping[str, str]) -> None:
    """The ring of the others is another one: it is checked again."""
    why = "; ".join(dict.fromkeys(excluded.values()))
    try:
        if needs_all_nodes(t.state.plan.config) and t.history.attempts:
            raise LaunchError(
                "the run cannot go on without a node",
                where=", ".join(excluded),
                why=f"each node has a part of its state; {why}",
                todo="fix it there",
            )
        world_size = len(t.state.plan.without(excluded).nodes)
    except FlightDeckError as error:
        end_run(t, events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error)))
        return
    t.record(events.NodesExcluded(nodes=tuple(excluded), why=why, world_size=world_size))
    t.do(RunPreflight(excluded))


def _planning(t: Transition) -> None:
    if _cancelled(t):
        if t.history.failures:
            abandon(t)
        else:
            end_run(t, ABORTED_EARLY)
    elif planned := t.result(Planned):
        if planned.attempt is None:
            _fail_to_plan(t, planned.error)
        else:
            _start(t, planned, planned.attempt)


def _fail_to_plan(t: Transition, error: str | None) -> None:
    verdict = launch_failed(error)
    if not t.history.failures:
        end_run(t, verdict)
        return
    # The nodes and connections of the last attempt are what there still is.
    t.change(RunState.RECOVERING)
    t.record(attempt_failure(t, t.state.next_attempt, verdict))
    after_failure(t)


def _start(t: Transition, planned: Planned, attempt: events.Attempt) -> None:
    for event in planned.decided:
        t.record(event)
    t.record(events.AttemptPlanned(attempt=attempt))
    # Those of nodes that it leaves out are sought on.
    kept = {
        host.key: proof_of(t, host)
        for host in t.seen.hosts
        if not host.local and set(attempt.nodes).isdisjoint(host.names)
    }
    watch = begin_watch(attempt.number, t.seen.now, ranks=len(attempt.nodes), slept_s=t.seen.slept_s)
    t.enter(Phase.STARTING, planned=attempt, watch=watch, ending=Ending(), proofs=kept, sought=frozenset())
    t.do(Connect(attempt, tuple(kept)), Start(attempt))


def _starting(t: Transition) -> None:
    """When an abort comes in between, what has started by then is ended as an attempt that runs."""
    if t.result(Cancelled):
        begin_running(t, launched=False)
    elif started := t.result(Started):
        if started.launcher is not None:
            t.record(started.launcher)
        if started.error is None:
            begin_running(t, launched=started.launcher is not None)
        elif t.history.failures:
            fail_again(t, launch_failed(started.error))
        else:
            end_run(t, launch_failed(started.error))
    elif t.history.abort is not None:
        t.do(Cancel())


def _running(t: Transition) -> None:
    take_in(t, live=True)
    raise_command_alarm(t)
    if t.ending.verdict_pending:
        if (verdict := judged(t)) is not None:
            _stop_by_verdict(t, verdict)
        return
    abort = t.history.abort
    now = attempt_now(t, abort=abort is not None)
    trigger = stop_trigger(now)
    if trigger is None:
        note_missing_launcher(t, now)
        if find_hang(t) is None:
            note_losses(t)
            return
        trigger = Trigger.HUNG
    if trigger not in (Trigger.ENDED, Trigger.RANK) or t.ending.trigger in (Trigger.ENDED, Trigger.ABORT):
        # Else it follows from what an earlier supervisor has begun.
        t.set_ending(trigger=trigger)
    if abort is not None and trigger is Trigger.ABORT:
        _announce(t, events.StopStage.ASKED)
        _begin_stop(t, RunState.FINISHING, StopPlan(cooperative=not abort.now))
        return
    if trigger is Trigger.HUNG:
        t.set_watch(failed_at=t.seen.at)
    judge(t, over=False)


def _stop_by_verdict(t: Transition, verdict: events.Verdict) -> None:
    """The surviving ranks may save their state, if one of them has enough of it. Who goes on after a success saves
    nothing that counts."""
    progress, kind = t.seen.progress, t.state.plan.config.job.kind
    recovering = t.run_state is not RunState.FINISHING and _may_restart(t, verdict)
    saves = kind.survivors_keep_state and progress.steps > 0 and verdict.reason.traits.state_sound
    state = RunState.RECOVERING if recovering else RunState.FINISHING
    _begin_stop(t, state, StopPlan(save_state=saves, first_failure=verdict.rank))


def _may_restart(t: Transition, verdict: events.Verdict) -> bool:
    failed = attempt_failure(t, t.watch.number, verdict, t.seen.progress.furthest)
    return verdict.state is RunState.FAILED and refusal(failed_run(t.state.plan, t.history, failed)) is None


def _begin_stop(t: Transition, state: RunState, plan: StopPlan) -> None:
    if t.run_state not in (state, RunState.FINISHING):
        t.change(state)
    t.set_ending(stop=begin_shutdown(plan, attempt_view(t)))
    t.enter(Phase.STOPPING)
    _advance(t)


def _stopping(t: Transition) -> None:
    take_in(t, live=True)
    raise_command_alarm(t)
    if (abort := t.history.abort) is not None:
        _abort_stop(t, abort)
    _advance(t)


def _abort_stop(t: Transition, abort: events.RequestReceived) -> None:
    """Whatever ends the attempt, it has to be ended: an abort can only speed that up."""
    if t.run_state is RunState.RECOVERING and not t.ending.aborted:
        # From here on it is the user's stop, and recorded as such.
        t.set_ending(aborted=True)
        _announce(t, events.StopStage.ASKED)
    if abort.now:
        # Otherwise what the ranks are writing, perhaps the only newest state, is still of use.
        t.set_ending(stop=skip_grace(_stop(t)))


def _advance(t: Transition) -> None:
    stop, actions = advance(_stop(t), attempt_view(t))
    t.set_ending(stop=stop)
    for action in actions:
        if isinstance(action, events.StopStage):
            _announce(t, action)
        else:
            t.do(action)
    if stop.done:
        t.enter(Phase.SETTLING, proofs={**t.state.proofs, **stop.proofs})
        t.do(Settle(tuple(key for key, proof in stop.proofs.items() if proof.found)))


def _stop(t: Transition) -> Shutdown:
    assert t.ending.stop is not None
    return t.ending.stop


def _announce(t: Transition, stage: events.StopStage) -> None:
    if stage in (events.StopStage.KILL, events.StopStage.VERIFYING):
        # The exit output of a rank without an exit record has not been sent yet.
        t.do(*(RequestExitOutput(host.key) for host in t.seen.current_hosts))
    trigger = Trigger.ABORT if t.ending.aborted else t.ending.trigger
    names = {host.key: host.names[0] for host in t.seen.hosts}
    proofs = t.ending.stop.proofs if t.ending.stop is not None else {}
    left = tuple(
        f"{names[key]} {process.pid} {process.command[:200]}"
        for key, proof in proofs.items()
        if not proof.found
        for process in proof.left
    )
    acknowledged = tuple(rank.number for rank in t.seen.ranks if rank.record is not None)
    purpose, why = _PURPOSES.get(trigger, "fence"), t.ending.trigger
    t.record(events.StopStageReached(stage=stage, purpose=purpose, trigger=why, acknowledged=acknowledged, left=left))


def _settling(t: Transition) -> None:
    take_in(t, live=False)
    if settled := t.result(Settled):
        record_missing(t, settled)
        judge(t, over=True)
    elif (verdict := judged(t)) is not None and not judge_again(t, over=True):
        _finish_attempt(t, verdict)


def _finish_attempt(t: Transition, verdict: events.Verdict) -> None:
    if verdict.state is not RunState.FAILED:
        end_run(t, verdict)
        return
    if t.state.attempt.failed_at is None:
        # Not by an earlier supervisor either.
        t.record(attempt_failure(t, t.watch.number, verdict, t.seen.progress.furthest))
    if t.ending.aborted:
        end_run(t, aborted(t))
    else:
        after_failure(t)


def _cancelled(t: Transition) -> bool:
    """An abort that comes while something is checked or planned cancels it; that has been done, or it was over."""
    if t.history.abort is None:
        return False
    over = any(isinstance(result, Cancelled | Checked | Planned) for result in t.seen.finished)
    if not over:
        t.do(Cancel())
    return over


PHASES: Final[Mapping[Phase, Callable[[Transition], None]]] = {
    Phase.BEGINNING: _begin,
    Phase.PREFLIGHT: _preflight,
    Phase.TAKING_UP: taking_up,
    Phase.FINDING: finding,
    Phase.ENDING_UNKNOWN: ending_unknown,
    Phase.PLANNING: _planning,
    Phase.STARTING: _starting,
    Phase.RUNNING: _running,
    Phase.STOPPING: _stopping,
    Phase.SETTLING: _settling,
    Phase.DECIDING: deciding,
    Phase.BACKING_OFF: backing_off,
    Phase.ABANDONING: abandoning,
    Phase.AFTERMATH: aftermath,
}
