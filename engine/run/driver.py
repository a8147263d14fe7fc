"""The supervisor's loop: a run as it is alive on its nodes is observed, one step is made, and what follows is done
here, which decides nothing, from the launch to the proof that nothing of it is left.

All that may wait for the head's disk is done in one thread, so that a disk that stalls delays no heartbeat. What takes
long on the nodes (a check, a plan, a start, a search) is a task, of which one is under way at most."""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from engine.cluster.host_connection import HostConnection
from engine.errors import FlightDeckError
from engine.node import processes
from engine.protocol.attempt import END
from engine.run import effects, events
from engine.run.attempt import AttemptOrigin, launch
from engine.run.attempt_hosts import UnknownAttempt, any_rank_started, find_launcher, host_connections
from engine.run.observation import Cancelled, Found, Observation, Planned, Result, Settled, Started
from engine.run.observer import LiveHost, Observer
from engine.run.preparation import Preparation
from engine.run.run_context import AttemptContext, HostConnections, RunContext
from engine.run.run_plan import RunPlan
from engine.run.state import Phase, State
from engine.run.step import step
from engine.run.watched_attempt import WatchedAttempt

TICK_S = 0.1
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class LiveRun:
    def __init__(
        self,
        run: RunContext,
        connect: Callable[[RunContext, RunPlan, events.Attempt], HostConnections] = host_connections,
    ) -> None:
        """`connect` makes the connections of an attempt, which are started here. `run.fleet` belongs to the caller."""
        self._run = run
        self._connect_hosts = connect
        self._observer = Observer(run)
        self._preparation = Preparation(run)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="run")
        self._news = asyncio.Event()
        self._task: asyncio.Task[Result] | None = None
        self._finished: list[Result] = []
        self._clock: asyncio.Task[None] | None = None

    def start(self) -> None:
        """On the running loop."""
        self._clock = asyncio.create_task(self._run.clock.run(), name="clock")
        self._observer.trackers.start(ended=self._run.history.record.state.ended)

    def request_abort(self, by: str) -> None:
        """From a signal handler: the step records it, since another thread may be at the journal now."""
        self._observer.news.append(events.RequestReceived(request="abort", by=by))
        self._news.set()

    async def drive(self, state: State) -> None:
        """Take the run from `state` to its end, and to the proof of that."""
        while (before := state.phase) is not Phase.OVER:
            state, wanted = step(state, await self.observe())
            await self.perform(wanted)
            # What the next phase begins with waits for nothing: a recovery goes through several.
            await self.await_news(TICK_S if state.phase is before else 0.0)

    async def observe(self) -> Observation:
        """Raises what was not expected of a task."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            self._finished.append(Cancelled() if task.cancelled() else task.result())
        finished, self._finished = self._finished, []
        return await self._in_thread(self._observer.observe, finished)

    async def perform(self, wanted: Sequence[effects.Effect]) -> None:
        """Do all of `wanted`, in its order."""
        for effect in wanted:
            match effect:
                case effects.RunPreflight():
                    self._begin(self._preparation.check(effect))
                case effects.PlanAttempt():
                    self._begin(self._plan(effect))
                case effects.Start():
                    self._begin(self._start_ranks(effect.attempt))
                case effects.Find():
                    self._begin(self._find(effect.attempt))
                case effects.Cancel():
                    await self._cancel()
                case effects.Connect():
                    await self._connect(effect)
                case effects.Reconnect():
                    self._reconnect(effect)
                case effects.ConnectUnknown():
                    self._connect_unknown()
                case effects.EndTrackers():
                    self._observer.trackers.end()
                case _:
                    await self._in_thread(self._do, effect)
        if self._observer.news or self._observer.requests:
            await self._in_thread(self._observer.drop_news)

    async def await_news(self, limit_s: float) -> None:
        """Until a rank has started or ended, a host has no process left, or there is a result, but no longer than
        `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.0 if self._finished else limit_s):
                await self._news.wait()
        self._news.clear()

    async def let_go(self) -> None:
        """Cancel what is under way, and close every connection and file: the next observation shows none. What is said
        by then is recorded, also what a step that failed has been shown. A fault is printed: another may follow it."""
        await self._cancel()
        if self._task is not None and not self._task.cancelled():
            # Nobody asks for it any more.
            self._task.exception()
        self._task = None
        self._finished.clear()
        closed = await asyncio.gather(self._preparation.close(), self._close_hosts(()), return_exceptions=True)
        for fault in filter(None, closed):
            traceback.print_exception(fault, chain=False)
        self._observer.unknown = None
        with contextlib.suppress(OSError):
            await self._in_thread(self._record_news)

    async def close(self) -> None:
        """The end, also of the trackers, which have about a minute to send what is left."""
        await self.let_go()
        await self._in_thread(self._observer.series.close)
        await asyncio.to_thread(self._observer.trackers.close)
        with contextlib.suppress(OSError):
            await self._in_thread(self._record_news)
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.wait({self._clock})
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """`work` in the run's own thread: the loop's common ones may all be waiting for the names of nodes that are
        not there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def _do(self, effect: effects.Effect) -> None:
        """Those that are done in the thread."""
        match effect:
            case effects.Record():
                self._run.recorder.append(effect.event)
            case effects.Send():
                self._host(effect.host).send_command(effect.rank, effect.command)
            case effects.KillPrograms():
                self._host(effect.host).kill_ranks()
            case effects.RequestProcesses():
                self._observer.hosts[effect.host].asked = True
                self._host(effect.host).request_processes(kill=True)
            case effects.RequestExitOutput():
                self._host(effect.host).request_exit_output()
            case effects.SignalLauncher():
                if (launcher := self._attempt.evidence.origin.launcher) is not None:
                    launcher.signal_group(effect.number)
            case effects.DropPipes():
                if (launcher := self._attempt.evidence.origin.launcher) is not None:
                    launcher.drop_pipes()
            case effects.Judge():
                self._finished.append(self._attempt.judge(effect))
            case effects.Settle():
                hosts = [self._observer.hosts[key] for key in effect.hosts]
                self._attempt.settle([host.connection for host in hosts if host.current])
                self._finished.append(Settled(effect.hosts, self._attempt.missing))

    @property
    def _attempt(self) -> WatchedAttempt:
        """Raises RuntimeError while none is watched."""
        if self._observer.attempt is None:
            raise RuntimeError("no attempt is watched")
        return self._observer.attempt

    def _host(self, key: str) -> HostConnection:
        return self._observer.hosts[key].connection

    def _begin(self, work: Coroutine[Any, Any, Result]) -> None:
        if self._task is not None:
            work.close()
            raise RuntimeError("a task is under way")
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self._news.set())

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _plan(self, request: effects.PlanAttempt) -> Planned:
        try:
            make, decided = await self._preparation.place(request)
        except FlightDeckError as error:
            return Planned(error=str(error))
        if self._observer.attempt is not None:
            # Only now: until then its nodes may have sent more.
            await self._in_thread(self._observer.attempt.stop_copying)
        return Planned(await self._in_thread(make, self._run.history), decided)

    async def _start_ranks(self, attempt: events.Attempt) -> Started:
        run, evidence = self._run, self._attempt.evidence
        evidence.origin = AttemptOrigin()
        try:
            plan, decisions = run.plan_on(attempt.nodes), run.history.attempt(attempt.number).decisions
            assert decisions is not None
            evidence.origin = await launch(run.run_dir, plan, attempt, decisions, run.fleet)
        except FlightDeckError as error:
            return Started(error=str(error))
        launcher = evidence.origin.launcher
        return Started(events.LauncherStarted(pid=launcher.pid, start=launcher.start) if launcher is not None else None)

    async def _find(self, attempt: events.Attempt) -> Found:
        watched, history = self._attempt, self._run.history.attempt(attempt.number)
        rebooted = not processes.same_boot(history.boot_id or "", processes.boot_id())
        # After a restart of the machine its old pids may be anybody's.
        launcher = None if rebooted else await asyncio.to_thread(find_launcher, self._run.run_dir, history)
        watched.evidence.origin = AttemptOrigin(launcher, adopted=True, rebooted=rebooted)
        if launcher is not None:
            return Found(events.LauncherStarted(pid=launcher.pid, start=launcher.start))
        return Found(None, rebooted or await any_rank_started(watched.context.connections))

    async def _connect(self, request: effects.Connect) -> None:
        await self._close_hosts(request.kept)
        self._observer.unknown = None
        run, attempt = self._run, request.attempt
        plan = run.plan_on(attempt.nodes)
        connections = self._connect_hosts(run, plan, attempt)
        for connection in connections:
            self._add(connection, attempt.number, current=True)
        context = AttemptContext(run.run_dir, plan, attempt, connections, run.recorder)
        self._observer.attempt = WatchedAttempt(context, run.clock, self._observer.news.append)

    def _reconnect(self, request: effects.Reconnect) -> None:
        attempt = request.attempt
        for connection in self._connect_hosts(self._run, self._run.plan_on(attempt.nodes), attempt):
            if not connection.local and not set(request.nodes).isdisjoint(connection.names):
                self._add(connection, attempt.number)

    def _connect_unknown(self) -> None:
        self._observer.unknown = unknown = UnknownAttempt(self._run)
        for connection in unknown.connections:
            self._add(connection, "unknown")

    def _add(self, connection: HostConnection, attempt: int | str, *, current: bool = False) -> None:
        """The ranks of an attempt that is not the `current` one are to end."""
        key = f"{attempt}:{connection.names[0]}"
        connection.on_news = self._news.set
        connection.start()
        self._observer.hosts[key] = LiveHost(connection, key, current)
        for rank in connection.ranks if not current else ():
            connection.send_command(rank, END)

    async def _close_hosts(self, kept: Sequence[str]) -> None:
        """Close the attempt's files, and all hosts but these."""
        observer = self._observer
        attempt, observer.attempt = observer.attempt, None
        try:
            if attempt is not None:
                await self._in_thread(attempt.close)
        finally:
            hosts, observer.hosts = observer.hosts, {key: host for key, host in observer.hosts.items() if key in kept}
            for host in observer.hosts.values():
                host.current = False
            # All at once: each may wait for a host that does not answer any more.
            await asyncio.gather(*(host.connection.close() for key, host in hosts.items() if key not in kept))

    def _record_news(self) -> None:
        for event in self._observer.take_news():
            self._run.recorder.append(event)
        self._observer.drop_news()
