"""The supervisor's rim in the simulation: what engine.run.observer and engine.run.driver do, on simulated machines.
A `Supervisor` is the volatile part, lost with its process; `HeadDisk` is what stays."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.cluster.awake_clock import AwakeClock
from engine.models import CheckResult, CheckStatus, PreflightReport, Reason, RunState
from engine.protocol.attempt import END, ExitRecord
from engine.protocol.exit_codes import ShellExit, TrainerExit
from engine.run import effects, events, verdict
from engine.run.command_watch import IDLE, STOPPED
from engine.run.decide import needs_state
from engine.run.effects import Standing
from engine.run.failure_evidence import FailureEvidence, RankEvidence
from engine.run.history import RunHistory
from engine.run.observation import (
    Cancelled,
    Checked,
    CommandView,
    Found,
    HostView,
    Judged,
    Observation,
    Planned,
    RankView,
    Result,
    Settled,
    Started,
)
from engine.run.progress import AttemptProgress
from engine.run.run_plan import RunPlan
from tests.simulation.connection import Connection
from tests.simulation.nodes import Machine, SimulatedKeeper
from tests.simulation.quick_values import quick_copy
from tests.simulation.scenario import launch_decisions
from tests.simulation.training import Attempt

if TYPE_CHECKING:
    from tests.simulation.world import World

SILENCE_S = 3.0
_UNREACHABLE_S = 12.0
"""Until a new connection to a node that does not answer is given up."""
_CLOCK_GAP_S = 4.0


class HeadKilled(Exception):
    """The supervisor's process is gone."""


class HeadDisk:
    """What a supervisor's death leaves: the journal, the head's copies of files, and the requests of commands."""

    def __init__(self) -> None:
        self.synced: list[events.Event] = []
        self.written: list[events.Event] = []
        """Written, and lost in a power cut."""
        self.waiting: list[events.Event] = []
        """In the memory of the supervisor, since the disk is full."""
        self.full = 0
        self.stalled = 0
        self.copied: dict[tuple[int, int], int] = {}
        """Attempt and rank → lines of its events that have been copied."""
        self.copies: dict[tuple[int, int], list[Any]] = {}
        self.newest_attempt = 0
        self.requests: list[events.RequestReceived] = []

    def append(self, event: events.Event) -> None:
        self.waiting.append(event)
        ended = isinstance(event, events.StateChanged) and event.state.ended
        if self.full and not ended:
            return
        self.written += self.waiting
        self.waiting = []
        if isinstance(event, events.SyncedEvent):
            self.synced += self.written
            self.written = []

    def journal(self) -> list[events.Event]:
        return [*self.synced, *self.written]

    def lose_power(self, keep: float) -> None:
        """`keep`: the part of what was not synced that is on the disk all the same."""
        self.written = self.written[: int(len(self.written) * keep)]
        self.waiting = []


class Launcher:
    """mlx.launch, a process of this machine that outlives the supervisor."""

    def __init__(self, world: World, attempt: Attempt) -> None:
        self.world, self.attempt = world, attempt
        self.pid = world.next_pid()
        self.alive = True
        self.failed: dict[int, int] = {}
        """Rank → exit code of a start that failed."""
        for rank in range(len(attempt.machines)):
            world.time.after(world.rng.uniform(0.1, 1.2), self._start, rank)

    def _start(self, rank: int) -> None:
        if not self.alive:
            return
        if not self.world.head_machine.awake:
            self.world.time.after(1.0, self._start, rank)
            return
        machine = self.attempt.machines[rank]
        if not machine.reachable() and machine is not self.world.head_machine:
            self.world.time.after(10.0, self._fail, rank, ShellExit.SSH_FAILED)
        elif code := self.attempt.start_rank(rank):
            self._fail(rank, code)

    def _fail(self, rank: int, code: int) -> None:
        if self.alive:
            self.failed[rank] = code
            self.world.news = True
            self.world.time.after(1.0, self.end)

    def end(self) -> None:
        if self.alive:
            self.alive = False
            self.world.news = True

    def ranks_ended(self) -> None:
        self.world.time.after(0.4, self.end)


