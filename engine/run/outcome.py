"""The outcome of an attempt and of its run: verdicts, failures, the end, what is waited for after it, and the proof
that nothing of an attempt is left."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from engine.errors import duration_text
from engine.models import Reason, RunState
from engine.protocol.attempt import END
from engine.run import events
from engine.run.decide import NodePresence, describe_failure
from engine.run.effects import EndTrackers, Judge, Send, Settle
from engine.run.journal import FOLLOWERS
from engine.run.observation import HostView, Judged, Settled
from engine.run.running import take_in
from engine.run.shutdown import CleanupProof
from engine.run.state import Phase, Transition
from engine.task_result import Served

ABORTED_EARLY = events.Verdict(
    RunState.ABORTED, Reason.USER_ABORT, "stopped as requested, before anything was launched"
)


_RESUME = "`flightdeck resume` goes on from the state that it saved"


def end_run(t: Transition, verdict: events.Verdict) -> None:
    abort, budget_s = t.history.abort, t.state.launched_plan.budget_s
    if verdict.reason is Reason.USER_ABORT and abort is not None and abort.request == "budget" and budget_s is not None:
        cause = f"its time of {duration_text(budget_s)} was up: {verdict.cause}"
        verdict = replace(verdict, reason=Reason.BUDGET_SPENT, cause=cause, fix=_RESUME)
    if verdict.state not in FOLLOWERS[t.run_state]:
        # Adopted while it ran, and nothing of it is left that could be monitored to its end.
        t.change(RunState.FINISHING)
    connected = {name for host in t.seen.hosts for name in host.names}
    # Those of an earlier life that has not been looked at in this one.
    others = [node for node in t.history.record.unconfirmed if node not in connected]
    unconfirmed = (*unproved(t), *others)
    figures = t.seen.figures
    t.record(events.StateChanged(state=verdict.state, verdict=verdict, figures=figures, unconfirmed=unconfirmed))
    t.do(EndTrackers())
    t.enter(Phase.AFTERMATH)


def aftermath(t: Transition) -> None:
    seek_proofs(t)
    missing = t.state.watch is not None and t.state.attempt.missing
    if (unproved(t) or missing) and t.waited_s < t.state.aftermath_s:
        return
    # The ends of all ranks may be known only now.
    verdict = t.seen.unknown if t.state.unknown_attempt is not None else judged(t)
    if t.history.end_unseen and verdict is None and judge_again(t):
        return
    if t.history.end_unseen and verdict is not None and verdict.state in FOLLOWERS[t.run_state]:
        end_run(t, verdict)
    t.enter(Phase.OVER)


def judge(t: Transition, *, over: bool) -> None:
    ended_s = t.seen.now - t.ending.stop.started_at if t.ending.stop is not None else 0.0
    hosts, outlived = map(t.seen.host_of, range(len(t.watch.standings))), t.state.attempt.outlived
    standings = tuple(
        replace(s, cut_off_s=host.longest_silence_s, answered_since=host.silent_s < ended_s, outlived=rank in outlived)
        for rank, (host, s) in enumerate(zip(hosts, t.watch.standings, strict=True))
    )
    t.do(Judge(t.ending.trigger, standings, t.state.attempt.hang, over))
    t.set_ending(verdict_pending=True)


def judge_again(t: Transition, *, over: bool = False) -> bool:
    """Where the end of another rank is known that was not known before: a node that was away may have the record of one
    that completed. A verdict is awaited."""
    if not t.ending.verdict_pending and sum(rank.end_known for rank in t.seen.ranks) != t.ending.ends_judged:
        judge(t, over=over)
    return t.ending.verdict_pending


def judged(t: Transition) -> events.Verdict | None:
    result = t.result(Judged)
    if result is None:
        return None
    t.set_ending(verdict_pending=False, ends_judged=result.ends_known)
    verdict = result.verdict
    # A run that nobody has to be there for goes on, as after any other failure.
    goes_on = verdict.state is RunState.LOST and t.state.launched_plan.unattended
    return replace(verdict, state=RunState.FAILED) if goes_on else verdict


def attempt_failure(t: Transition, number: int, verdict: events.Verdict, reached: int = 0) -> events.AttemptFailed:
    """An attempt that never got going (`reached` 0) leaves the run where it was."""
    failures, watch = t.history.failures, t.state.watch
    watched = watch is not None and watch.number == number
    failed_at = (watch.failed_at if watch is not None and watched else None) or t.seen.at
    ran_s = _ran_s(t, number, failed_at)
    outputs = t.seen.command.outputs if t.seen.command is not None and watched else 0
    answered = t.history.results_of == number and any(isinstance(one, Served) for one in t.history.task_results)
    ran_long = answered or ran_s > t.state.plan.config.recovery.stall_s or outputs > events.LONG_OUTPUT_S
    return events.AttemptFailed(
        attempt=number,
        verdict=verdict,
        reached=reached or (failures[-1].reached if failures else 0),
        failed_at=failed_at,
        ran_long=not reached and ran_long,
        outputs=0 if reached else outputs,
        unconfirmed=tuple(unproved(t)),
    )


def _ran_s(t: Transition, number: int, until: datetime) -> float:
    """For how long all ranks of a command had run in an attempt, seconds; 0 for a trainer, which reports."""
    attempt = next((one for one in t.history.attempts if one.number == number), None)
    if attempt is None or t.state.plan.config.job.kind.reports or not attempt.started:
        return 0.0
    return (until - max(event.at for event in attempt.started.values())).total_seconds()


def launch_failed(error: str | None) -> events.Verdict:
    return events.Verdict(RunState.FAILED, Reason.LAUNCH_FAILED, error)


def aborted(t: Transition) -> events.Verdict:
    failure = describe_failure(t.history.failures[-1])
    return events.Verdict(
        RunState.ABORTED, Reason.USER_ABORT, f"stopped as requested, while it recovered from {failure}"
    )


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


def seek_proofs(t: Transition) -> None:
    """Where it is not proved that nothing is left, and for files that have not been sent, on hosts that answer."""
    if t.state.watch is not None:
        take_in(t, live=False)
    for result in t.seen.finished:
        if isinstance(result, Settled):
            _take_settled(t, result)
    for host in t.seen.hosts:
        if host.answering and host.key not in t.ending.settling and not proof_of(t, host).found:
            _seek_proof(t, host)
    if t.state.watch is not None:
        lacking = t.state.attempt.ranks_with_missing_files
        if any(not host.unsent and not lacking.isdisjoint(host.ranks) for host in t.seen.current_hosts):
            # They have come by now, or it has not been looked for them yet.
            t.do(Settle(()))


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
    record_missing(t, settled)


def _set_proof(t: Transition, host: HostView, proof: CleanupProof) -> None:
    t.set(proofs={**t.state.proofs, host.key: proof})


def _confirm(t: Transition, host: HostView) -> None:
    for name in host.names:
        t.record(events.CleanupConfirmed(node=name))


def record_missing(t: Transition, settled: Settled) -> None:
    if dict(settled.missing) != dict(t.state.attempt.missing):
        files, reached = dict(settled.missing), t.seen.progress.furthest
        t.record(events.LogsMissing(attempt=t.watch.number, files=files, reached=reached))
