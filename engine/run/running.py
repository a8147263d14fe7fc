"""The part of a step that watches one attempt: what has changed on its nodes and ranks, whether it hangs, and whether
there is a reason to stop it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from engine.config.models import RecoveryConfig
from engine.job.kinds import RankSeen, RanksSeen
from engine.models import RunState
from engine.protocol.attempt import EMERGENCY_CHECKPOINT
from engine.run import events
from engine.run.command_watch import RANKS_APART
from engine.run.decide import SETTLE_S, RankState, RunningAttempt
from engine.run.effects import DropPipes, Send, Standing
from engine.run.history import AttemptHistory
from engine.run.node_health import HostHealth, lost_after_s, next_health, recorded_health
from engine.run.observation import HostView, ProgressView, RankView
from engine.run.state import Phase, Transition, WatchState, has_ended

_SERVING_S = 30.0
"""A server reports at least every 20 s: it generates a token every 10 s, if nobody asks for one."""
_OF_ONE_LOOK = 0.25
"""Share of `hang_s` that counts between two looks at most: beyond it this supervisor was held up, by a disk for
example."""
SLOW_PHASES = frozenset({"loading", "validating", "saving", "generating"})
_TIMES = 5.0


def begin_watch(number: int, now: float, *, ranks: int, slept_s: float, lost: Collection[int] = ()) -> WatchState:
    """`lost`: the ranks that an earlier supervisor has lost."""
    standings = tuple(Standing(lost=rank in lost) for rank in range(ranks))
    return WatchState(number, now, standings=standings, slept_s=slept_s, quiet_since=now, looked_at=now)


def begin_running(t: Transition, *, launched: bool) -> None:
    t.set_watch(launched=launched, began=t.seen.now, quiet_since=t.seen.now, looked_at=t.seen.now)
    t.enter(Phase.RUNNING)


def take_in(t: Transition, *, live: bool) -> None:
    """Record the changes of the attempt's nodes and ranks since the last step. `live`: it may still train."""
    seen, progress = t.seen, t.seen.progress
    came = (progress.steps > 0, progress.completed, progress.starts, progress.resumed)
    taken_in = (seen.ranks, seen.hosts, seen.slept_s, live, _goes_on(t), came)
    if taken_in == t.watch.taken_in:
        return
    lost = _take_in_nodes(t)
    if live:
        _note_sleep(t)
    _take_in_ranks(t, lost if live else frozenset())
    if live:
        _note_new_starts(t)
        _record_resumption(t)
    t.set_watch(taken_in=taken_in)


def _goes_on(t: Transition) -> bool:
    """The attempt is not to end yet: then it is settled who can do without whom."""
    return t.ending.stop is None and not t.ending.verdict_pending


def _take_in_nodes(t: Transition) -> frozenset[int]:
    """The ranks whose node is lost."""
    watch, limit_s = t.watch, lost_after_s(t.state.plan.config)
    health: dict[str, HostHealth] = {}
    lost: list[int] = []
    for host in t.seen.current_hosts:
        before = watch.health.get(host.key) or recorded_health(host, t.state.attempt.nodes)
        health[host.key], changes = next_health(host, before, limit_s, t.seen.at)
        for change in changes:
            t.record(change)
        if health[host.key].condition == "lost":
            lost += host.ranks
    t.set_watch(health=health)
    return frozenset(lost)


def _note_sleep(t: Transition) -> None:
    watch, slept_s = t.watch, t.seen.slept_s - t.watch.slept_s
    if slept_s <= 0:
        return
    standings = tuple(
        standing
        if number in watch.ended
        else replace(standing, head_slept_s=max(standing.head_slept_s, t.seen.sleep_s))
        for number, standing in enumerate(watch.standings)
    )
    t.set_watch(slept_s=t.seen.slept_s, standings=standings)
    lease_s = t.state.plan.config.recovery.lease_s
    longer = f", longer than the ranks' lease of {lease_s:g} s" if slept_s > lease_s else ""
    t.note(f"this machine slept, or its supervisor was stopped, for {slept_s:.0f} s{longer}")


