"""The life of a run, one step at a time: what follows from its state and from what is seen of it. Pure: the same state
and observation always give the same next state and effects. PHASES has a function for every phase of a life.

Nothing runs twice at once: the next attempt is planned when nothing of the last is left on any node that answers, and
when the lease of every node that does not answer has expired. The proof is still sought on nodes that a run goes on
without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Final, Literal

from engine.config.models import needs_all_nodes
from engine.errors import FlightDeckError, LaunchError
from engine.models import CheckStatus, PreflightReport, Reason, RunState
from engine.protocol.attempt import END
from engine.run import events
from engine.run.decide import (
    Finish,
    NodePresence,
    Restart,
    Trigger,
    Wait,
    decide,
    describe_failure,
    failed_run,
    original_failure,
    refusal,
    stop_trigger,
)
from engine.run.effects import (
    Cancel,
    Connect,
    ConnectUnknown,
    Effect,
    EndTrackers,
    Find,
    Judge,
    PlanAttempt,
    Reconnect,
    RequestExitOutput,
    RunPreflight,
    Send,
    Settle,
    Start,
)
from engine.run.history import AttemptHistory, RunHistory
from engine.run.journal import FOLLOWERS
from engine.run.observation import Cancelled, Checked, Found, HostView, Judged, Observation, Planned, Settled, Started
from engine.run.preflight import excluded_nodes, preflight_verdict
from engine.run.run_plan import RunPlan
from engine.run.running import (
    attempt_now,
    begin_watch,
    find_hang,
    note_losses,
    note_missing_launcher,
    raise_command_alarm,
    take_in,
)
from engine.run.shutdown import SILENT_S, CleanupProof, Shutdown, StopPlan, advance, begin_shutdown, skip_grace
from engine.run.state import Ending, Phase, State, Transition, attempt_view, current_hosts
from engine.run.supervisor_process import AFTERMATH_S

_PROOF_LIMIT_S = 30.0
"""For every node to show that nothing is left of a run that is taken up again."""
_SHORT_AFTERMATH_S = 30.0
"""For a run that has waited for its nodes before."""
_LOST_IN_LAUNCH = "its supervisor was lost in the middle of the launch"
_RESUME = "`flightdeck resume` goes on from the newest state that the nodes have"
_ABORTED_EARLY = events.Verdict(
    RunState.ABORTED, Reason.USER_ABORT, "stopped as requested, before anything was launched"
)
_PURPOSES: Final[Mapping[Trigger, Literal["abort", "fence", "end"]]] = {Trigger.ABORT: "abort", Trigger.ENDED: "end"}


def begin(plan: RunPlan, history: RunHistory, newest_attempt: int, *, adopting: bool) -> State:
    """The state of a run that a supervisor begins with. `newest_attempt`: the number of the newest attempt of which
    there are files on the head; 0 for none."""
    return State(plan, history.plan(plan), history, newest_attempt, adopting=adopting, aftermath_s=AFTERMATH_S)


def step(state: State, seen: Observation) -> tuple[State, list[Effect]]:
    t = Transition(state, seen)
    for event in seen.news:
        t.record(event)
    PHASES[t.state.phase](t)
    return t.state, t.effects


def _begin(t: Transition) -> None:
    if t.run_state.ended:
        _prove_end(t)
    elif t.state.adopting:
        _adopt(t)
    elif t.history.abort is not None:
        _end(t, _ABORTED_EARLY)
    else:
        t.change(RunState.PREFLIGHT)
        t.enter(Phase.PREFLIGHT)
        t.do(RunPreflight())


def _preflight(t: Transition) -> None:
    if _cancelled(t):
        _end(t, _ABORTED_EARLY)
    elif checked := t.result(Checked):
        if checked.report is None:
            _end(t, events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, checked.error))
        else:
            _take_report(t, checked.report)


def _take_report(t: Transition, report: PreflightReport) -> None:
    if excluded := excluded_nodes(report):
        _exclude(t, excluded)
    elif failed := next((result for result in report.checks if result.status is CheckStatus.FAIL), None):
        _end(t, preflight_verdict(failed))
    elif t.history.attempts or t.state.unknown_attempt is not None:
        _take_up(t)
    else:
        _plan(t, t.state.plan.nodes)


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
        _end(t, events.Verdict(RunState.FAILED, Reason.PREFLIGHT_FAILED, str(error)))
        return
    t.record(events.NodesExcluded(nodes=tuple(excluded), why=why, world_size=world_size))
    t.do(RunPreflight(excluded))


def _take_up(t: Transition) -> None:
    """Nothing of a run that is taken up again may be left anywhere."""
    t.enter(Phase.TAKING_UP)
    if (attempt := t.history.last_attempt) is not None:
        _connect_again(t, attempt, t.state.launched_plan.nodes)
    if t.state.unknown_attempt is not None:
        t.do(ConnectUnknown())


def _taking_up(t: Transition) -> None:
    if t.history.abort is not None:
        _end(t, _ABORTED_EARLY)
        return
    _seek_proofs(t)
    left = unproved(t)
    if left and t.waited_s <= _PROOF_LIMIT_S:
        return
    known = t.seen.unknown if t.state.unknown_attempt is not None else _judged(t)
    if left:
        error = LaunchError(
            "the run cannot be taken up yet",
            where=", ".join(left),
            why="its last attempt is not proved to be gone there",
            todo="see that the node answers",
        )
        _end(t, _launch_failed(str(error)))
    elif known is not None and known.state is RunState.SUCCEEDED:
        _end(t, known)
    elif t.state.unknown_attempt is not None or not _judge_again(t):
        _plan(t, t.state.plan.nodes)


def _plan(t: Transition, members: tuple[str, ...], placement: events.Attempt | None = None) -> None:
    t.change(RunState.LAUNCHING)
    t.enter(Phase.PLANNING)
    t.do(PlanAttempt(members, placement))


def _reusable_placement(t: Transition, members: tuple[str, ...]) -> events.Attempt | None:
    """The last attempt, when it was on the same nodes and its failure does not change what is known of them. If
    something was removed there meanwhile, the launch fails, and the nodes are probed again."""
    last, failures = t.state.planned, t.history.failures
    unchanged = bool(failures) and failures[-1].verdict.reason.traits.nodes_unchanged
    return last if last is not None and unchanged and last.nodes == members else None


def _planning(t: Transition) -> None:
    if _cancelled(t):
        if t.history.failures:
            _abandon(t)
        else:
            _end(t, _ABORTED_EARLY)
    elif planned := t.result(Planned):
        if planned.attempt is None:
            _fail_to_plan(t, planned.error)
        else:
            _start(t, planned, planned.attempt)


def _fail_to_plan(t: Transition, error: str | None) -> None:
    verdict = _launch_failed(error)
    if not t.history.failures:
        _end(t, verdict)
        return
    # The nodes and connections of the last attempt are what there still is.
    t.change(RunState.RECOVERING)
    _record_failure(t, t.state.next_attempt, verdict)
    _after_failure(t, verdict)


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
        _run(t, launched=False)
    elif started := t.result(Started):
        if started.launcher is not None:
            t.record(started.launcher)
        if started.error is None:
            _run(t, launched=started.launcher is not None)
        else:
            _fail_to_start(t, _launch_failed(started.error))
    elif t.history.abort is not None:
        t.do(Cancel())


def _fail_to_start(t: Transition, verdict: events.Verdict) -> None:
    if t.history.failures:
        _fail_again(t, verdict)
    else:
        _end(t, verdict)


def _run(t: Transition, *, launched: bool) -> None:
    t.set_watch(launched=launched, began=t.seen.now, quiet_since=t.seen.now, looked_at=t.seen.now)
    t.enter(Phase.RUNNING)


def _running(t: Transition) -> None:
    take_in(t, live=True)
    raise_command_alarm(t)
    if t.ending.verdict_pending:
        if (verdict := _judged(t)) is not None:
            _stop_by_verdict(t, verdict)
        return
    abort = t.history.abort
    now = attempt_now(t, abort=abort is not None)
    trigger = stop_trigger(now)
    if trigger is None:
        note_missing_launcher(t, now)
        trigger = stop_trigger(replace(now, hang=find_hang(t)))
    if trigger is None:
        note_losses(t)
        return
    t.set_ending(trigger=trigger)
    if abort is not None and trigger is Trigger.ABORT:
        _announce(t, events.StopStage.ASKED)
        _begin_stop(t, RunState.FINISHING, StopPlan(cooperative=not abort.now))
        return
    if trigger is Trigger.HUNG:
        t.set_watch(failed_at=t.seen.at)
    _judge(t, over=False)


def _stop_by_verdict(t: Transition, verdict: events.Verdict) -> None:
    """The surviving ranks may save their state, if one of them has enough of it. Who goes on after a success saves
    nothing that counts."""
    progress, kind = t.seen.progress, t.state.plan.config.job.kind
    recovering = t.run_state is not RunState.FINISHING and _may_restart(t, verdict)
    saves = kind.survivors_keep_state and progress.steps > 0 and verdict.reason.traits.state_sound
    state = RunState.RECOVERING if recovering else RunState.FINISHING
    _begin_stop(t, state, StopPlan(save_state=saves, first_failure=verdict.rank))


def _may_restart(t: Transition, verdict: events.Verdict) -> bool:
    failure = _failure(t, t.watch.number, verdict, t.seen.progress.furthest)
    return verdict.state is RunState.FAILED and refusal(failed_run(t.state.plan, t.history, failure)) is None


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
        t.do(*(RequestExitOutput(host.key) for host in current_hosts(t.seen)))
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
    purpose = _PURPOSES.get(trigger, "fence")
    t.record(events.StopStageReached(stage=stage, purpose=purpose, acknowledged=acknowledged, left=left))


def _settling(t: Transition) -> None:
    take_in(t, live=False)
    if settled := t.result(Settled):
        _record_missing(t, settled)
        _judge(t, over=True)
    elif (verdict := _judged(t)) is not None:
        _finish_attempt(t, verdict)


def _finish_attempt(t: Transition, verdict: events.Verdict) -> None:
    if verdict.state is not RunState.FAILED:
        _end(t, verdict)
        return
    _record_failure(t, t.watch.number, verdict, t.seen.progress.furthest)
    if t.ending.aborted:
        _end(t, _aborted(t))
    else:
        _after_failure(t, verdict)


def _after_failure(t: Transition, verdict: events.Verdict) -> None:
    if t.run_state is RunState.RECOVERING:
        t.enter(Phase.DECIDING, restart=None, delay=None)
    elif (refused := refusal(failed_run(t.state.plan, t.history))) is not None:
        _refuse_restart(t, refused)
    else:
        _end(t, verdict)


def _deciding(t: Transition) -> None:
    if t.history.abort is not None:
        _abandon(t)
        return
    _seek_proofs(t)
    verdict = _judged(t)
    if verdict is not None and (
        verdict.state is RunState.SUCCEEDED or (verdict.state is RunState.COMPLETED and t.history.end_unseen)
    ):
        # It has not failed, as its nodes show only now.
        _end(t, verdict)
    elif not _judge_again(t):
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
    _end(t, failures[original_failure(failures)].verdict)


def _backing_off(t: Transition) -> None:
    assert t.state.restart is not None
    if t.history.abort is not None:
        _abandon(t)
        return
    _seek_proofs(t)
    if t.waited_s >= t.state.restart.delay_s:
        _plan(t, t.state.restart.members, _reusable_placement(t, t.state.restart.members))


def _abandon(t: Transition) -> None:
    """There is nothing to stop but what was fenced, and that is proved, except for nodes that do not answer."""
    t.record(events.StopStageReached(stage=events.StopStage.ASKED))
    t.enter(Phase.ABANDONING)


def _abandoning(t: Transition) -> None:
    _seek_proofs(t)
    left = unproved(t)
    if left and t.waited_s <= SILENT_S:
        return
    stage = events.StopStage.UNCONFIRMED if left else events.StopStage.STOPPED
    t.record(events.StopStageReached(stage=stage))
    _end(t, _aborted(t))


def _adopt(t: Transition) -> None:
    attempt = t.history.last_attempt
    if t.state.unknown_attempt is not None:
        # Nothing of it can be watched: it must not train on unseen.
        t.enter(Phase.ENDING_UNKNOWN)
        t.do(ConnectUnknown())
    elif attempt is None or not t.history.launched:
        # Nobody waits for it any more, and what was checked then is not true now: it is not launched by surprise.
        lost = events.Verdict(
            RunState.FAILED, Reason.SUPERVISOR_LOST, "its supervisor was lost before anything was launched"
        )
        _end(t, lost if t.history.abort is None else _ABORTED_EARLY)
    elif attempt.status.reason is not None and t.run_state in (RunState.RECOVERING, RunState.LAUNCHING):
        _connect_again(t, attempt, attempt.plan.nodes)
        _recover(t)
        t.enter(Phase.DECIDING)
    else:
        _connect_again(t, attempt, ())
        t.enter(Phase.FINDING)
        t.do(Find(attempt.plan))


def _finding(t: Transition) -> None:
    """Go on with the last attempt of an earlier supervisor."""
    result = t.result(Found)
    if result is None:
        return
    if result.launcher is not None and t.state.attempt.launcher is None:
        t.record(result.launcher)
    if result.launcher is not None or result.rebooted or result.anything:
        _run(t, launched=result.launcher is not None)
    elif not t.history.failures:
        _end(t, events.Verdict(RunState.FAILED, Reason.SUPERVISOR_LOST, _LOST_IN_LAUNCH))
    else:
        # It had been running before: it goes on.
        _fail_again(t, _launch_failed(_LOST_IN_LAUNCH))


def _ending_unknown(t: Transition) -> None:
    _seek_proofs(t)
    if unproved(t) and t.waited_s <= _PROOF_LIMIT_S:
        return
    cause = f"{t.state.unknown_attempt}: what was left of it has been ended, and how far it came is not known"
    if t.seen.unknown is not None:
        _end(t, t.seen.unknown)
    elif t.history.abort is not None:
        _end(t, events.Verdict(RunState.ABORTED, Reason.USER_ABORT, cause))
    else:
        _end(t, events.Verdict(RunState.LOST, Reason.SUPERVISOR_LOST, cause, fix=_RESUME))


def _connect_again(t: Transition, attempt: AttemptHistory, nodes: Iterable[str]) -> None:
    """An earlier supervisor's attempt. On `nodes` it is not proved that nothing of it is left; of the run's nodes that
    it went on without, the proof is sought anew."""
    watch = begin_watch(attempt.number, t.seen.now, ranks=len(attempt.plan.nodes), slept_s=t.seen.slept_s)
    t.set(watch=watch, ending=Ending(), sought=frozenset(nodes))
    t.do(Connect(attempt.plan))
    for node in t.state.plan.nodes:
        earlier = next((one for one in reversed(t.history.attempts) if node in one.plan.nodes), None)
        if node not in attempt.plan.nodes and earlier is not None:
            t.do(Reconnect(earlier.plan, (node,)))


def _end(t: Transition, verdict: events.Verdict) -> None:
    if verdict.state not in FOLLOWERS[t.run_state]:
        # Adopted while it ran, and nothing of it is left that could be monitored to its end.
        t.change(RunState.FINISHING)
    t.record(
        events.StateChanged(
            state=verdict.state, verdict=verdict, figures=t.seen.figures, unconfirmed=tuple(unproved(t))
        )
    )
    t.do(EndTrackers())
    t.enter(Phase.AFTERMATH)


def _prove_end(t: Transition) -> None:
    """The run has ended: go on with the nodes on which an earlier supervisor could not prove that."""
    record, attempt = t.history.record, t.history.last_attempt
    t.enter(Phase.AFTERMATH)
    if t.state.unknown_attempt is not None:
        t.do(ConnectUnknown())
        return
    # The verdict that may follow needs the ends of all ranks.
    nodes = attempt.plan.nodes if attempt is not None and t.history.end_unseen else record.unconfirmed
    if attempt is None or not (nodes or attempt.missing):
        return
    _connect_again(t, attempt, nodes)
    if record.ended_at is not None:
        age_s = (t.seen.at - record.ended_at).total_seconds()
        t.set(aftermath_s=max(t.state.aftermath_s - age_s, _SHORT_AFTERMATH_S))


def _aftermath(t: Transition) -> None:
    _seek_proofs(t)
    missing = t.state.watch is not None and t.state.attempt.missing
    if (unproved(t) or missing) and t.waited_s < t.state.aftermath_s:
        return
    # The ends of all ranks may be known only now.
    verdict = t.seen.unknown if t.state.unknown_attempt is not None else _judged(t)
    if t.history.end_unseen and verdict is None and _judge_again(t):
        return
    if t.history.end_unseen and verdict is not None and verdict.state in FOLLOWERS[t.run_state]:
        _end(t, verdict)
    t.enter(Phase.OVER)


def _judge(t: Transition, *, over: bool) -> None:
    hosts = {rank: host.key for host in current_hosts(t.seen) for rank in host.ranks}
    health = t.watch.health
    standings = tuple(
        replace(standing, cut_off_s=health[hosts[rank]].longest_silence_s if hosts[rank] in health else 0.0)
        for rank, standing in enumerate(t.watch.standings)
    )
    t.do(Judge(t.ending.trigger, standings, t.state.attempt.hang, over))
    t.set_ending(verdict_pending=True)


def _judge_again(t: Transition) -> bool:
    """Where the end of another rank is known that was not known before: a node that was away may have the record of one
    that completed. A verdict is awaited."""
    if not t.ending.verdict_pending and sum(rank.end_known for rank in t.seen.ranks) != t.ending.ends_judged:
        _judge(t, over=False)
    return t.ending.verdict_pending


def _judged(t: Transition) -> events.Verdict | None:
    judged = t.result(Judged)
    if judged is None:
        return None
    t.set_ending(verdict_pending=False, ends_judged=judged.ends_known)
    return judged.verdict


def proof_of(t: Transition, host: HostView) -> CleanupProof:
    """For a host of the attempt that is watched, of which nothing is known, it is there unless it is sought."""
    stop = t.ending.stop
    proof = t.state.proofs.get(host.key) or (stop.proofs.get(host.key) if stop is not None else None)
    return proof or CleanupProof(found=host.current and t.state.sought.isdisjoint(host.names))


def unproved(t: Transition) -> list[str]:
    """Nodes on which it is not proved that nothing of the run is left."""
    return [name for host in t.seen.hosts if not proof_of(t, host).found for name in host.names]


def presence(t: Transition) -> tuple[NodePresence, ...]:
    """Every node of the run, as it answers now."""
    head_proved = all(proof_of(t, host).found for host in t.seen.hosts if host.local)
    nodes = {node: NodePresence(node, head_proved) for node in t.state.plan.nodes}
    for host in sorted(t.seen.hosts, key=lambda host: host.current):
        proved = proof_of(t, host).found and host.answering and head_proved
        nodes |= {name: NodePresence(name, proved, host.silent_s) for name in host.names}
    return tuple(nodes[node] for node in t.state.plan.nodes)


def _seek_proofs(t: Transition) -> None:
    """Where it is not proved that nothing is left, and for files that have not been sent, on hosts that answer."""
    if t.state.watch is not None:
        take_in(t, live=False)
    for result in t.seen.finished:
        if isinstance(result, Settled):
            _take_settled(t, result)
    for host in t.seen.hosts:
        if host.answering and host.key not in t.ending.settling and not proof_of(t, host).found:
            _seek_proof(t, host)


def _seek_proof(t: Transition, host: HostView) -> None:
    proof, requests = proof_of(t, host).seek(host, t.seen.now)
    if requests and host.current:
        t.do(*(Send(host.key, rank, END) for rank in host.ranks if t.seen.ranks[rank].record is None))
    t.do(*requests)
    if proof.found and host.current:
        t.do(Settle((host.key,)))
        t.set_ending(settling=t.ending.settling | {host.key})
        return
    _set_proof(t, host, proof)
    if proof.found:
        _confirm(t, host)


def _take_settled(t: Transition, settled: Settled) -> None:
    for host in t.seen.hosts:
        if host.key in settled.hosts and host.key in t.ending.settling:
            t.set_ending(settling=t.ending.settling - {host.key})
            # One that goes away again in the middle of its log is waited for once more.
            _set_proof(t, host, CleanupProof(found=host.answering))
            if host.answering:
                _confirm(t, host)
    _record_missing(t, settled)


def _set_proof(t: Transition, host: HostView, proof: CleanupProof) -> None:
    t.set(proofs={**t.state.proofs, host.key: proof})


def _confirm(t: Transition, host: HostView) -> None:
    for name in host.names:
        t.record(events.CleanupConfirmed(node=name))


def _record_missing(t: Transition, settled: Settled) -> None:
    if dict(settled.missing) != dict(t.state.attempt.missing):
        t.record(events.LogsMissing(attempt=t.watch.number, files=dict(settled.missing)))


def _fail_again(t: Transition, verdict: events.Verdict) -> None:
    """Prove once more that nothing is left of an attempt that never got going."""
    t.set(sought=frozenset(t.state.attempt.plan.nodes), proofs={}, ending=Ending())
    _recover(t)
    _record_failure(t, t.watch.number, verdict)
    _after_failure(t, verdict)


def _recover(t: Transition) -> None:
    if t.run_state is not RunState.RECOVERING:
        t.change(RunState.RECOVERING)


def _record_failure(t: Transition, number: int, verdict: events.Verdict, reached: int = 0) -> None:
    t.record(_failure(t, number, verdict, reached))


def _failure(t: Transition, number: int, verdict: events.Verdict, reached: int) -> events.AttemptFailed:
    """An attempt that never got going (`reached` 0) leaves the run where it was."""
    failures, watch = t.history.failures, t.state.watch
    watched = watch is not None and watch.number == number
    failed_at = (watch.failed_at if watch is not None and watched else None) or t.seen.at
    ran_s = _ran_s(t, number, failed_at)
    outputs = t.seen.command.outputs if t.seen.command is not None and watched else 0
    return events.AttemptFailed(
        attempt=number,
        verdict=verdict,
        reached=reached or (failures[-1].reached if failures else 0),
        failed_at=failed_at,
        ran_long=not reached and (ran_s > t.state.plan.config.recovery.stall_s or outputs > events.LONG_OUTPUT_S),
        outputs=0 if reached else outputs,
        unconfirmed=tuple(unproved(t)),
    )


def _ran_s(t: Transition, number: int, until: datetime) -> float:
    """For how long all ranks of a command had run in an attempt, seconds; 0 for a trainer, which reports."""
    attempt = next((one for one in t.history.attempts if one.number == number), None)
    if attempt is None or t.state.plan.config.job.kind.reports or not attempt.started:
        return 0.0
    return (until - max(event.at for event in attempt.started.values())).total_seconds()


def _launch_failed(error: str | None) -> events.Verdict:
    return events.Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, error)


def _aborted(t: Transition) -> events.Verdict:
    failure = describe_failure(t.history.failures[-1])
    return events.Verdict(
        RunState.ABORTED, Reason.USER_ABORT, f"stopped as requested, while it recovered from {failure}"
    )


def _cancelled(t: Transition) -> bool:
    """An abort that comes while something is checked or planned cancels it; that has been done."""
    if t.result(Cancelled):
        return True
    if t.history.abort is not None and not t.seen.finished:
        t.do(Cancel())
    return False


PHASES: Final[Mapping[Phase, Callable[[Transition], None]]] = {
    Phase.BEGINNING: _begin,
    Phase.PREFLIGHT: _preflight,
    Phase.TAKING_UP: _taking_up,
    Phase.FINDING: _finding,
    Phase.ENDING_UNKNOWN: _ending_unknown,
    Phase.PLANNING: _planning,
    Phase.STARTING: _starting,
    Phase.RUNNING: _running,
    Phase.STOPPING: _stopping,
    Phase.SETTLING: _settling,
    Phase.DECIDING: _deciding,
    Phase.BACKING_OFF: _backing_off,
    Phase.ABANDONING: _abandoning,
    Phase.AFTERMATH: _aftermath,
}
