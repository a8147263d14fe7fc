"""Calibrations: measured, stored, and what the newest one means for a launch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime

from engine.api.nodes import NodesApi
from engine.api.runs import RunsApi
from engine.api.session import Session, stream
from engine.calibration.calibrate import calibrate, is_complete
from engine.calibration.group import is_worth_keeping, measure_scaling, new_scaling
from engine.checks.context import CheckContext
from engine.cluster.host_locks import exclusive_hosts, host_key
from engine.config.models import Config, select_nodes
from engine.errors import InputError, NodesInUse, StateError
from engine.measurements import Calibration, CalibrationProgress, Division, Scaling
from engine.plan.fingerprint import latest_matching, scaling_fingerprint
from engine.plan.prediction import Prediction, division_of, predict
from engine.run.run_plan import read_plan
from engine.security.paths import make_home


class CalibrationsApi:
    def __init__(self, session: Session, nodes: NodesApi, runs: RunsApi) -> None:
        self._session = session
        self._nodes = nodes
        self._runs = runs

    def measure(
        self, config: Config, *, quick: bool = False
    ) -> AsyncGenerator[CalibrationProgress | Calibration, None]:
        """Measure the job's step on every node and the links between them: progress, and at last the calibration,
        stored when every node was measured. Closing the iterator ends it on the nodes. Raises NodesInUse while a run
        or another calibration uses them, StateError, and the first node's error when none can be reached."""
        if (unmeasured := config.job.kind.framework.unmeasured) is not None:
            todo = "`flightdeck calibrate --scaling` times its steps over 1, 2, ... ranks"
            raise InputError("the job cannot be calibrated", why=unmeasured, todo=todo)
        session, hosts = self._session, [node.ssh for node in config.nodes]

        async def work(report: Callable[[CalibrationProgress | Calibration], None]) -> None:
            make_home(session.home)
            with exclusive_hosts(session.home, hosts, f"a calibration of {config.job.name}"):
                await asyncio.to_thread(self.check_idle, config)
                before = await asyncio.to_thread(self._nodes.last_facts, config)
                async with CheckContext(config, session.fleet) as context:
                    taken = await calibrate(context, quick=quick, before=before, on_progress=report)
                    if is_complete(taken):
                        facts = (await context.facts()).values()
                        await asyncio.to_thread(session.store.put_facts, config.cluster.name, facts)
                        await asyncio.to_thread(session.store.put_calibration, taken)
                report(taken)

        return stream(work, name="calibration")

    def measure_scaling(
        self, config: Config, *, quick: bool = False, per_rank_batch: bool = False
    ) -> AsyncGenerator[CalibrationProgress | Scaling, None]:
        """Run the job's real steps over 1, 2, … of its ranks: progress, and after each number of ranks the scaling so
        far, with `per_rank_batch` at each rank's part of the batch (weak scaling). The last is stored, and when the
        iterator is closed before, which ends it on the nodes, the one so far where it tells of two numbers of ranks.
        Raises as `measure` does, and InputError for a job with a command of its own."""
        session, hosts = self._session, [node.ssh for node in config.nodes]
        newest: Scaling | None = None

        async def work(report: Callable[[CalibrationProgress | Scaling], None]) -> None:
            def keep(step: CalibrationProgress | Scaling) -> None:
                nonlocal newest
                newest = step if isinstance(step, Scaling) else newest
                report(step)

            make_home(session.home)
            with exclusive_hosts(session.home, hosts, f"a calibration of {config.job.name}"):
                await asyncio.to_thread(self.check_idle, config)
                kept, division, _ = await asyncio.to_thread(self.divide, config)
                async with CheckContext(kept, session.fleet) as context:
                    facts = (await context.facts()).values()
                    await asyncio.to_thread(session.store.put_facts, config.cluster.name, facts)
                    stored = await asyncio.to_thread(self._nodes.last_facts, config)
                    fresh = new_scaling(
                        kept, scaling_fingerprint(config, stored), quick=quick, per_rank_batch=per_rank_batch
                    )
                    try:
                        await measure_scaling(context, fresh, shares=division.parts, report=keep)
                    finally:
                        if newest is not None and is_worth_keeping(newest):
                            await asyncio.to_thread(session.store.put_scaling, newest)

        return stream(work, name="scaling")

    def latest_scaling(self, config: Config) -> Scaling | None:
        """The newest scaling of this job on these nodes as last probed, however old. Raises StateError."""
        facts, store = self._nodes.last_facts(config), self._session.store
        scaling = latest_matching(config, facts, store.scalings(config.cluster.name))
        self._session.report_damage(store)
        return scaling

    def latest(self, config: Config) -> Calibration | None:
        """The newest calibration of this job on these nodes as last probed, however old: see `taken_at`.
        Raises StateError."""
        facts, store = self._nodes.last_facts(config), self._session.store
        calibration = latest_matching(config, facts, store.calibrations(config.cluster.name))
        self._session.report_damage(store)
        return calibration

    def predict(self, config: Config, calibration: Calibration | None) -> Prediction:
        """The next launch as the `latest` calibration predicts it. Raises InputError when by it no node has any
        throughput."""
        try:
            return predict(config, calibration, datetime.now(UTC))
        except ValueError as error:
            raise InputError("nothing can be shared out", why=str(error), todo="flightdeck calibrate again") from error

    def divide(self, config: Config) -> tuple[Config, Division, Calibration | None]:
        """The configuration without the nodes that the newest calibration leaves out, the division of the batch, and
        that calibration. Raises InputError when no node is left, StateError."""
        calibration = self.latest(config)
        prediction = self.predict(config, calibration)
        kept = select_nodes(config, prediction.shares.parts) if prediction.shares.left_out else config
        return kept, division_of(prediction), calibration

    def check_idle(self, config: Config) -> None:
        """Raises NodesInUse while a run on one of the nodes' machines has not ended: each would slow the other."""
        machines = {host_key(node.ssh) for node in config.nodes}
        for record in self._runs.all():
            if not record.state.ended:
                with contextlib.suppress(StateError):
                    plan = read_plan(self._runs.directory(record.id).plan).without(record.excluded)
                    used = [node.ssh for node in plan.config.nodes if host_key(node.ssh) in machines]
                    if used:
                        raise NodesInUse(
                            f"run {record.id} is going on there",
                            where=used[0],
                            todo=f"wait for its end, or `flightdeck abort {record.id}`",
                        )
