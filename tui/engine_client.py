"""The console's asynchronous client of the engine: it makes the requests, puts the results into the state, and posts a
message for what only the app can do.

Connections live in an event loop in a thread of their own, so that 64 nodes' ssh work does not delay the keys. A
refused request is shown as its one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Generic

from textual.message import Message

from engine import api
from engine.errors import InputError, InputsChanged
from tui import scaling_text
from tui.fixes import HERE, FixCommand
from tui.formatting import fetch_text
from tui.poller import RunsRead
from tui.screens.client import Answer, Item
from tui.screens.use import RunUse
from tui.state import ENGINE_ERRORS, StateStore

if TYPE_CHECKING:
    from engine.api import (
        Comparison,
        Completed,
        Config,
        Engine,
        NetworkPlan,
        RunDir,
        RunSeries,
        TaskRequest,
        TrainingPlan,
    )
    from engine.models import HostKeyOffer, NodeFacts, NodeTelemetry, RunRecord, Topology
    from engine.snapshots import Deletion, RunSnapshot
    from engine.task_result import Fused

BATCH_S: Final = 0.25
"""Between two batches of a stream's items."""
_LOADING_S: Final = 7200.0
"""Limit of a fix that loads an environment's packages."""
CLOSING_S: Final = 3.0
"""How long closing may take: a node that is gone must not keep the console open."""
LINGER_S: Final = 5.0
"""How long telemetry stays on when nobody needs it: views change faster than nodes connect."""
TELEMETRY_RETRY_S: Final = 10.0
"""Before telemetry that failed is started again."""


class EngineLoop:
    """An event loop in a thread of its own, started by the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
            self._thread.start()
        return self._loop

    def submit(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Future[Answer]:
        """Start the coroutine of `make` in the thread; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(make(), self._running())

    async def call(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The result of the coroutine of `make`, run in the thread. Cancelling the call cancels it."""
        return await asyncio.wrap_future(self.submit(make))

    async def each(
        self, make: Callable[[], AsyncIterator[Item]], *, every_s: float = BATCH_S
    ) -> AsyncGenerator[Item, None]:
        """The items of an iterator that runs in the thread, in batches `every_s` seconds apart, so that they are drawn
        together. Closing this closes the iterator; its exception is raised here, after its items."""
        batch: _Batch[Item] = _Batch(asyncio.get_running_loop())
        pumping = self.submit(lambda: _pump(make, batch))
        try:
            while True:
                await batch.ready.wait()
                items, ended = batch.drain()
                for item in items:
                    yield item
                if ended:
                    await asyncio.wrap_future(pumping)
                    return
                await asyncio.sleep(every_s)
        finally:
            pumping.cancel()

    async def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel everything, then await `last`; returns within some seconds, whatever the nodes do."""
        ending = self.submit(lambda: _ending(last))
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSING_S):
                await asyncio.wrap_future(ending)
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        assert loop is not None and thread is not None
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, CLOSING_S)
        if not thread.is_alive():
            loop.close()


class _Batch(Generic[Item]):
    """Filled in one thread, drained in another."""

    def __init__(self, reader: asyncio.AbstractEventLoop) -> None:
        self.ready = asyncio.Event()
        self._reader = reader
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._ended = False

    def add(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
        self._wake_reader()

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._wake_reader()

    def drain(self) -> tuple[list[Item], bool]:
        """The items since the last call, and whether they are the last ones."""
        with self._lock:
            items, self._items = self._items, []
            self.ready.clear()
            return items, self._ended

    def _wake_reader(self) -> None:
        # The reader's loop may be closed already.
        with contextlib.suppress(RuntimeError):
            self._reader.call_soon_threadsafe(self.ready.set)


async def _pump(make: Callable[[], AsyncIterator[Item]], batch: _Batch[Item]) -> None:
    try:
        source = make()
        try:
            async for item in source:
                batch.add(item)
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()
    finally:
        batch.end()


async def _ending(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    others = _others()
    for task in others:
        task.cancel()
    # Cancelled tasks start others: a channel asks once more for its program's end.
    while others:
        await asyncio.gather(*others, return_exceptions=True)
        others = _others()
    if last is not None:
        await last()
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()


def _others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}


@dataclass
class Notice(Message):
    """One plain line for a corner of the screen."""

    text: str
    severity: str = "information"


@dataclass
class TelemetryReceived(Message):
    """The newest telemetry of each node; a newer message replaces a waiting one."""

    newest: dict[str, NodeTelemetry]

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, TelemetryReceived)