def _take_in_ranks(t: Transition, lost: frozenset[int]) -> None:
    """Starts and ends, each once in the journal, also over supervisors; the end of a lost rank again once it is
    known."""
    before, attempt = t.watch.ended, t.state.attempt
    _update_standings(t, lost)
    changed = [rank for rank in t.seen.ranks if _record_change(t, attempt, rank)]
    newly = t.watch.ended - before
    for rank in t.seen.ranks:
        if rank.number not in newly or rank.succeeded:
            continue
        if not t.watch.standings[rank.number].dispensable:
            t.set_watch(failed_at=t.watch.failed_at or t.seen.at)
        elif rank.number not in attempt.ended:
            note = f"rank {rank.number} on {rank.node} is lost: the others go on without it"
            t.set_watch(losses=(*t.watch.losses, (t.seen.now, note)))
    if all(rank.started for rank in t.seen.ranks):
        # Else they are those of an earlier life, and the next attempt is only being planned.
        if t.run_state is RunState.LAUNCHING and t.history.launched:
            t.change(RunState.RUNNING)
        # At the first look: an earlier supervisor may have recorded the starts, and done no more.
        if (changed or newly or t.watch.starts is None) and t.watch.launched:
            t.do(DropPipes())


def _update_standings(t: Transition, lost: frozenset[int]) -> None:
    watch, ranks, kind = t.watch, t.seen.ranks, t.state.plan.config.job.kind
    standings = [
        replace(standing, lost=True) if rank.number in lost and not has_ended(rank, standing) else standing
        for rank, standing in zip(ranks, watch.standings, strict=True)
    ]
    newly_lost = [number for number in lost if standings[number] is not watch.standings[number]]
    ended = frozenset(rank.number for rank, standing in zip(ranks, standings, strict=True) if has_ended(rank, standing))
    going_on = _goes_on(t)
    if kind.outlives_ranks and going_on:
        seen = [_seen(rank, ended=rank.number in ended) for rank in ranks]
        ends, stepped = list(t.state.attempt.ended), t.seen.progress.steps > 0
        losable = kind.losable(RanksSeen(seen, ends, stepped, t.state.plan.config.recovery.min_nodes))
        for number, standing in enumerate(standings):
            if standing.dispensable != (number in losable):
                standings[number] = replace(standing, dispensable=number in losable)
    if ended != watch.ended or tuple(standings) != watch.standings:
        t.set_watch(standings=tuple(standings), ended=ended)
    # An earlier supervisor has done so for those that it recorded.
    if kind.loss_restarts_workers and going_on and any(number not in t.state.attempt.ended for number in newly_lost):
        for rank in ranks:
            if rank.number not in ended:
                t.do(Send(t.seen.host_of(rank.number).key, rank.number, EMERGENCY_CHECKPOINT))


def _seen(rank: RankView, *, ended: bool) -> RankSeen:
    record = rank.record
    gave_up = record is not None and bool(record.code) and record.stopped_by is None
    return RankSeen(rank.started, ended, ended and not rank.succeeded, gave_up)


def _record_change(t: Transition, attempt: AttemptHistory, rank: RankView) -> bool:
    number, node, recorded = rank.number, rank.node, False
    if rank.identity is not None and number not in attempt.started:
        t.record(events.RankLaunched(rank=number, node=node, identity=rank.identity))
        recorded = True
    before = attempt.ended.get(number)
    final = before is not None and (before.error != events.NODE_LOST or rank.record is None)
    if number not in t.watch.ended or final:
        return recorded
    if (end := rank.record) is None:
        why = events.NODE_LOST if t.watch.standings[number].lost else "no exit record"
        t.record(events.RankExited(rank=number, node=node, code=rank.launcher_code, error=why))
        return True
    how = {"code": end.code, "signal": end.signal, "stopped_by": end.stopped_by, "error": end.error}
    t.record(events.RankExited.model_validate({"rank": number, "node": node, **how}))
    if end.dropped_bytes:
        t.note(f"rank {number}: {end.dropped_bytes} bytes of output were lost to a full disk on {node}")
    return True


