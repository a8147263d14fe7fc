"""The part of a step that takes up what earlier supervisors have left, by the journal alone."""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import LaunchError
from engine.models import Reason, RunState
from engine.run import events
from engine.run.effects import Cancel, Connect, ConnectUnknown, Find, Reconnect, RunPreflight
from engine.run.history import AttemptHistory
from engine.run.observation import Cancelled, Found
from engine.run.outcome import ABORTED_EARLY, end_run, judge_again, judged, launch_failed, seek_proofs, unproved
from engine.run.recovery import fail_again, plan_attempt
from engine.run.running import begin_running, begin_watch
from engine.run.state import HEAD, Ending, Phase, Transition

_PROOF_LIMIT_S = 30.0
"""For every node to show that nothing is left of a run that is taken up again."""
_SHORT_AFTERMATH_S = 30.0
"""For a run that has waited for its nodes before."""
_LOST_IN_LAUNCH = "its supervisor was lost in the middle of the launch"
_LOST = events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, _LOST_IN_LAUNCH)
_RESUME = "`flightdeck resume` goes on from the newest state that the nodes have"


def take_up(t: Transition) -> None:
    """Nothing of a run that is taken up again may be left anywhere."""
    t.enter(Phase.TAKING_UP)
    if (attempt := t.history.last_attempt) is not None:
        _connect_again(t, attempt, (*t.state.launched_plan.nodes, HEAD))
    if t.state.unknown_attempt is not None:
        t.do(ConnectUnknown())


def taking_up(t: Transition) -> None:
    if t.history.abort is not None:
        end_run(t, ABORTED_EARLY)
        return
    seek_proofs(t)
    left = unproved(t)
    if left and t.waited_s <= _PROOF_LIMIT_S:
        return
    verdict = t.seen.unknown if t.state.unknown_attempt is not None else judged(t)
    if left:
        error = LaunchError(
            "the run cannot be taken up yet",
            where=", ".join(left),
            why="its last attempt is not proved to be gone there",
            todo="see that the node answers",
        )
        end_run(t, launch_failed(str(error)))
    elif verdict is not None and verdict.state is RunState.SUCCEEDED:
        end_run(t, verdict)
    elif t.state.unknown_attempt is not None or not judge_again(t):
        plan_attempt(t, t.state.plan.nodes)


def adopt(t: Transition) -> None:
    attempt = t.history.last_attempt
    if t.state.unknown_attempt is not None:
        # Nothing of it can be watched: it must not train on unseen.
        t.enter(Phase.ENDING_UNKNOWN)
        t.do(ConnectUnknown())
    elif attempt is None or not t.history.launched:
        if t.state.launched_plan.unattended and t.history.abort is None:
            if t.run_state is RunState.PLANNED:
                t.change(RunState.PREFLIGHT)
            t.enter(Phase.PREFLIGHT)
            t.do(RunPreflight())
            return
        # Nobody waits for it any more, and what was checked then is not true now: it is not launched by surprise.
        lost = events.Verdict(
            RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost before anything was launched"
        )
        end_run(t, lost if t.history.abort is None else ABORTED_EARLY)
    elif attempt.status.reason is not None and t.run_state in (RunState.RECOVERING, RunState.LAUNCHING):
        _connect_again(t, attempt, (*attempt.plan.nodes, HEAD))
        t.change(RunState.RECOVERING)
        t.enter(Phase.DECIDING)
    else:
        _connect_again(t, attempt, ())
        t.enter(Phase.FINDING)
        t.do(Find(attempt.plan))


def finding(t: Transition) -> None:
    """Go on with the last attempt of an earlier supervisor. When an abort comes in between, what there is of it is
    ended as an attempt that runs."""
    if t.result(Cancelled):
        begin_running(t, launched=False)
        return
    result = t.result(Found)
    if result is None:
        if t.history.abort is not None:
            t.do(Cancel())
        return
    if result.launcher is not None and t.state.attempt.launcher is None:
        t.record(result.launcher)
    if result.launcher is not None or result.anything or t.run_state is RunState.FINISHING:
        begin_running(t, launched=result.launcher is not None)
    elif t.state.launched_plan.unattended:
        fail_again(t, _LOST)
    elif not t.history.failures:
        end_run(t, _LOST)
    else:
        # It had been running before: it goes on.
        fail_again(t, launch_failed(_LOST_IN_LAUNCH))


def ending_unknown(t: Transition) -> None:
    seek_proofs(t)
    if unproved(t) and t.waited_s <= _PROOF_LIMIT_S:
        return
    cause = f"{t.state.unknown_attempt}: what was left of it has been ended, and how far it came is not known"
    if t.seen.unknown is not None:
        end_run(t, t.seen.unknown)
    elif t.history.abort is not None:
        end_run(t, events.Verdict(RunState.ABORTED, Reason.USER_ABORT, cause))
    else:
        end_run(t, events.Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, fix=_RESUME))


def _connect_again(t: Transition, attempt: AttemptHistory, nodes: Iterable[str]) -> None:
    """An earlier supervisor's attempt. On `nodes` it is not proved that nothing of it is left; of the run's nodes that
    it went on without, the proof is sought anew."""
    ranks = len(attempt.plan.nodes)
    watch = begin_watch(attempt.number, t.seen.now, ranks=ranks, slept_s=t.seen.slept_s, lost=attempt.lost)
    t.set(watch=watch, ending=Ending(attempt.trigger or events.Trigger.ENDED), sought=frozenset(nodes))
    t.do(Connect(attempt.plan))
    sought = set(t.state.plan.nodes).difference(attempt.plan.nodes)
    for earlier in reversed(t.history.attempts):
        # Several may be on one host.
        if nodes := tuple(node for node in earlier.plan.nodes if node in sought):
            t.do(Reconnect(earlier.plan, nodes))
            sought.difference_update(nodes)


def prove_end(t: Transition) -> None:
    """The run has ended: go on with the nodes on which an earlier supervisor could not prove that."""
    record, attempt = t.history.record, t.history.last_attempt
    t.enter(Phase.AFTERMATH)
    if t.state.unknown_attempt is not None:
        t.do(ConnectUnknown())
        return
    if attempt is None:
        return
    nodes = {*record.unconfirmed, *(attempt.plan.nodes[rank] for rank in attempt.ranks_with_missing_files)}
    if t.history.end_unseen:
        # The verdict that may follow needs the ends of all ranks.
        nodes.update(attempt.plan.nodes)
    if not nodes:
        return
    _connect_again(t, attempt, nodes)
    if record.ended_at is not None:
        age_s = (t.seen.at - record.ended_at).total_seconds()
        t.set(aftermath_s=max(t.state.aftermath_s - age_s, _SHORT_AFTERMATH_S))