class Supervisor:
    """One process of the supervisor: what it knows dies with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.stopped = True, 0
        self.clock = AwakeClock(lambda: world.time.now)
        self.history: RunHistory | None = None
        self.connections: list[Connection] = []
        self.attempt: Attempt | None = None
        self.launcher: Launcher | None = None
        self._seeks_unknown = False
        self._adopted = self._rebooted = False
        self._progress = AttemptProgress()
        self._taken: dict[int, int] = {}
        """Rank → lines of the head's copy that were taken in."""
        self._taken_lines = 0
        self._views: dict[int, tuple[Any, RankView]] = {}
        self._host_views: dict[str, tuple[Any, HostView]] = {}
        self._start_failures: dict[int, int] = {}
        self._starts_confirmed = 0
        self._news: list[events.Event] = []
        self._finished: list[Result] = []
        self._task = 0
        self._task_runs = False
        self._shown: list[events.RequestReceived] = []
        self._hung_since: float | None = None
        self._seen_version = -1
        self._completed = 0
        self._stepped = False
        """As last observed."""
        self._hosts: tuple[HostView, ...] = ()
        self._ranks: tuple[RankView, ...] = ()
        self._ranks_seen: tuple[object, ...] = ()
        self._figures = events.Figures()
        self.tick_s = 0.1

    def close(self) -> None:
        """Its process is gone."""
        self.alive = False
        for connection in self.connections:
            connection.close()
        self.connections = []

    # Observation.

    def observe(self) -> Observation:
        world, disk = self.world, self.world.disk
        now = self.clock()
        quiet = self._quiet()
        hosts = self._hosts if quiet else tuple(self._host_view(connection) for connection in self.connections)
        self._hosts = hosts
        self._copy_files()
        for request in disk.requests:
            if not any(request is shown for shown in self._shown):
                self._shown.append(request)
                self._news.append(request)
        news, self._news = tuple(self._news), []
        finished, self._finished = tuple(self._finished), []
        progress = self._progress.view
        if not quiet or self._completed != len(progress.completed):
            self._completed = len(progress.completed)
            self._rank_views()
        launcher = self.launcher
        self._stepped = progress.steps > 0
        if (progress.furthest or None) != self._figures.iteration:
            self._figures = events.Figures(iteration=progress.furthest or None)
        return Observation(
            now=now,
            at=world.head_wall(),
            slept_s=self.clock.slept_s,
            sleep_s=self.clock.sleep_s,
            news=news,
            launcher_alive=launcher is not None and launcher.alive,
            ranks=self._ranks,
            hosts=hosts,
            progress=progress,
            command=self._command_view(now),
            receiving=not disk.full,
            figures=self._figures,
            unknown=self._unknown() if self._seeks_unknown else None,
            jitter=world.rng.uniform(0.5, 1.0),
            finished=finished,
        )

    def _quiet(self) -> bool:
        """Nothing has come from any host since the last observation, and all can be reached."""
        version = 0
        for connection in self.connections:
            if not (connection.contact and connection.greeted):
                self._seen_version = -1
                return False
            version += connection.version
        version += 1000 * (len(self._start_failures) + (len(self.launcher.failed) if self.launcher is not None else 0))
        same = version == self._seen_version
        self._seen_version = version
        return same

    def _silent_s(self, connection: Connection) -> float:
        if connection.contact and connection.greeted:
            return 0.0
        return self.clock.silence_s(self.world.time.now - connection.answered_at)

    def _host_view(self, connection: Connection) -> HostView:
        silent_s = self._silent_s(connection)
        basis = (connection.version, silent_s, connection.current, connection.unsent)
        cached = self._host_views.get(connection.key)
        if cached is not None and cached[0] == basis:
            return cached[1]
        view = HostView(
            key=connection.key,
            names=connection.names,
            ranks=connection.ranks,
            local=connection.local,
            current=connection.current,
            silent_s=silent_s,
            longest_silence_s=max(connection.longest_silence_s, silent_s),
            answered=connection.answered,
            problem=None if connection.open else "no answer",
            boot_id=connection.boot_id,
            memory_kills=connection.memory_kills,
            processes=connection.processes,
            unsent=connection.unsent,
        )
        self._host_views[connection.key] = basis, view
        return view

    def _of_rank(self, rank: int) -> Connection:
        return next(one for one in self.connections if one.current and rank in one.ranks)

    def _copy_files(self) -> None:
        """What the ranks have written comes to the head's copies, and from there is taken in."""
        attempt, disk = self.attempt, self.world.disk
        if attempt is None or disk.full:
            return
        number = attempt.number
        attempt.sync()
        written = sum([len(keeper.lines) for keeper in attempt.keepers.values()])
        if written == self._taken_lines:
            # All of them have been taken in.
            return
        now, moment = self.clock(), self.world.time.now
        # What was written while the head slept comes after its sleep.
        awake_s = self.clock.silence_s(float("inf"))
        for connection in self.connections:
            if connection.current:
                for rank in connection.ranks:
                    keeper = attempt.keepers.get(rank)
                    copied = disk.copied.get((number, rank), 0)
                    if keeper is not None and copied < len(keeper.lines):
                        self._copy(connection, keeper, copied)
        for rank in attempt.keepers:
            copy = disk.copies.get((number, rank), ())
            taken = self._taken.get(rank, 0)
            if taken < len(copy):
                self._taken[rank] = len(copy)
                self._taken_lines += len(copy) - taken
                for at, line in copy[taken:]:
                    self._take(rank, line, max(0.0, now - min(awake_s, max(0.0, moment - at))))

    def _copy(self, connection: Connection, keeper: SimulatedKeeper, copied: int) -> None:
        """What has come of a rank's event file by now."""
        machine, lines = connection.machine, keeper.lines
        local = connection.local and machine.awake
        limit = self.world.time.now - (0.0 if local else machine.latency_s)
        if lines[copied][0] > limit or not (local or (connection.greeted and connection.receives())):
            return
        end = copied
        while end < len(lines) and lines[end][0] <= limit:
            end += 1
        key = keeper.attempt, keeper.rank
        self.world.disk.copies.setdefault(key, []).extend(lines[copied:end])
        self.world.disk.copied[key] = end
        if connection.unsent and end == len(lines):
            # What was missing has come.
            self._set_unsent(connection, False)
        if not local:
            connection.has_answered(lines[end - 1][0])

    def _take(self, rank: int, line: Any, now: float) -> None:
        if isinstance(line, bytes):
            self._progress.step(rank, line, now)
            return
        self._progress.take(rank, line, now)
        if "manifest" in line:
            state, manifest = line["state"], line["manifest"]
            if self.history is None or (state, manifest) not in self.history.manifests.get(rank, ()):
                self._news.append(quick_copy(_SAVED, update={"rank": rank, "state": state, "manifest": manifest}))

    def _rank_views(self) -> tuple[RankView, ...]:
        if self.attempt is None:
            return ()
        failed = self._start_failures | (self.launcher.failed if self.launcher is not None else {})
        seen = (
            [(one.version, self._silent_s(one) < SILENCE_S) for one in self.connections],
            len(failed), len(self._progress.view.completed),
        )  # fmt: skip
        if seen == self._ranks_seen:
            return self._ranks
        self._ranks_seen = seen
        views = []
        connections = {rank: one for one in self.connections if one.current for rank in one.ranks}
        for rank, machine in enumerate(self.attempt.machines):
            connection = connections[rank]
            completed = rank in self._progress.view.completed
            answering = self._silent_s(connection) < SILENCE_S
            basis = (connection.version, answering, completed, failed.get(rank))
            cached = self._views.get(rank)
            if cached is not None and cached[0] == basis:
                views.append(cached[1])
                continue
            view = self._rank_view(rank, machine.name, connection, failed.get(rank))
            self._views[rank] = basis, view
            views.append(view)
        self._ranks = tuple(views)
        return self._ranks

    def _rank_view(self, rank: int, node: str, connection: Connection, code: int | None) -> RankView:
        seen = connection.seen[rank]
        launcher_code = code if seen.record is None and seen.identity is None else None
        view = RankView(rank, node, seen.identity, seen.record, seen.vanished, seen.restarted, launcher_code)
        if not (view.end_known or view.refused):
            # It may have completed, as its events show.
            end = self._end_of(view, connection)
            if end is None:
                return view
        assert self.attempt is not None
        succeeded = self.attempt.kind.succeeded(seen.record, self._end_of(view, connection))
        consequence = not succeeded and verdict.is_consequence(self._evidence(view, Standing()))
        return RankView(
            rank, node, seen.identity, seen.record, seen.vanished, seen.restarted, launcher_code, succeeded, consequence
        )

    def _end_of(self, rank: RankView, connection: Connection) -> dict[str, Any] | None:
        there = connection.answered and self._silent_s(connection) < SILENCE_S
        copied = rank.number in self._progress.view.completed and rank.record is None and there
        end: dict[str, Any] | None = connection.seen[rank.number].output.end
        return end or ({"completed": True} if copied else None)

    def _evidence(self, rank: RankView, standing: Standing) -> RankEvidence:
        assert self.attempt is not None
        attempt = self.attempt
        connection = self._of_rank(rank.number)
        output, silent_s = connection.seen[rank.number].output, self._silent_s(connection)
        ended = (rank.end_known or rank.refused) and not standing.lost
        unreachable = None if silent_s < SILENCE_S or ended else silent_s
        record = rank.record
        return RankEvidence(
            rank=rank.number,
            node=rank.node,
            python="python3",
            started=rank.started,
            record=record,
            vanished=rank.vanished,
            restarted=rank.restarted,
            unreachable_s=unreachable,
            unreachable_why="no answer" if unreachable is not None else None,
            cut_off_s=standing.cut_off_s,
            head_slept_s=standing.head_slept_s,
            lease_s=attempt.plan.config.recovery.lease_s,
            clock_ahead_s=0.0 if connection.local else connection.clock_ahead_s,
            remote=not connection.local,
            launcher_code=rank.launcher_code,
            launcher_output="" if rank.launcher_code is None else "ssh: connect to host: No route to host",
            tail=output.log,
            keeper_tail=output.keeper,
            failure=output.failure,
            end=self._end_of(rank, connection),
            left_for_peers=attempt.trainer and record is not None and record.code == TrainerExit.PEER_LOST,
            lost=standing.lost,
            dispensable=standing.dispensable,
            outlived=standing.outlived,
            answered_since=standing.answered_since,
            memory_killed=self._memory_killed(rank.node, connection),
        )

    def _memory_killed(self, node: str, connection: Connection) -> bool:
        assert self.attempt is not None and self.history is not None
        if connection.local:
            return connection.machine.memory_kills > (self.attempt.planned.memory_kills or 0)
        before = self.history.attempt(self.attempt.number).memory_kills(node)
        now = connection.memory_kills
        return before is not None and now is not None and now > before

    def _command_view(self, now: float) -> CommandView | None:
        if self.attempt is None or self.attempt.trainer:
            return None
        progress, attempt = self._progress.view, self.attempt
        hang = self._command_hang(attempt)
        first = self._progress.first_iteration or 0
        resumption = events.Resumed("command", 0 if first <= 1 else first - 1) if progress.steps else None
        return CommandView(outputs=min(progress.steps, 100), hang=hang, resumption=resumption)

    def _command_hang(self, attempt: Attempt) -> events.Hang | None:
        """By what the keepers see of the processes: one that was stopped, or all that do nothing."""
        recovery, now = attempt.plan.config.recovery, self.world.time.now
        running = [program for program in attempt.programs() if program.alive]
        stopped = [program for program in running if program.stopped]
        groups = [group for group in attempt.groups if not group.over]
        # Ranks whose group has made its last step are on their way out.
        idle = all(group.blocked for group in groups) and (bool(groups) or not attempt.groups)
        held_up = bool(running) and (bool(stopped) or idle)
        if not held_up or not any(connection.contact for connection in self.connections if connection.ranks):
            self._hung_since = None
            return None
        if self._hung_since is None:
            self._hung_since = now
        silent_s = now - self._hung_since
        limit_s, doing = (recovery.hang_s, STOPPED) if stopped else (recovery.stall_s, IDLE)
        if silent_s <= limit_s:
            return None
        rank = stopped[0].rank if len(stopped) == 1 else None
        return events.Hang(silent_s, limit_s, doing, self._progress.view.furthest, rank)

    def _unknown(self) -> events.Verdict | None:
        hosts = [one for one in self.connections if one.key.startswith("unknown:")]
        number = self.world.disk.newest_attempt
        attempt = self.world.attempts.get(number)
        if not hosts or attempt is None:
            return None
        ends: list[tuple[ExitRecord | None, dict[str, Any] | None]] = []
        by_machine = {host.machine: host for host in hosts}
        for rank in attempt.kind.success_ranks(len(attempt.machines)):
            host = by_machine.get(attempt.machines[rank])
            seen = host.seen.get(rank) if host is not None else None
            ends.append((seen.record, seen.output.end) if seen is not None else (None, None))
        if not all(attempt.kind.succeeded(*end) for end in ends):
            return None
        return events.Verdict(RunState.SUCCEEDED, Reason.COMPLETED, "the exit records show that it completed")

    # Effects.

    def perform(self, wanted: list[effects.Effect]) -> None:
        """Raises HeadKilled where the supervisor is killed between two of them."""
        for effect in wanted:
            self.world.before_effect(self)
            _PERFORM[type(effect)](self, effect)
        if self._shown:
            # A supervisor that is killed before has left them for the next.
            self.world.disk.requests = [
                request for request in self.world.disk.requests if not any(request is one for one in self._shown)
            ]
            self._shown = []
        if wanted:
            self.tick_s = 0.1

    def _record(self, effect: effects.Record) -> None:
        self.world.await_head_disk(self)
        self.world.disk.append(effect.event)
        self.world.checks.recorded(self, effect.event)

    def _connection(self, key: str) -> Connection:
        return next(one for one in self.connections if one.key == key)

    def _send(self, effect: effects.Send) -> None:
        self._connection(effect.host).send_command(effect.rank, effect.command)

    def _kill_ranks(self, effect: effects.KillPrograms) -> None:
        self._connection(effect.host).kill_ranks()

    def _request_processes(self, effect: effects.RequestProcesses) -> None:
        self._connection(effect.host).request_processes()

    def _request_exit_output(self, effect: effects.RequestExitOutput) -> None:
        self._connection(effect.host).request_exit_output()

    def _signal_launcher(self, effect: effects.SignalLauncher) -> None:
        launcher = self.launcher
        if launcher is not None and launcher.alive:
            delay_s = 0.02 if effect.number == signal.SIGKILL else self.world.rng.uniform(0.05, 0.6)
            self.world.time.after(delay_s, launcher.end)

    def _drop_pipes(self, effect: effects.DropPipes) -> None:
        pass

    def _end_trackers(self, effect: effects.EndTrackers) -> None:
        pass

    def _judge(self, effect: effects.Judge) -> None:
        self.world.await_head_disk(self)
        attempt = self.attempt
        assert attempt is not None
        self._copy_files()
        ranks = self._rank_views()
        evidence = FailureEvidence(
            ranks=[self._evidence(rank, standing) for rank, standing in zip(ranks, effect.standings, strict=True)],
            trigger=effect.trigger,
            kind=attempt.kind,
            adopted=self._adopted,
            rebooted=self._rebooted,
            hang=effect.hang,
            over=effect.over,
        )
        assert self.history is not None
        if self.history.attempt(attempt.number).trigger is None and all(rank.started for rank in self._ranks):
            # It is decided now whether to end it; of a step that is seen later it could not be known.
            self.world.checks.judged(attempt, effect.trigger, stepped=self._stepped)
        judged = verdict.verdict_on(evidence)
        self._finished.append(Judged(judged, sum(rank.end_known for rank in ranks)))

    def _settle(self, effect: effects.Settle) -> None:
        self.world.await_head_disk(self)
        hosts = [one for one in self.connections if one.key in effect.hosts and one.current]
        limit = self.world.time.now + 3.0
        while self._awaits_ends(hosts) and self.world.time.now < limit:
            self.world.pass_time(self, 0.1)
        missing: dict[str, int | None] = {}
        if self.attempt is not None:
            self._copy_files()
            missing = self._missing(self.attempt)
            for host in self.connections:
                self._set_unsent(host, host.current and any(_name(rank) in missing for rank in host.ranks))
        self._finished.append(Settled(effect.hosts, missing))

    def _set_unsent(self, host: Connection, unsent: bool) -> None:
        if host.unsent != unsent:
            host.unsent, self._seen_version = unsent, -1

    def _awaits_ends(self, hosts: list[Connection]) -> bool:
        return any(
            seen.identity is not None and seen.record is None and not seen.vanished
            for host in hosts
            for seen in host.seen.values()
        )

    def _missing(self, attempt: Attempt) -> dict[str, int | None]:
        """By what is there in truth; a host that is away: not known."""
        missing: dict[str, int | None] = {}
        for rank, keeper in attempt.keepers.items():
            copied = self.world.disk.copied.get((attempt.number, rank), 0)
            if copied < len(keeper.lines):
                missing[_name(rank)] = len(keeper.lines) - copied
        return missing

    # What takes long: one at a time.

    def _begin(self, delay_s: float, work: Callable[..., None], *arguments: Any) -> None:
        assert not self._task_runs, "a task is under way"
        self._task += 1
        self._task_runs = True
        self.world.time.after(delay_s, self._go_on, self._task, work, arguments)

    def _go_on(self, task: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.alive or task != self._task:
            return
        if not self.world.head_runs():
            self.world.time.after(1.0, self._go_on, task, work, arguments)
            return
        work(*arguments)

    def _later(self, delay_s: float, work: Callable[..., None], *arguments: Any) -> None:
        self.world.time.after(delay_s, self._go_on, self._task, work, arguments)

    def _finish(self, result: Result) -> None:
        self._task += 1
        self._task_runs = False
        self._finished.append(result)
        self.world.news = True

    def _cancel(self, effect: effects.Cancel) -> None:
        if self._task_runs:
            self._finish(Cancelled())

    def _unreachable(self, plan: RunPlan) -> Machine | None:
        machines = (self.world.machines[name] for name in plan.nodes)
        return next((one for one in machines if not (one.local or one.reachable())), None)

    def _check(self, effect: effects.RunPreflight) -> None:
        self._begin(self.world.rng.uniform(0.5, 2.5), self._checked)

    def _checked(self) -> None:
        assert self.history is not None
        plan = self.history.plan(self.world.plan)
        away = self._unreachable(plan)
        if away is None:
            unfit = tuple(name for name in plan.nodes if self.world.machines[name].unfit)
            self.world.checks.found_unfit(unfit)
            excludes = CheckResult(name="hardware_layer", status=CheckStatus.WARN, summary="slow", excludes=unfit)
            self._finish(Checked(_PASSED.model_copy(update={"checks": [excludes]} if unfit else {})))
            return
        failed = CheckResult(
            name="ssh_connectivity", status=CheckStatus.FAIL, summary="no answer", blames=(away.index, away.name)
        )
        report = PreflightReport(checks=[failed], overall_status=CheckStatus.FAIL)
        self.world.checks.blame(Reason.PREFLIGHT_FAILED, None)
        self._later(_UNREACHABLE_S, self._finish, Checked(report))

    def _plan_attempt(self, effect: effects.PlanAttempt) -> None:
        self._begin(self.world.rng.uniform(0.2, 1.0), self._planned, effect)

    def _planned(self, effect: effects.PlanAttempt) -> None:
        plan, history = self.world.plan.among(effect.members), self.history
        assert history is not None
        if (away := self._unreachable(plan)) is not None:
            self._later(_UNREACHABLE_S, self._finish, Planned(error=f"{away.name}: no answer"))
            return
        if history.attempts and not history.decisions:
            self._finish(Planned(error="the decisions of its launch are missing in journal.jsonl"))
            return
        number = max(history.record.attempts, self.world.disk.newest_attempt) + 1
        changes = {
            "number": number,
            "nonce": f"{history.nonce}.{number}",
            "starting_port": 40_000 + number,
            "memory_kills": self.world.head_machine.memory_kills,
            "nodes": plan.nodes,
            "needs_state": needs_state(plan, history),
            "accept_changed_data": history.reopened.accept_changed_data,
            "manifests": [entry for saved in history.manifests.values() for entry in saved],
        }
        attempt = quick_copy(_ATTEMPT, update=changes)
        decided: tuple[events.Event, ...] = ()
        if history.decisions_for(plan.nodes) is None:
            decisions = launch_decisions(self.world.scenario.kind, plan.config.nodes)
            decided = (quick_copy(_DECIDED, update={"decisions": decisions}),)
        self._finish(Planned(attempt, decided))

    def _start(self, effect: effects.Start) -> None:
        self._begin(self.world.rng.uniform(0.1, 0.5), self._put_files, effect.attempt)

    def _put_files(self, planned: events.Attempt) -> None:
        world = self.world
        plan = world.plan.among(planned.nodes)
        if (away := self._unreachable(plan)) is not None:
            self._later(_UNREACHABLE_S, self._finish, Started(error=f"{away.name}: no answer"))
            return
        full = next((name for name in plan.nodes if world.machines[name].disk_full), None)
        if full is not None or world.disk.full:
            self._finish(Started(error=f"{full or 'this machine'}: No space left on device"))
            return
        world.disk.newest_attempt = planned.number
        attempt = world.attempt_of(plan, planned)
        # Later ones that never started were forgotten with a full disk: this is the newest again.
        world.attempts = {n: one for n, one in world.attempts.items() if n <= planned.number or one.keepers}
        self.attempt = attempt
        if not plan.config.starts_directly:
            self.launcher = world.launcher = Launcher(world, attempt)
            self._later(0.1, self._launched)
            return
        self._starts_confirmed = 0
        for rank in range(len(attempt.machines)):
            self._later(world.rng.uniform(0.1, 0.8), self._start_directly, rank)

    def _launched(self) -> None:
        launcher = self.launcher
        assert launcher is not None
        self._finish(Started(events.LauncherStarted(pid=launcher.pid, start=str(launcher.pid))))

    def _start_directly(self, rank: int) -> None:
        attempt = self.attempt
        assert attempt is not None
        machine = attempt.machines[rank]
        if machine.local or machine.reachable():
            self._later(2 * machine.latency_s, self._started_directly, rank, attempt.start_rank(rank))
        else:
            self._later(10.0, self._started_directly, rank, ShellExit.SSH_FAILED)

    def _started_directly(self, rank: int, code: int | None) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._starts_confirmed += 1
        if code is not None:
            self._start_failures[rank] = code
        if self._starts_confirmed == len(attempt.machines):
            self._finish(Started())

    def _find(self, effect: effects.Find) -> None:
        self._adopted = True
        assert self.history is not None
        recorded = self.history.attempt(effect.attempt.number)
        self._rebooted = (recorded.boot_id or "") != self.world.head_machine.boot_id
        launcher = self.world.launcher
        found = launcher is not None and launcher.attempt.number == effect.attempt.number and not self._rebooted
        if found and launcher is not None and (launcher.alive or recorded.launcher is not None):
            self.launcher = launcher
            self._begin(0.1, self._finish, Found(events.LauncherStarted(pid=launcher.pid, start=str(launcher.pid))))
        elif self._rebooted:
            self._begin(0.1, self._finish, Found())
        else:
            self._begin(0.5, self._find_ranks, self.world.time.now + 20.0, False)

    def _find_ranks(self, limit: float, fenced: bool) -> None:
        """What engine.run.attempt_hosts.any_rank_started finds."""
        hosts = [one for one in self.connections if one.current]
        if any(one.machine.processes(one.number) or any(s.record for s in one.seen.values()) for one in hosts):
            self._finish(Found())
        elif not all(one.contact for one in hosts):
            if self.world.time.now > limit:
                self._finish(Found())
            else:
                self._later(0.5, self._find_ranks, limit, fenced)
        elif fenced:
            self._finish(Found(anything=False))
        else:
            for one in hosts:
                if one.number is not None:
                    one.machine.attempts_fenced.add(one.number)
            self._later(0.2, self._find_ranks, limit, True)

    # Hosts.

    def _connect(self, effect: effects.Connect) -> None:
        for one in self.connections:
            if one.key not in effect.kept:
                one.close()
        self.connections = [one for one in self.connections if one.key in effect.kept]
        for one in self.connections:
            one.current = False
        planned = effect.attempt
        self.attempt = self.world.attempt_of(self.world.plan.among(planned.nodes), planned)
        self.launcher = None
        self._seen_version = -1
        self._ranks = self._ranks_seen = ()
        self._progress = AttemptProgress()
        if not self.attempt.trainer:
            self._progress.updates.first_steps = 0
        self._taken, self._views, self._start_failures = {}, {}, {}
        self._taken_lines = 0
        self._hung_since = None
        self._adopted = self._rebooted = False
        self._add_hosts(planned, current=True)

    def _add_hosts(self, planned: events.Attempt, *, current: bool, only: tuple[str, ...] | None = None) -> None:
        world, history = self.world, self.history
        recorded = [one for one in history.attempts if one.number == planned.number] if history is not None else []
        identities = {rank: event.identity for one in recorded[-1:] for rank, event in one.started.items()}
        machines = [world.machines[name] for name in planned.nodes]
        for rank, machine in enumerate(machines):
            if only is None or (machine.name in only and machine is not world.head_machine):
                self._add(planned.number, machine, (machine.name,), (rank,), identities, current=current)
        if only is None and world.head_machine not in machines:
            self._add(planned.number, world.head_machine, ("this machine",), (), {}, current=current)

    def _add(  # noqa: PLR0913
        self,
        number: int | str,
        machine: Machine,
        names: tuple[str, ...],
        ranks: tuple[int, ...],
        identities: Any,
        *,
        current: bool,
    ) -> Connection:
        watched = number if isinstance(number, int) else self.world.disk.newest_attempt
        connection = Connection(
            self.world, machine, watched, key=f"{number}:{names[0]}", names=names, ranks=ranks, current=current,
            identities=identities,
        )  # fmt: skip
        self.connections.append(connection)
        return connection

    def _reconnect(self, effect: effects.Reconnect) -> None:
        before = len(self.connections)
        self._add_hosts(effect.attempt, current=False, only=effect.nodes)
        self._end_all(before)

    def _end_all(self, begin: int) -> None:
        for connection in self.connections[begin:]:
            for rank in connection.ranks:
                connection.send_command(rank, END)

    def _connect_unknown(self, effect: effects.ConnectUnknown) -> None:
        world, before = self.world, len(self.connections)
        self._seeks_unknown = True
        attempt = world.attempts.get(world.disk.newest_attempt)
        members = attempt.machines if attempt is not None else []
        ordered = sorted(world.members, key=lambda machine: (machine not in members, machine.index))
        for rank, machine in enumerate(ordered):
            self._add("unknown", machine, (machine.name,), (rank,), {}, current=False)
        if world.head_machine not in ordered:
            self._add("unknown", world.head_machine, ("this machine",), (), {}, current=False)
        self._end_all(before)


_ATTEMPT = events.Attempt(number=0, nonce="", starting_port=0, log_bases={}, event_bases={}, layouts=())
_DECIDED = events.LaunchDecided.model_construct()
_SAVED = events.StateSaved(rank=0, state="1.0", manifest="0" * 64)
_PASSED = PreflightReport(checks=[], overall_status=CheckStatus.PASS)


def _name(rank: int) -> str:
    return f"rank{rank}.events.jsonl"


_PERFORM: dict[type, Callable[[Supervisor, Any], None]] = {
    effects.Record: Supervisor._record,
    effects.Send: Supervisor._send,
    effects.KillPrograms: Supervisor._kill_ranks,
    effects.RequestProcesses: Supervisor._request_processes,
    effects.RequestExitOutput: Supervisor._request_exit_output,
    effects.SignalLauncher: Supervisor._signal_launcher,
    effects.DropPipes: Supervisor._drop_pipes,
    effects.EndTrackers: Supervisor._end_trackers,
    effects.Judge: Supervisor._judge,
    effects.Settle: Supervisor._settle,
    effects.RunPreflight: Supervisor._check,
    effects.PlanAttempt: Supervisor._plan_attempt,
    effects.Start: Supervisor._start,
    effects.Find: Supervisor._find,
    effects.Cancel: Supervisor._cancel,
    effects.Connect: Supervisor._connect,
    effects.Reconnect: Supervisor._reconnect,
    effects.ConnectUnknown: Supervisor._connect_unknown,
}