def _note_new_starts(t: Transition) -> None:
    starts = t.seen.progress.starts
    before = starts if t.watch.starts is None else t.watch.starts
    if starts == t.watch.starts:
        return
    t.set_watch(starts=starts)
    for rank, count in starts.items():
        if t.watch.standings[rank].dispensable and count > max(1, before.get(rank, 0)):
            t.note(f"rank {rank} on {t.seen.ranks[rank].node} was started again")


def _record_resumption(t: Transition) -> None:
    """Once, with the first step of an attempt that goes on from an earlier one."""
    progress, attempt = t.seen.progress, t.state.attempt
    if not (attempt.number > 1 and progress.steps) or attempt.status.source is not None:
        return
    by_command = t.seen.command.resumption if t.seen.command is not None else None
    resumed, repeated, seconds = progress.resumed or by_command or events.Resumed("none"), None, None
    if failures := t.history.failures:
        repeated = max(0, failures[-1].reached - resumed.iteration)
        if resumed.source == "command" and not repeated:
            repeated = None
        seconds = round((t.seen.at - failures[-1].failed_at).total_seconds(), 2)
    t.record(events.AttemptResumed(attempt=attempt.number, resumed=resumed, repeated=repeated, seconds=seconds))


def attempt_now(t: Transition, *, abort: bool) -> RunningAttempt:
    """The attempt as `stop_trigger` sees it."""
    seen, watch = t.seen, t.watch
    if seen.launcher_alive is (watch.launcher_gone_at is not None):
        t.set_watch(launcher_gone_at=None if seen.launcher_alive else seen.now)
    hosts = {rank: host for host in seen.current_hosts for rank in host.ranks}
    ranks = tuple([_rank_state(t, rank, hosts[rank.number]) for rank in seen.ranks])
    if watch.failing_since is None and any(rank.failed for rank in ranks):
        t.set_watch(failing_since=seen.now)
    state = RunningAttempt(ranks)
    if watch.completed_at is None and state.all_completed:
        t.set_watch(completed_at=seen.now)
    watch = t.watch
    return replace(
        state,
        age_s=seen.now - watch.began,
        failing_s=seen.now - watch.failing_since if watch.failing_since is not None else 0.0,
        launched=watch.launched,
        launcher_gone_s=seen.now - watch.launcher_gone_at if watch.launcher_gone_at is not None else None,
        abort=abort,
        completed_s=seen.now - watch.completed_at if watch.completed_at is not None else 0.0,
        apart=seen.command is not None and seen.command.trains_apart,
    )


def _rank_state(t: Transition, rank: RankView, host: HostView) -> RankState:
    standing, ended = t.watch.standings[rank.number], rank.number in t.watch.ended
    failed = ended and not standing.dispensable and not rank.succeeded
    return RankState(
        started=rank.started,
        ended=ended,
        failed=failed,
        consequence=failed and rank.consequence,
        node_silent_s=host.silent_s if host.answered else float("inf"),
        dispensable=standing.dispensable,
        completed=rank.number in t.seen.progress.completed,
    )


def note_missing_launcher(t: Transition, state: RunningAttempt) -> None:
    """It has done its part when all ranks have started; its end is worth no more than a note."""
    gone = state.launched and state.launcher_gone_s is not None and all(rank.started for rank in state.ranks)
    if gone and not t.watch.launcher_noted and not any(rank.failed for rank in state.ranks):
        t.set_watch(launcher_noted=True)
        t.note("mlx.launch has ended; the ranks go on without it")


def note_losses(t: Transition) -> None:
    """Not at once: a rank that was lost because rank 0 has failed may be noticed before it."""
    if t.watch.completed_at is not None:
        return
    settled = [loss for loss in t.watch.losses if t.seen.now - loss[0] > SETTLE_S]
    if settled:
        t.set_watch(losses=tuple(loss for loss in t.watch.losses if loss not in settled))
    for _, note in settled:
        t.note(note)


def raise_command_alarm(t: Transition) -> None:
    command = t.seen.command
    if command is None or command.alarm is None:
        return
    if RANKS_APART not in {alarm.alarm for alarm in t.state.attempt.alarms}:
        t.record(events.AlarmRaised(alarm=RANKS_APART, ranks=command.apart, message=command.alarm))


