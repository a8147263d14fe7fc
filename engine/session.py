"""The faces' only door into the engine: requests in, records and snapshots out.

Everything that costs start-up time (the store, asyncssh, the checks) is imported where it is first needed: a console
has to paint before it asks, and `flightdeck runs` needs none of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config.models import FlightConfig, NodeConfig
from engine.errors import HostKeyChanged, InputError, LaunchError, RunNotFound, StateError
from engine.events import Diagnosis, RunSnapshot, StopProgress
from engine.models import (
    CheckResult,
    CheckStatus,
    HostKeyOffer,
    NodeFacts,
    NodeTelemetry,
    PreflightReport,
    RunRecord,
    SyncReport,
    Topology,
)
from engine.runs.layout import LAUNCHER_SOURCE, RunDir, state_home
from engine.runs.watch import RunWatch, supervisor_alive
from engine.security.home import make_home

if TYPE_CHECKING:
    from engine.config.draft import DraftJob, DraftNode
    from engine.measured import Calibration, CalibrationProgress, Division
    from engine.nodes.discover import FoundHost
    from engine.nodes.find_python import FoundPython
    from engine.planning.document import TrainingPlan
    from engine.planning.inputs import Parallelism
    from engine.planning.outlook import Outlook
    from engine.planning.wiring import Wiring
    from engine.store.store import Store
    from engine.transport.base import Completed
    from engine.transport.fleet import Fleet

__all__ = ["Engine", "RunWatch"]

_POLL_S = 0.05
_FIX_LIMIT_S = 600.0
"""Of a command that mends something on a node: it may install packages."""
_SUPERVISOR_STARTS = 3
"""How often an abort gives a run another supervisor before it says that this does not help."""
_REPORT_ONLY = frozenset({"kind", "attempt", "at"})
"""What the head adds to mlx-lm's report dicts."""


