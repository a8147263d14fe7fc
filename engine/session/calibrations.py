"""Calibrations: taken, kept, and what the newest one means for a launch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from engine.config.models import FlightConfig
from engine.errors import InputError, NodesInUse, StateError
from engine.security.home import make_home
from engine.session.nodes import Nodes
from engine.session.runs import Runs

if TYPE_CHECKING:
    from engine.measured import Calibration, CalibrationProgress, Division
    from engine.planning.outlook import Outlook


class Calibrations(Nodes, Runs):
    """Of a configuration's job on its nodes."""

    async def calibrate(
        self, config: FlightConfig, *, quick: bool = False
    ) -> AsyncIterator[CalibrationProgress | Calibration]:
        """Measure the job's step on every node and the links between them: how far it has come, and at last the
        calibration, kept when every node was measured. Closing the iterator ends it on the nodes. Raises NodesInUse
        while a run or another calibration is going on there, StateError, and the first node's error when none can be
        reached."""
        from engine.runs.occupancy import alone

        make_home(self.home)
        with alone(self.home, [node.ssh for node in config.nodes], f"a calibration of {config.job.name}"):
            await asyncio.to_thread(self._check_idle, config)
            async with contextlib.aclosing(self._measuring(config, quick=quick)) as steps:
                async for step in steps:
                    yield step

    async def _measuring(
        self, config: FlightConfig, *, quick: bool
    ) -> AsyncGenerator[CalibrationProgress | Calibration, None]:
        """The calibration itself, on nodes that are this machine's alone."""
        from engine.calibration.calibrate import calibrate, complete
        from engine.preflight.scene import Scene

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

    def _divided(self, config: FlightConfig) -> tuple[FlightConfig, Division, Calibration | None]:
        """The configuration without the nodes that the newest calibration leaves out, the shares that it gives, and
        itself. Raises InputError when no node is left, StateError."""
        from engine.config.subset import only
        from engine.planning.outlook import division_of

        calibration = self.last_calibration(config)
        found = self.outlook(config, calibration)
        kept = only(config, found.shares.parts) if found.shares.left_out else config
        return kept, division_of(found), calibration

    def _check_idle(self, config: FlightConfig) -> None:
        """Raises NodesInUse when a run on one of the nodes' machines has not ended: both would be slowed down."""
        from engine.runs.occupancy import machine
        from engine.runs.plan_file import read_plan

        machines = {machine(node.ssh) for node in config.nodes}
        for record in self.runs():
            if not record.state.ended:
                with contextlib.suppress(StateError):
                    ranks = read_plan(self._directory(record.id).plan).ranks
                    used = [rank.host for rank in ranks if machine(rank.host) in machines]
                    if used:
                        raise NodesInUse(
                            f"run {record.id} is going on there",
                            where=used[0],
                            todo=f"wait for its end, or `flightdeck abort {record.id}`",
                        )