def find_hang(t: Transition) -> events.Hang | None:
    """Recorded when it is found; one that an earlier supervisor found counts too."""
    seen, kind = t.seen, t.state.plan.config.job.kind
    if not all(rank.started for rank in seen.ranks) or t.watch.completed_at is not None:
        return None
    hang = None
    # A command that never reports a step may do anything, for as long as it likes.
    if kind.hangs(stepped=seen.progress.steps > 0):
        hang = _overdue(t)
    if seen.command is not None:
        hang = seen.command.hang or hang
    if hang is not None and t.state.attempt.hang is None:
        node = seen.ranks[hang.rank].node if hang.rank is not None else None
        t.record(events.HangDetected(hang=hang, node=node))
    return t.state.attempt.hang


def _overdue(t: Transition) -> events.Hang | None:
    """No step for max(`hang_s`, 5 x the 99th percentile of the updates so far). Loading, validating, saving and the
    first steps have their own limit, `stall_s`. Time counts only while events could come: some node that is watched
    answers, and the head looks, and takes what it sends. A node whose disk is full loses its events; as long as one
    rank's events come, that is no hang."""
    seen, watch, kind, recovery = t.seen, t.watch, t.state.plan.config.job.kind, t.state.plan.config.recovery
    watched, hang_s = kind.watched_ranks(len(seen.ranks)), kind.hang_s(recovery.hang_s, recovery.stall_s)
    since, passed_s = watch.quiet_since, seen.now - watch.looked_at
    answering = any(seen.host_of(rank).answering for rank in watched)
    # What happened while nothing could be received, or was looked at, is not known: that time does not count.
    counted_s = min(passed_s, hang_s * _OF_ONE_LOOK) if seen.receiving and answering else 0.0
    since += passed_s - counted_s
    # Before the first update these wait for all others.
    moved = seen.progress.moved_at.items()
    since = max([since, *(at for rank, at in moved if rank in watched or not seen.progress.steps)])
    t.set_watch(quiet_since=since, looked_at=seen.now)
    silent_s = seen.now - since
    if silent_s <= min(recovery.hang_s, recovery.stall_s):
        return None
    identities = [seen.ranks[rank].identity for rank in watched]
    started_at = min((identity.started_at for identity in identities if identity is not None), default=None)
    rarely = None if kind.reports else started_at
    doing, limit_s = hang_limit(seen.progress, watched, recovery, hang_s, rarely)
    if silent_s <= limit_s:
        return None
    behind = rank_behind(seen.progress, watched) if kind.reports else None
    return events.Hang(silent_s, limit_s, doing, seen.progress.furthest, behind)


def hang_limit(
    progress: ProgressView, watched: tuple[int, ...], recovery: RecoveryConfig, hang_s: float, started_at: float | None
) -> tuple[str, float]:
    """Doing what, and for how long that may take without a step, seconds. `started_at`: of a command, which may report
    as rarely as it likes, by its node's wall clock."""
    slow = sorted({phase for rank, phase in progress.phases.items() if rank in watched} & SLOW_PHASES)
    if slow:
        return slow[0], recovery.stall_s
    if "serving" in progress.phases.values():
        return "serving", max(hang_s, _SERVING_S)
    if progress.long_step_s is not None:
        return "training", max(hang_s, _TIMES * progress.long_step_s)
    if progress.first_step_at is not None and started_at is not None:
        # Until the second report, the time to the first one tells how rare they are.
        return "training", max(recovery.stall_s, _TIMES * (progress.first_step_at - started_at))
    return ("training" if progress.steps else "starting"), recovery.stall_s


def rank_behind(progress: ProgressView, watched: tuple[int, ...]) -> int | None:
    """The one rank that is behind all others whose steps count, if there are others at all."""
    reached: Mapping[int, int] = {rank: progress.reached.get(rank, 0) for rank in watched}
    last = min(reached.values())
    behind = [rank for rank, iteration in reached.items() if iteration == last]
    single = len(reached.keys() | progress.reached.keys()) == 1
    return behind[0] if len(behind) == 1 and not single else None