class Engine:
    """One per process. Cheap to construct: reads nothing until it is asked."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = home or state_home()
        self.notices: list[str] = []
        """What was found damaged in the state and what was done about it, one line each, for people."""
        self._watches: dict[str, RunWatch] = {}
        self._fleets: dict[tuple[str, ...], Fleet] = {}

    def load_config(self, path: Path) -> FlightConfig:
        """Read a flightdeck.toml. Raises ConfigError with all its faults."""
        from engine.config.load import load_config

        return load_config(path)

    def demo_config(self, *, ranks: int = 2, iters: int = 60) -> FlightConfig:
        """The demo's configuration, its model and corpus made first when they are not cached (seconds; blocking)."""
        from engine.demo import demo_config

        return demo_config(self.home, ranks=ranks, iters=iters)

    def runs(self) -> list[RunRecord]:
        """Every run, newest first; running ones with their live figures."""
        return [record if record.state.ended else self._live(record) for record in self._stored()]

    def find(self, run: str) -> RunDir:
        """A run by id, unique id prefix, name (its newest) or "last". Raises RunNotFound."""
        from engine.security.identifiers import shown

        records = self._stored()
        if not records:
            raise RunNotFound("there are no runs yet", where=str(self.home), todo="`flightdeck demo` makes one")
        if run == "last":
            return self._directory(records[0].id)
        named = next((record for record in records if run in (record.id, record.name)), None)
        if named is not None:
            return self._directory(named.id)
        matching = [record.id for record in records if run and record.id.startswith(run)]
        if len(matching) == 1:
            return self._directory(matching[0])
        if matching:
            why = f"{len(matching)} ids begin with it: {', '.join(matching[:4])}{', …' if len(matching) > 4 else ''}"
            raise RunNotFound(f"{shown(run)} is not one run", why=why, todo="give more of the id")
        raise RunNotFound(f"no run {shown(run)}", why="no id, id prefix or name is that", todo="see `flightdeck runs`")

    def record(self, run: str) -> RunRecord:
        """One run as it is now. Raises RunNotFound."""
        return self.watch(self.find(run).id).poll().record

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """mlx-lm's report dicts in order."""
        from engine.runs.json_lines import JsonLinesTail

        rows = JsonLinesTail(self.find(run).metrics).objects()
        return [{key: value for key, value in row.items() if key not in _REPORT_ONLY} for row in rows]

    def watch(self, run: str) -> RunWatch:
        """A new watch of a run: it is for one reader. Raises RunNotFound, StateError."""
        return RunWatch(self.find(run), diagnose=_diagnose)

    def supervised(self, run: str) -> bool:
        """Whether a supervisor of the run is alive. Raises RunNotFound."""
        return supervisor_alive(self.find(run))

    def evidence(self, run: str, snapshot: RunSnapshot, *, limit: int = 8) -> list[str]:
        """The log lines that prove why a run ended badly, sanitised, at most `limit`: from the diagnosed line on, else
        the last ones of the rank that was first. Raises RunNotFound."""
        from engine.runs.log_reader import LogReader

        record, found = snapshot.record, snapshot.diagnosis
        source = found.source if found is not None and found.source is not None else record.rank
        if not record.state.ended or record.reason is None or (source is None and found is None):
            return []
        reader = LogReader(self.find(run), LAUNCHER_SOURCE if source is None else source)
        try:
            reader.refresh()
            number = None
            if found is not None and found.offset is not None and source is not None:
                number = reader.number_of(source, found.offset)
            start = max(0, reader.line_count - limit) if number is None else max(0, number - limit // 2)
            return [line.text for line in reader.lines(start, start + limit)]
        finally:
            reader.close()

    def adopt_orphans(self) -> list[str]:
        """Find runs whose supervisor is gone and start one that adopts or fences each; the ids."""
        from engine.supervision.adopt import adopt_orphans

        return adopt_orphans(self.home)

    def fleet(self, config: FlightConfig) -> Fleet:
        """The connections to the configuration's nodes, kept until `close`."""
        from engine.transport.fleet import Fleet

        hosts = tuple(node.ssh for node in config.nodes)
        if hosts not in self._fleets:
            self._fleets[hosts] = Fleet(config.nodes, self.home)
        return self._fleets[hosts]

    async def close(self) -> None:
        """Close all connections to nodes; runs go on."""
        fleets = list(self._fleets.values())
        self._fleets.clear()
        for fleet in fleets:
            await fleet.close()

    async def accept_host_key(self, offer: HostKeyOffer) -> None:
        """Accept the host key that a person has compared. Raises HostKeyChanged when the node shows another one by now,
        NodeUnreachable, OSError."""
        from engine.security.audit import audit_log
        from engine.transport.fleet import Fleet

        context = {"host": offer.target, "fingerprint": offer.fingerprint}
        try:
            async with Fleet((), self.home) as fleet:
                await fleet.accept(offer.target, offer.fingerprint)
        except HostKeyChanged as changed:
            audit_log("host_key", "refused", context | {"found": changed.found}, home=self.home)
            raise
        audit_log("host_key", "accepted", context, home=self.home)

    async def run_on(
        self, config: FlightConfig, node: str, command: str, *, timeout_s: float = _FIX_LIMIT_S
    ) -> Completed:
        """Run a command line on a node as its user would type it: through a login shell, in their home.
        Raises InputError for a node that is none, NodeUnreachable."""
        from engine.security.audit import audit_log

        found = _node(config, node)
        audit_log("command", "asked", {"node": node, "command": command}, home=self.home)
        argv = ["/bin/sh", "-c", 'exec "${SHELL:-/bin/sh}" -lc "$1"', "flightdeck", command]
        return await self.fleet(config).to(found).run(argv, timeout_s=timeout_s)

    def shell_argv(self, config: FlightConfig, node: str) -> list[str]:
        """The program of an interactive shell on a node. Raises InputError, OSError."""
        from engine.security.hosts import SshTarget
        from engine.transport.openssh import shell_argv, write_openssh_config

        target = SshTarget.parse(_node(config, node).ssh)
        file = self.home / "ssh_config"
        if not target.local:
            make_home(self.home)
            write_openssh_config(file, self.home, unattended=False)
        return shell_argv(target, file)

    async def facts(self, config: FlightConfig) -> list[NodeFacts]:
        """Probe every node once, concurrently, and keep what was seen."""
        found = {facts.node: facts async for facts in self.probing(config)}
        return [found[node.name] for node in config.nodes]

    async def probing(self, config: FlightConfig) -> AsyncIterator[NodeFacts]:
        """The same, each node's facts as it answers. Closing the iterator ends the probes."""
        from engine.nodes.probe import probing

        seen: list[NodeFacts] = []
        try:
            async with contextlib.aclosing(probing(config, self.fleet(config))) as answers:
                async for facts in answers:
                    seen.append(facts)
                    yield facts
        finally:
            # A state that cannot be written is no reason to keep back what the nodes said.
            with contextlib.suppress(StateError):
                await asyncio.to_thread(self._store().put_facts, config.cluster.name, seen)

    def last_facts(self, config: FlightConfig) -> list[NodeFacts]:
        """What was last seen of the configuration's nodes, as old as `probed_at` says; nothing of the others.
        Raises StateError."""
        store = self._store()
        known = {(facts.node, facts.host): facts for facts in store.last_facts(config.cluster.name)}
        self.notices += [notice for notice in store.notices if notice not in self.notices]
        return [facts for node in config.nodes if (facts := known.get((node.name, node.ssh))) is not None]

    async def calibrate(
        self, config: FlightConfig, *, quick: bool = False
    ) -> AsyncIterator[CalibrationProgress | Calibration]:
        """Measure the job's step on every node and the links between them: how far it has come, and at last the
        calibration, kept when every node was measured. Closing the iterator ends it on the nodes. Raises InputError
        while a run is going on there, and the first node's error when none can be reached."""
        from engine.calibration.calibrate import calibrate, complete
        from engine.preflight.scene import Scene

        await asyncio.to_thread(self._check_idle, config)
        before = await asyncio.to_thread(self.last_facts, config)
        scene = Scene(config, self.fleet(config))
        progress: asyncio.Queue[CalibrationProgress | None] = asyncio.Queue()

        async def run() -> Calibration:
            try:
                return await calibrate(scene, quick=quick, known=before, tell=progress.put_nowait)
            finally:
                await scene.close()
                progress.put_nowait(None)

        running = asyncio.create_task(run(), name="calibration")
        try:
            while (told := await progress.get()) is not None:
                yield told
            taken = await running
            if complete(taken):
                facts = (await scene.facts()).values()
                await asyncio.to_thread(self._store().put_facts, config.cluster.name, facts)
                await asyncio.to_thread(self._store().put_calibration, taken)
            yield taken
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    def _check_idle(self, config: FlightConfig) -> None:
        """Raises InputError when a run on one of the nodes' hosts has not ended: both would be slowed down."""
        from engine.runs.plan_file import read_plan

        hosts = {node.ssh for node in config.nodes}
        for record in self.runs():
            if not record.state.ended:
                with contextlib.suppress(StateError):
                    if hosts & {rank.host for rank in read_plan(self._directory(record.id).plan).ranks}:
                        raise InputError(f"{record.id} goes on on these nodes", todo="wait for its end, or abort it")

    def last_calibration(self, config: FlightConfig) -> Calibration | None:
        """The newest calibration of this job on these nodes as they were last seen, however old: `taken_at` says.
        Raises StateError."""
        from engine.planning.fingerprint import matching

        facts, store = self.last_facts(config), self._store()
        found = matching(config, facts, store.calibrations(config.cluster.name))
        self.notices += [notice for notice in store.notices if notice not in self.notices]
        return found

    def outlook(self, config: FlightConfig, calibration: Calibration | None) -> Outlook:
        """What `calibration`, a last_calibration, means for the next launch. Raises InputError when it says that no
        node has any throughput."""
        from engine.planning.outlook import outlook

        try:
            return outlook(config, calibration, datetime.now(UTC))
        except ValueError as error:
            raise InputError("nothing can be shared out", why=str(error), todo="flightdeck calibrate again") from error

    def topology(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> Topology:
        """Who is cabled to whom over Thunderbolt."""
        from engine.nodes.topology import topology

        return topology(facts)

    def link_commands(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> dict[str, list[str]]:
        """Per node, what a person runs there to give each Thunderbolt cable its addresses; {} when all have them."""
        from engine.planning.links import setup_commands

        return setup_commands(self.topology(config, facts), facts)

    def wiring(self, config: FlightConfig, facts: Sequence[NodeFacts]) -> Wiring:
        """The backend and each rank's addresses and RDMA devices. Raises LaunchError, naming each node in the way."""
        from engine.planning.wire import wire

        return wire(config, facts, self.topology(config, facts))

    def telemetry(self, config: FlightConfig) -> AsyncIterator[NodeTelemetry]:
        """What every node uses, as it comes, without end; closing the iterator ends it on the nodes."""
        from engine.nodes.telemetry import telemetry

        return telemetry(config, self.fleet(config))

    async def discover(self, *, ssh_config: bool = True, bonjour: bool = True) -> list[FoundHost]:
        """This machine, and hosts that could be nodes (about 3 s when Bonjour is asked)."""
        from engine.nodes.discover import discover

        return await discover(ssh_config=ssh_config, bonjour=bonjour)

    async def find_pythons(self, hosts: Sequence[str]) -> list[FoundPython]:
        """Of each `[user@]host[:port]`, a python there with mlx and mlx-lm, or why there is none."""
        from engine.nodes.find_python import find_pythons

        return await find_pythons(hosts, self.home)

    def draft(
        self, nodes: Sequence[DraftNode], *, cluster: str, backend: str = "auto", job: DraftJob | None = None
    ) -> str:
        """The text of a first flightdeck.toml. Raises InputError."""
        from engine.config.draft import draft

        return draft(nodes, cluster=cluster, backend=backend, job=job)

    def checks_not_yet(self) -> dict[str, str]:
        """Checks of the design that this release does not have → what they would look at."""
        from engine.preflight.registry import NOT_YET

        return dict(NOT_YET)

    async def plan(
        self, config: FlightConfig, *, strategy: Parallelism | None = None, facts: Sequence[NodeFacts] | None = None
    ) -> TrainingPlan:
        """What would be launched, on what, and why; `strategy` in place of the job's. `facts` are those of a probe just
        made, else there is one. A node that does not answer makes no plan fail: what was last seen of it is used."""
        from engine.preflight.planned import planned
        from engine.preflight.scene import Scene

        scene = Scene(config, self.fleet(config))
        try:
            seen = list(facts) if facts is not None else list((await scene.facts()).values())
            made = await planned(scene, self._store(), seen, strategy=strategy)
        finally:
            await scene.close()
        # A state that cannot be written is no reason to keep back the plan.
        with contextlib.suppress(StateError):
            await asyncio.to_thread(self._store().put_facts, config.cluster.name, seen)
        return made

    async def preflight(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> AsyncIterator[CheckResult]:
        """Run the checks; each is yielded as RUNNING and again when it ends. Closing the iterator ends them.
        Raises InputError when a name in `skip` is no check."""
        from engine.preflight.checklist import run_checks
        from engine.preflight.scene import Scene
        from engine.security.audit import audit_log

        scene = Scene(config, self.fleet(config))
        results: asyncio.Queue[CheckResult | None] = asyncio.Queue()

        async def run() -> None:
            try:
                audit = functools.partial(audit_log, home=self.home)
                await run_checks(scene, skip=skip, on_result=results.put_nowait, audit=audit)
            finally:
                await scene.close()
                results.put_nowait(None)

        running = asyncio.create_task(run(), name="preflight")
        try:
            while (result := await results.get()) is not None:
                yield result
            await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

    def preflight_report(
        self, config: FlightConfig, results: Iterable[CheckResult], *, skip: Iterable[str] = ()
    ) -> PreflightReport:
        """The report on results that `preflight` has yielded. Raises InputError as it does."""
        from engine.preflight.checklist import check_names, overall

        ended = [result for result in results if result.status not in (CheckStatus.PENDING, CheckStatus.RUNNING)]
        return PreflightReport(
            checks=ended,
            overall_status=overall(ended),
            overridden=check_names([*config.preflight.skip, *skip]),
            finished_at=datetime.now(UTC),
        )

    async def sync(
        self, config: FlightConfig, *, dry_run: bool = False, heard: Callable[[str], None] = lambda _: None
    ) -> SyncReport:
        """Make the nodes' workdirs alike, by the user's script or by rsync, and prove it; `dry_run` compares only.
        `heard` is told each line on the way. Raises InputError, LaunchError."""
        from engine.preflight.mirroring import synchronise
        from engine.preflight.scene import Scene
        from engine.security.audit import audit_log

        scene = Scene(config, self.fleet(config))
        try:
            report = await synchronise(scene, self.home, dry_run=dry_run, heard=heard)
        finally:
            await scene.close()
        differing = [name for name, node in report.nodes.items() if not node.same]
        context = {"method": report.method, "dry_run": dry_run, "words": report.words, "differing": differing}
        audit_log("sync", "success" if report.synced else "failed", context, home=self.home)
        return report

    async def doctor(self) -> list[CheckResult]:
        """What this machine has and lacks for a run of its own."""
        from engine.preflight.machine import examine

        return await examine(self.home)

    async def launch(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> RunRecord:
        """Make the run, start its supervisor, and return once that has taken over (state planned or later).
        Preflight is the supervisor's first step. Raises InputError, StateError, LaunchError."""
        from engine.supervision import spawn

        directory = await asyncio.to_thread(self._prepare, config, tuple(skip))
        await asyncio.to_thread(spawn.start, directory)
        return await asyncio.to_thread(lambda: RunWatch(directory).poll().record)

    async def resume(self, run: str) -> RunRecord:
        """Take up a run that has ended, from the state that it saved; return once a supervisor has taken over. Raises
        RunNotFound, InputError, LaunchError, StateError."""
        from engine.security.audit import audit_log
        from engine.supervision.resumption import resume

        directory = await asyncio.to_thread(self.find, run)
        await asyncio.to_thread(resume, directory)
        audit_log("resume", "started", {"run": directory.id}, home=self.home)
        return await asyncio.to_thread(lambda: RunWatch(directory).poll().record)

    async def abort(self, run: str, *, now: bool = False) -> AsyncIterator[StopProgress]:
        """Ask the run's supervisor to stop it and follow until that is proved; `now` leaves out the cooperative
        stop. Ends at once, with no progress, when the run has ended. Idempotent. Raises RunNotFound, and LaunchError
        when no supervisor can be kept alive for it."""
        from engine.security.audit import audit_log
        from engine.supervision import spawn
        from engine.supervision.requests import ABORT, place_request

        directory = await asyncio.to_thread(self.find, run)
        watch = RunWatch(directory)
        snapshot = await asyncio.to_thread(watch.poll)
        if snapshot.record.state.ended:
            return
        await asyncio.to_thread(place_request, directory, ABORT, now=now, by="flightdeck")
        audit_log("abort", "asked", {"run": directory.id, "now": now}, home=self.home)
        told = StopProgress("asked", datetime.now(UTC))
        yield told
        # Given up by nobody but the caller: a stop that cannot be proved is retried by the supervisor.
        starts = 0
        while not snapshot.record.state.ended:
            if not snapshot.supervised:
                starts += 1
                if starts > _SUPERVISOR_STARTS:
                    raise LaunchError(
                        "no supervisor stays with the run", where=directory.id, todo=f"see {directory.supervisor_log}"
                    )
                # Another one may be faster than we are, and is as good.
                with contextlib.suppress(LaunchError):
                    await asyncio.to_thread(spawn.start, directory, adopt=True)
            await asyncio.sleep(_POLL_S)
            snapshot = await asyncio.to_thread(watch.poll)
            if snapshot.stop is not None and snapshot.stop != told:
                told = snapshot.stop
                yield told

    def _prepare(self, config: FlightConfig, skip: tuple[str, ...]) -> RunDir:
        """The run's directory with its plan, and its record in the store: the intent, before anything starts."""
        from engine.preflight.checklist import check_names
        from engine.runs.plan_file import Plan, write_plan
        from engine.security.audit import audit_log

        check_names([*config.preflight.skip, *skip])
        config, division = self._divided(config)
        created = datetime.now(UTC)
        directory = RunDir(self.home / "runs" / run_id(config.job.name, created))
        make_home(self.home)
        try:
            directory.path.parent.mkdir(mode=0o700, exist_ok=True)
            directory.path.mkdir(mode=0o700)
            directory.requests.mkdir(mode=0o700)
            plan = Plan.of(config, run_id=directory.id, created_at=created, skip=skip, division=division)
            write_plan(directory.plan, plan)
        except OSError as error:
            why = error.strerror or str(error)
            raise StateError("the run's directory cannot be made", where=str(directory.path), why=why) from error
        self._store().put_run(plan.record())
        overridden = list(plan.skip)
        context = {"run": directory.id, "ranks": len(plan.ranks), "overridden": overridden, "shares": division.source}
        audit_log("launch", "planned", context, home=self.home)
        return directory

    def _divided(self, config: FlightConfig) -> tuple[FlightConfig, Division]:
        """The shares that the newest calibration gives, and the configuration without the nodes that it leaves out.
        Raises InputError when none is left, StateError."""
        from engine.config.subset import only
        from engine.measured import Division

        found = self.outlook(config, self.last_calibration(config))
        shares, told = found.shares, found.prediction
        division = Division(
            source=shares.source,
            reason=shares.reason,
            parts=dict(shares.parts),
            left_out=shares.left_out,
            warnings=shares.warnings,
            examples_per_s=told.examples_per_s,
            tokens_per_s=told.tokens_per_s,
            compute_s=dict(told.compute_s),
            speed_up=told.speed_up,
            efficiency=told.efficiency,
            why_not=told.why_not,
        )
        return (only(config, shares.parts) if shares.left_out else config), division

    def _store(self) -> Store:
        from engine.store.store import Store

        return Store(self.home)

    def _stored(self) -> list[RunRecord]:
        """The store's records, newest first, and those of run directories that it does not know."""
        store = self._store()
        records = {record.id: record for record in store.runs()}
        known = len(records)
        for directory in self._directories():
            if directory.id not in records and directory.plan.exists():
                with contextlib.suppress(StateError):
                    records[directory.id] = RunWatch(directory).poll().record
        if store.notices and len(records) > known:
            # What was lost from the state is in the runs' own journals.
            store.rebuild(records.values())
        self.notices += [notice for notice in store.notices if notice not in self.notices]
        return sorted(records.values(), key=lambda record: (record.created_at, record.id), reverse=True)

    def _directories(self) -> list[RunDir]:
        try:
            return [RunDir(path) for path in (self.home / "runs").iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _directory(self, run: str) -> RunDir:
        return RunDir(self.home / "runs" / run)

    def _live(self, record: RunRecord) -> RunRecord:
        """The journal is the truth: the store's record only knows the last change of state."""
        try:
            watch = self._watches.setdefault(record.id, RunWatch(self._directory(record.id)))
        except StateError:
            return record
        live = watch.poll().record
        if live.state.ended:
            self._watches.pop(record.id, None)
        return live


def _node(config: FlightConfig, name: str) -> NodeConfig:
    found = next((node for node in config.nodes if node.name == name), None)
    if found is None:
        raise InputError(f"no node {name!r}", todo=f"nodes: {', '.join(node.name for node in config.nodes)}")
    return found


def run_id(name: str, created: datetime) -> str:
    """`YYYYmmdd-HHMMSS-<name>-<4 hex>`, UTC. Raises InputError for a name that could be anything but a name."""
    from engine.security.identifiers import validate_identifier

    validate_identifier(name, "job name")
    return f"{created:%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"


def _diagnose(directory: RunDir) -> Diagnosis | None:
    from engine.runs.diagnosis import diagnose

    return diagnose(directory)