class EngineClient:
    """Each request is a coroutine of the app's loop. What was refused is said, and its answer is None."""

    def __init__(
        self,
        store: StateStore,
        clock: Callable[[], datetime],
        post: Callable[[Message], object],
        *,
        telemetry_s: float = BATCH_S,
    ) -> None:
        self.loaded: Engine | None = None
        self._store = store
        self._clock = clock
        self._post = post
        self._telemetry_s = telemetry_s
        self._loop = EngineLoop()
        self._telemetry: asyncio.Task[None] | None = None
        self._telemetry_of: Config | None = None
        self._needed_at = 0.0

    @property
    def engine(self) -> Engine:
        """No action can be done, and no configuration is known, before it is loaded."""
        assert self.loaded is not None
        return self.loaded

    @property
    def _config(self) -> Config:
        """The actions that need one cannot be done without."""
        assert self._store.state.config is not None
        return self._store.state.config

    async def close(self) -> None:
        """Cancel what is under way and close the connections, within some seconds."""
        telemetry = self._telemetry
        self.stop_telemetry()
        if telemetry is not None:
            await asyncio.wait([telemetry])
        await self._loop.stop(self.loaded.close if self.loaded is not None else None)

    async def call(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """As EngineLoop's."""
        return await self._loop.call(make)

    def each(self, make: Callable[[], AsyncIterator[Item]], *, every_s: float = BATCH_S) -> AsyncGenerator[Item, None]:
        """As EngineLoop's."""
        return self._loop.each(make, every_s=every_s)

    def _notify(self, text: str, severity: str = "information") -> None:
        self._post(Notice(text, severity))

    def update_telemetry(self, *, needed: bool) -> None:
        """Start telemetry when it is needed, end it when it has not been for LINGER_S or is of another cluster."""
        config = self._store.state.config
        if config is None:
            return
        if self._telemetry_of is not config:
            self.stop_telemetry()
        if needed:
            self._needed_at = monotonic()
            if self._telemetry is None:
                self._telemetry = asyncio.create_task(self._stream_telemetry(self.engine, config), name="telemetry")
                self._telemetry_of = config
        elif monotonic() - self._needed_at > LINGER_S:
            self.stop_telemetry()
        self._store.change(listening=self._telemetry is not None)

    def stop_telemetry(self) -> None:
        """End telemetry, on the nodes too, until it is needed again."""
        if self._telemetry is not None:
            self._telemetry.cancel()
            self._telemetry = None

    async def _stream_telemetry(self, engine: Engine, config: Config) -> None:
        newest: dict[str, NodeTelemetry] = {}
        while True:
            try:
                stream = self._loop.each(lambda: engine.nodes.telemetry(config), every_s=self._telemetry_s)
                async with aclosing(stream) as values:
                    async for value in values:
                        newest = {**newest, value.node: value}
                        self._post(TelemetryReceived(newest))
            except Exception as error:  # a fault in reading one node must not end the console
                self._notify(f"telemetry: {error or type(error).__name__}", "warning")
            await asyncio.sleep(TELEMETRY_RETRY_S)

    @contextlib.contextmanager
    def _request(self, what: str, **ended: Any) -> Iterator[None]:
        """A refusal is shown as one line; at the end the state is changed by `ended`."""
        try:
            yield
        except ENGINE_ERRORS as error:
            self._notify(f"{what}: {error}", "error")
        finally:
            self._store.change(**ended)

    async def _read(self, what: str, read: Callable[[], Answer], **ended: Any) -> Answer | None:
        """The answer of `read`, asked in a thread."""
        with self._request(what, **ended):
            return await asyncio.to_thread(read)
        return None

    async def probe(self) -> None:
        """Probe every node once; each is shown as it answers, and then how they are connected."""
        store, config, engine = self._store, self._config, self.engine
        if store.state.probing:
            return
        store.change(probing=True, unanswered=frozenset(node.name for node in config.nodes))
        with self._request("probe", probing=False, unanswered=frozenset()):
            async with aclosing(self._loop.each(lambda: engine.nodes.probe_each(config))) as answers:
                async for facts in answers:
                    seen = {**store.state.facts, facts.node: facts}
                    store.change(facts=seen, unanswered=store.state.unanswered - {facts.node}, now=self._clock())
            last_facts = store.state.known_facts
            topology, network, problem = await self._loop.call(lambda: _connect(engine, config, last_facts))
            store.change(topology=topology, network_plan=network, network_problem=problem)
            # A calibration is of chips and versions: the probe may have found others.
            store.change(**await self._loop.call(lambda: _known(engine, config)))
        if store.state.config is not config:
            # Edited meanwhile: it may have other nodes.
            await self.probe()
        else:
            await self.plan()

    async def plan(self) -> None:
        """Plan the next launch by the newest facts; not while ranks run on the nodes, when nobody needs it."""
        store, config, engine = self._store, self._store.state.config, self.engine
        if config is None or store.state.planning or store.state.running is not None:
            return
        facts = store.state.known_facts
        store.change(planning=True)
        try:
            made = await self._loop.call(lambda: engine.launches.plan(config, facts=facts))
            if store.state.config is config:
                store.change(plan=made, now=self._clock())
        except ENGINE_ERRORS:
            # The nodes pane shows why the nodes cannot be planned for.
            store.change(plan=None)
        except Exception as error:  # the plan only explains a launch: no fault of it may end the console
            self._notify(f"plan: {error or type(error).__name__}", "error")
        finally:
            store.change(planning=False)
        if store.state.config is not config:
            # Edited meanwhile.
            await self.plan()

    async def preflight(self) -> None:
        """Run the checks without a launch; each is shown as it ends."""
        store, config, engine = self._store, self._config, self.engine
        # Each has its place from the first moment on.
        store.change(busy="checking", checks=api.with_pending(()), checks_at=None)
        with self._request("preflight", busy=None):
            async with aclosing(self._loop.each(lambda: engine.checks.preflight(config))) as results:
                async for result in results:
                    if store.state.config is not config:
                        break
                    by_name = {check.name: check for check in (*store.state.checks, result)}
                    store.change(checks=tuple(by_name.values()))
            store.change(checks_at=self._clock(), now=self._clock())
        if store.state.config is not config:
            # Edited meanwhile: what it has been is not launched any more.
            await self.preflight()
            return
        store.change(checks=tuple(check for check in store.state.checks if check.status != "pending"))

    async def calibrate(self, *, quick: bool) -> None:
        """Measure every node and link, with its progress shown. Cancelled, it ends on the nodes."""
        store, config, engine = self._store, self._config, self.engine
        store.change(busy="calibrating", calibrating={})
        problems: list[str] = []
        try:
            with self._request("calibration", busy=None, calibrating=None):
                async with aclosing(self._loop.each(lambda: engine.calibrations.measure(config, quick=quick))) as steps:
                    async for step in steps:
                        if isinstance(step, api.Calibration):
                            problems = [f"{node.node}: {node.problem}" for node in step.nodes if node.problem]
                        else:
                            store.change(calibrating={**(store.state.calibrating or {}), step.what: step})
                store.change(**await self._loop.call(lambda: _known(engine, config)), now=self._clock())
                if problems:
                    self._notify(f"calibration: not kept, {'; '.join(problems)}", "error")
                else:
                    self._notify("calibration: measured")
                await self.plan()
        except asyncio.CancelledError:
            self._notify("calibration: stopped")
            raise

    async def measure_scaling(self) -> None:
        """Run the job's steps over 1, 2, … ranks; each number of ranks is shown as it ends. Cancelled, it ends on the
        nodes, and what there is of it stays on the screen."""
        store, config, engine = self._store, self._config, self.engine
        store.change(busy="measuring the scaling", calibrating={})
        problems: list[tuple[str, str]] = []
        try:
            with self._request("scaling", busy=None, calibrating=None):
                async with aclosing(self._loop.each(lambda: engine.calibrations.measure_scaling(config))) as steps:
                    async for step in steps:
                        if isinstance(step, api.Scaling):
                            store.change(scaling=step, now=self._clock())
                            problems = scaling_text.problems(step)
                        else:
                            store.change(calibrating={**(store.state.calibrating or {}), step.what: step})
                if problems:
                    self._notify(f"scaling: {'; '.join(': '.join(problem) for problem in problems)}", "error")
                else:
                    self._notify("scaling: measured")
        except asyncio.CancelledError:
            self._notify("scaling: stopped")
            raise

    async def launch(self, config: Config) -> str | None:
        """The new run's id."""
        self._store.change(busy="launching", fault=None)
        try:
            skips = self._store.state.skips
            record = await self._loop.call(lambda: self.engine.launches.launch(config, skip=skips))
        except ENGINE_ERRORS as error:
            self._store.change(fault=str(error))
            self._notify(str(error), "error")
            return None
        else:
            # The supervisor's own preflight counts now, not an earlier one.
            self._store.change(checks=(), checks_at=None, skips={})
            return record.id
        finally:
            self._store.change(busy=None)

    async def test_notifications(self, config: Config) -> None:
        """Show what each channel of [notify] answers to a test."""
        with self._request("notify"):
            if not self.engine.nodes.is_accepted(config, launch=True):
                raise InputError("nobody has accepted what the configuration runs", todo="flightdeck notify test")
            for answer in await self._loop.call(lambda: asyncio.to_thread(self.engine.checks.notifications, config)):
                self._notify(f"{answer.channel}: {answer.answer}", "information" if answer.sent else "error")

    async def enqueue(self, config: Config, wishes: Mapping[str, Any]) -> None:
        """Put the configuration at the end of the queue. `wishes`: "after" and "budget_s", as QueueApi.add has them."""
        with self._request("queue"):
            add, skips = self.engine.queue.add, self._store.state.skips
            (item,) = await asyncio.to_thread(lambda: add([config], skip=skips, **wishes))
            self._store.change(skips={}, queue=await asyncio.to_thread(self.engine.queue.snapshot))
            self._notify(f"queued as item {item.id}: 6 shows the queue")

    async def change_queue(self, change: str, *arguments: int) -> None:
        """`change`: "move" an item to a place, "hold", "release" or "cancel" one."""
        with self._request("queue"):
            await asyncio.to_thread(getattr(self.engine.queue, change), *arguments)
            self._store.change(queue=await asyncio.to_thread(self.engine.queue.snapshot))

    async def abort(self, run: str, *, now: bool) -> None:
        """Request the stop and follow it until it is proved; its progress is in the run's snapshots."""
        with self._request("abort"):
            async with aclosing(self._loop.each(lambda: self.engine.runs.abort(run, now=now))) as stages:
                async for _ in stages:
                    pass

    async def fetch(self, run: str, wanted: str = "trained") -> Path | None:
        """Copy what a run has left to a folder here, with the progress in the header: the folder, None where that has
        failed."""
        self._store.change(busy="fetching")
        with self._request("fetch", busy=None):
            async with aclosing(self._loop.each(lambda: self.engine.results.fetch(run, wanted=wanted))) as steps:
                async for step in steps:
                    if isinstance(step, api.FetchProgress):
                        self._store.change(busy=f"fetching {fetch_text(step)}")
                    else:
                        self._notify(f"fetched to {step.folder}")
                        return step.folder
        return None

    async def read_use(self, run: str) -> RunUse | None:
        """None where it cannot be read, which is said."""
        runs = self.engine.runs
        fused: list[Fused] = []

        def read() -> RunSnapshot:
            for task in runs.tasks_of(run):
                if task.task == "fuse":
                    fused.extend(result for result in runs.watch(task.id).poll().task_results if result.kind == "fused")
            return runs.watch(run).poll()

        with self._request("use"):
            snapshot = await asyncio.to_thread(read)
            try:
                nodes, why = (await self._loop.call(lambda: self.engine.tasks.weights(run))).nodes, None
            except InputError as error:
                nodes, why = (), error.why
            return RunUse(snapshot, nodes, why, tuple(fused))
        return None

    async def describe(self, run: str) -> tuple[RunSnapshot, RunSeries] | None:
        runs = self.engine.runs
        return await self._read("describe", lambda: (runs.watch(run).poll(), runs.series(run)))

    async def compare(self, runs: Sequence[str]) -> tuple[Comparison, Mapping[str, RunSeries]] | None:
        """With the runs' series by their ids."""
        self._store.change(busy="comparing")

        def read() -> tuple[Comparison, Mapping[str, RunSeries]]:
            comparison = self.engine.comparisons.compare(runs)
            return comparison, {run.id: self.engine.runs.series(run.id) for run in comparison.runs}

        return await self._read("compare", read, busy=None)

    async def annotate(self, run: RunRecord, *, tags: Sequence[str] | None = None, note: str | None = None) -> None:
        """Replace the tags or the note of a run."""
        with self._request("tag" if note is None else "note"):
            gone = set(run.tags).difference(run.tags if tags is None else tags)
            await asyncio.to_thread(self.engine.runs.annotate, run.id, add=tags or (), remove=gone, note=note)
            await self._read_runs()

    async def delete(self, runs: Sequence[str], *, go: bool, anyway: bool = False) -> list[Deletion]:
        """Delete the runs, or without `go` ask what that frees; one after the other, up to one that is refused."""
        self._store.change(busy="deleting" if go else "asking the nodes")
        deletions: list[Deletion] = []
        with self._request("delete", busy=None):
            for run in runs:
                deletions.append(await self._loop.call(partial(self.engine.runs.delete, run, go=go, anyway=anyway)))
        if go:
            await self._read_runs()
        return deletions

    async def _read_runs(self) -> None:
        self._post(RunsRead(tuple(await asyncio.to_thread(self.engine.runs.all))))

    async def start_task(self, run: str, request: TaskRequest) -> str | None:
        """The id of a task on the run's result."""
        self._store.change(busy=f"starting {request.kind}")
        with self._request(request.kind, busy=None):
            return (await self._loop.call(lambda: self.engine.tasks.start(run, request))).id
        return None

    async def resume(self, run: str) -> str | None:
        """The run's id again."""
        self._store.change(busy="resuming")
        with self._request("resume", busy=None):
            return (await self._loop.call(lambda: self.engine.launches.resume(run))).id
        return None

    async def open_run(self, run: str) -> tuple[RunDir, RunSeries] | None:
        """Its directory and series."""
        runs = self.engine.runs
        return await self._read("open", lambda: (runs.find(run), runs.series(run)))

    async def configuration(self, run: str) -> Config | None:
        return await self._read("run again", partial(self.engine.launches.configuration, run))

    async def differs(self, run: str, config: Config) -> bool:
        """The configuration is another than the run's; False also where the run has none that can be read."""
        with contextlib.suppress(*ENGINE_ERRORS):
            return bool(await asyncio.to_thread(self.engine.launches.differences, run, config))
        return False

    async def read_run(self, run: str) -> RunSnapshot | None:
        return await self._read("reading the run", lambda: self.engine.runs.watch(run).poll())

    async def repeat(
        self, run: str, settings: Mapping[str, Any], *, accept_changed: bool = False
    ) -> str | InputsChanged | None:
        """Start a run anew: the new one's id, or what has changed of its data or versions."""
        self._store.change(busy="starting it again")
        with self._request("run again", busy=None):
            try:
                repeat = partial(self.engine.launches.repeat, run, settings, accept_changed=accept_changed)
                return (await self._loop.call(repeat)).id
            except InputsChanged as changed:
                return changed
        return None

    async def launch_with(self, config: Config, changes: Mapping[str, Any]) -> str | None:
        """Write the settings into the configuration's file, if it has one, and launch what that says then, unless
        others have changed it since it was shown."""
        with self._request("settings"):
            wanted = api.with_settings(config, changes, "settings")
            if config.file is not None:
                await asyncio.to_thread(self.engine.launches.write_settings, config, changes)
                wanted, shown = await asyncio.to_thread(self.engine.load_config, config.file, wanted.overrides), wanted
                if others := api.changed_keys(shown, wanted) or ["what it runs"] * (wanted.digest != config.digest):
                    why = f"the file has changed meanwhile: {', '.join(others)}"
                    raise InputError("nothing was launched", why=why, todo="look at the plan, and launch it again")
            return await self.launch(wanted)
        return None

    async def plan_of(self, config: Config) -> TrainingPlan | str:
        """The plan of a configuration, or why there is none; the nodes are probed where their facts are not known."""
        facts = self._store.state.known_facts if config.nodes == self._config.nodes else None
        try:
            return await self._loop.call(lambda: self.engine.launches.plan(config, facts=facts))
        except ENGINE_ERRORS as error:
            return str(error)

    async def publish(self, run: str, target: str) -> Sequence[str]:
        """Publish the fused model or the adapter, as the target takes it, fetched where it is not on this machine; the
        commands that come next, none where that has failed."""
        with self._request("publish", busy=None):
            wanted, folder = await asyncio.to_thread(self.engine.results.to_publish, run, target)
            if folder is not None or (folder := await self.fetch(run, wanted)) is not None:
                self._store.change(busy=f"publishing for {target}")
                request = api.PublicationRequest(run, target, folder)
                done = await asyncio.to_thread(self.engine.results.publish, request)
                return [f"cd {shlex.quote(str((done.folder or folder).absolute()))}", *done.commands]
        return ()

    async def demo(self) -> str | None:
        """Make the demo's model where it is missing (seconds), then launch it: the run's id."""
        self._store.change(busy="making the demo's model")
        try:
            config = await asyncio.to_thread(self.engine.demo_config)
        except ENGINE_ERRORS as error:
            self._store.change(fault=str(error), busy=None)
            return None
        self._store.change(config=config, fault=None)
        return await self.launch(config)

    async def accept_host_key(self, node: str, offer: HostKeyOffer) -> None:
        """Accept the key that a person has compared, and probe again."""
        accepted = False
        with self._request("not accepted"):
            await self._loop.call(lambda: self.engine.nodes.accept_host_key(offer))
            accepted = True
        if accepted:
            self._notify(f"accepted the host key of {node}")
            # Telemetry retries a node that refused it only after a while.
            self.stop_telemetry()
            await self.probe()

    async def fix(self, config: Config, commands: Sequence[FixCommand]) -> None:
        """Run each command on its node, all at once; output and exit code are put into it."""
        await asyncio.gather(*(self._run_fix(config, command) for command in commands if not command.ended))

    async def _run_fix(self, config: Config, command: FixCommand) -> None:
        try:
            # Ours may not be on the PATH of a login shell, and takes as long as what it loads.
            ours = f"{shlex.quote(str(Path(sys.executable).with_name('flightdeck')))} environments make"
            line = command.line.replace(api.MAKE_ENVIRONMENT, ours) if command.node == HERE else command.line
            run = partial(self.engine.nodes.run_on, config, command.node, line)
            done = await self._loop.call(partial(run, timeout_s=_LOADING_S) if line != command.line else run)
        except ENGINE_ERRORS as error:
            command.problem = str(error)
        else:
            command.output, command.code = _output_lines(done), done.code
            if done.code is None:
                command.problem = "ended by its time limit"
        command.ended = True


async def _connect(
    engine: Engine, config: Config, facts: Sequence[NodeFacts]
) -> tuple[Topology, NetworkPlan | None, str | None]:
    """The topology and the network plan, or why there is none; in a thread, since 64 nodes take a while."""
    topology = await asyncio.to_thread(engine.nodes.topology, facts)
    try:
        return topology, await asyncio.to_thread(engine.nodes.network_plan, config, facts), None
    except ENGINE_ERRORS as error:
        return topology, None, str(error)


async def _known(engine: Engine, config: Config) -> dict[str, Any]:
    """The newest calibration and scaling, as changes of the state."""
    calibrations = engine.calibrations

    def read() -> dict[str, Any]:
        prediction = calibrations.predict(config, calibrations.latest(config))
        return {"prediction": prediction, "scaling": calibrations.latest_scaling(config)}

    return await asyncio.to_thread(read)


def _output_lines(done: Completed) -> tuple[str, ...]:
    """A command's output, sanitised and without secrets; stderr last."""
    return tuple(
        api.redact(api.sanitise(line)) for stream in (done.stdout, done.stderr) for line in stream.splitlines()
    )
