"""Launches, aborts and what takes a run up again: what is between them is its supervisor's."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime

from engine.config.models import FlightConfig
from engine.errors import LaunchError, StateError
from engine.events import StopProgress
from engine.models import RunRecord
from engine.runs.layout import RunDir
from engine.runs.watch import RunWatch
from engine.security.home import make_home
from engine.session.calibrations import Calibrations

_POLL_S = 0.05
_SUPERVISOR_STARTS = 3
"""How often an abort gives a run another supervisor before it says that this does not help."""


class Launches(Calibrations):
    """Of runs, whose batch the newest calibration divides."""

    async def launch(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> RunRecord:
        """Make the run, start its supervisor, and return once that has taken over (state planned or later).
        Preflight is the supervisor's first step. Raises InputError, StateError, LaunchError, and NodesInUse while a
        calibration is going on there."""
        from engine.supervision import spawn

        directory = await asyncio.to_thread(self._prepare, config, tuple(skip))
        await asyncio.to_thread(spawn.start, directory)
        return await asyncio.to_thread(lambda: RunWatch(directory).poll().record)

    async def resume(self, run: str) -> RunRecord:
        """Take up a run that has ended, from the state that it saved; return once a supervisor has taken over. Raises
        RunNotFound, InputError, LaunchError, StateError, and NodesInUse while a calibration is going on there."""
        from engine.security.audit import audit_log

        directory = await asyncio.to_thread(self.find, run)
        await asyncio.to_thread(self._take_up, directory)
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

    def _take_up(self, directory: RunDir) -> None:
        from engine.runs.occupancy import together
        from engine.runs.plan_file import read_plan
        from engine.supervision.resumption import resume

        with together(self.home, [node.ssh for node in read_plan(directory.plan).config.nodes]):
            resume(directory)

    def _prepare(self, config: FlightConfig, skip: tuple[str, ...]) -> RunDir:
        """The run's directory with its plan, and its record in the store: the intent, before anything starts."""
        from engine.preflight.checklist import check_names
        from engine.runs.occupancy import together

        check_names([*config.preflight.skip, *skip])
        make_home(self.home)
        # A calibration that is going on keeps the launch out, one that comes later sees the run in the store.
        with together(self.home, [node.ssh for node in config.nodes]):
            return self._make(config, skip)

    def _make(self, config: FlightConfig, skip: tuple[str, ...]) -> RunDir:
        from engine.runs.plan_file import Plan, write_plan
        from engine.security.audit import audit_log

        config, division, calibration = self._divided(config)
        created = datetime.now(UTC)
        directory = RunDir(self.home / "runs" / run_id(config.job.name, created))
        try:
            directory.path.parent.mkdir(mode=0o700, exist_ok=True)
            directory.path.mkdir(mode=0o700)
            directory.requests.mkdir(mode=0o700)
            plan = Plan.of(
                config,
                run_id=directory.id,
                created_at=created,
                skip=skip,
                division=division,
                calibration=calibration,
            )
            write_plan(directory.plan, plan)
        except OSError as error:
            why = error.strerror or str(error)
            raise StateError("the run's directory cannot be made", where=str(directory.path), why=why) from error
        self._store().put_run(plan.record())
        overridden = list(plan.skip)
        context = {"run": directory.id, "ranks": len(plan.ranks), "overridden": overridden, "shares": division.source}
        audit_log("launch", "planned", context, home=self.home)
        return directory


def run_id(name: str, created: datetime) -> str:
    """`YYYYmmdd-HHMMSS-<name>-<4 hex>`, UTC. Raises InputError for a name that could be anything but a name."""
    from engine.security.identifiers import validate_identifier

    validate_identifier(name, "job name")
    return f"{created:%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
