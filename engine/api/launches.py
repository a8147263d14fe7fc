"""Plan, launch and resume: what would be launched and why; a run's directory with its plan, and a supervisor for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.api.calibrations import CalibrationsApi
from engine.api.runs import RunsApi
from engine.api.session import Session
from engine.checks.context import CheckContext
from engine.checks.obstacles import data_options
from engine.checks.plan_inputs import capacity_inputs, read_model
from engine.checks.ports import check_address
from engine.checks.runner import make_training_plan, validate_skip
from engine.cluster.agent_client import THIS_MACHINE
from engine.cluster.host_locks import shared_hosts
from engine.cluster.probe_results import InputsReport
from engine.config.edit import changed_keys, with_settings, write_settings
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, JobConfig, select_nodes
from engine.config.overrides import Settings
from engine.errors import InputError, InputsChanged, StateError
from engine.models import NodeFacts, RunRecord
from engine.plan.capacity import CapacityReport, capacities
from engine.plan.document import TrainingPlan
from engine.protocol.checksums import BASE_MODEL
from engine.run.events import TrainingStarted
from engine.run.journal import read_history
from engine.run.run_plan import RunPlan, read_plan, write_plan
from engine.run.supervisor_process import resume_run, start_supervisor
from engine.security.audit import audit_log
from engine.security.identifiers import validate_identifier
from engine.security.paths import make_home
from engine.store.layout import RunDir

_CHECKSUMS_S = 300.0
"""For those of the data: they are read whole."""


class LaunchesApi:
    """Plans and starts runs, their batch divided by the newest calibration."""

    def __init__(self, session: Session, runs: RunsApi, calibrations: CalibrationsApi) -> None:
        self._session = session
        self._runs = runs
        self._calibrations = calibrations

    async def plan(self, config: Config, *, facts: Sequence[NodeFacts] | None = None) -> TrainingPlan:
        """Plan the configuration's job. Without `facts` the nodes are probed. For a node that does not answer its last
        facts are used."""
        async with CheckContext(config, self._session.fleet) as context:
            seen = list(facts) if facts is not None else list((await context.facts()).values())
            plan = await make_training_plan(context, seen)
        # A state that cannot be written is no reason to withhold the plan.
        with contextlib.suppress(StateError):
            await asyncio.to_thread(self._session.store.put_facts, config.cluster.name, seen)
        return plan

    async def plans(self, configs: Sequence[Config]) -> list[TrainingPlan]:
        """Plan jobs on the same nodes, which are probed once."""
        async with CheckContext(configs[0], self._session.fleet) as context:
            facts = list((await context.facts()).values())
        return [await self.plan(config, facts=facts) for config in configs]

    async def model(self, config: Config) -> dict[str, Any] | None:
        """config.json of the job's model, from the first node that has it; None where none told it."""
        async with CheckContext(config, self._session.fleet) as context:
            return (await read_model(context, config.nodes))[0]

    async def check_address(self, config: Config, host: str, port: int) -> None:
        """Raises InputError where a server on the first node cannot listen there, as far as that can be asked."""
        async with CheckContext(config, self._session.fleet) as context:
            await check_address(context, host, port)

    async def capacities(
        self, config: Config | None, model: str | None, mac_bytes: int | None, *, longest: bool, largest_batch: bool
    ) -> CapacityReport:
        """The longest sequences and the largest batches that fit: the job's on its nodes, or without a configuration
        mlx-lm's defaults on this machine; `model` as `read_configuration` takes it in place of the job's, a Mac with
        `mac_bytes` of memory in place of the nodes. Raises InputError."""
        job = JobConfig(name="capacity", mlx_lm=with_defaults({}))
        config = config or Config(cluster=ClusterConfig(name="capacity"), nodes=(THIS_MACHINE,), job=job)
        async with CheckContext(config, self._session.fleet) as context:
            inputs = await capacity_inputs(context, model, mac_bytes)
        return await asyncio.to_thread(capacities, inputs, longest=longest, largest_batch=largest_batch)

    def apply_plan(self, config: Config, plan: TrainingPlan) -> tuple[list[str], Path]:
        """Write the plan's suggested batch, learning rate and warm-up into the configuration's file: the lines of
        [job], and the file in which the former text is kept. Blocking. Raises InputError where there is no suggestion,
        StateError."""
        suggested = plan.batch_configuration.suggested
        if suggested is None or config.file is None:
            why = config.job.kind.own_model or "no batch fits every node"
            raise InputError("there is nothing to apply", why=why)
        kept = write_settings(config, tomllib.loads(suggested.job_keys), backup=True)
        assert kept is not None
        return suggested.job_keys.splitlines(), kept

    def write_settings(self, config: Config, changes: Settings) -> None:
        """Into [job] of the configuration's file. Blocking. Raises InputError, ConfigError, StateError."""
        write_settings(config, changes)

    async def launch(
        self, config: Config, *, skip: Iterable[str] | Mapping[str, str] = (), budget_s: float | None = None
    ) -> RunRecord:
        """Make the run, start its supervisor, and return once that is in charge (state planned or later). `skip`:
        checks, perhaps with a person's reasons for the audit log; `budget_s` as in RunPlan. Preflight is the
        supervisor's first step. Raises InputError, StateError, LaunchError, and NodesInUse while a calibration uses
        them."""
        directory = await asyncio.to_thread(self.make, config, tuple(skip), budget_s=budget_s)
        if isinstance(skip, Mapping) and skip:
            audit_log("launch", "skips", {"run": directory.id, "why": dict(skip)}, home=self._session.home)
        await asyncio.to_thread(start_supervisor, directory)
        return await asyncio.to_thread(self._runs.record, directory.id)

    async def resume(self, run: str, **wishes: bool) -> RunRecord:
        """Resume a run that has ended from the state that it saved, with the `wishes` of RunReopened; return once a
        supervisor is in charge. A budget begins anew. Raises RunNotFound, InputError, LaunchError, StateError, and
        NodesInUse while a calibration is going on there."""
        directory = await asyncio.to_thread(self._runs.find_trained, run)
        await asyncio.to_thread(self._resume, directory, **wishes)
        audit_log("resume", "started", {"run": directory.id, **wishes}, home=self._session.home)
        return await asyncio.to_thread(self._runs.record, directory.id)

    def configuration(self, run: str) -> Config:
        """That of a run, as it was launched first. Raises RunNotFound, InputError, StateError."""
        return read_plan(self._runs.find_trained(run).plan).config

    def differences(self, run: str, config: Config) -> list[str]:
        """The keys with another value than a run was launched with; nodes that its calibration left out do not count.
        Raises as `configuration`."""
        plan = read_plan(self._runs.find_trained(run).plan)
        left_out = plan.division.left_out if plan.division is not None else ()
        kept = [node.name for node in config.nodes if node.name not in left_out]
        return changed_keys(plan.config, select_nodes(config, kept) if left_out else config)

    async def repeat(self, run: str, settings: Settings, *, accept_changed: bool = False) -> RunRecord:
        """Launch the configuration of a run that has ended again, with other settings where some are given; else also
        with what was decided for it, and its shares. Raises InputsChanged where its data, base model or packages are
        others by now, unless they are accepted; RunNotFound, ConfigError, and as `launch`."""
        directory = await asyncio.to_thread(self._runs.find_trained, run)
        plan, history = await asyncio.to_thread(lambda: (read_plan(directory.plan), read_history(directory)))
        if not history.record.state.ended:
            why = f"it is {history.record.state}"
            raise InputError(f"{directory.id} has not ended", why=why, todo="wait for its end, or abort it")
        config = with_settings(plan.config, settings, "--set") if settings else history.plan_on(plan, ()).config
        if history.training is not None and (changed := await self._changed(config, history.training)):
            if not accept_changed:
                todo = f"put them back, or go on all the same: flightdeck repeat {directory.id} --accept-changed"
                raise InputsChanged(f"{directory.id} cannot be repeated as it was", why="; ".join(changed), todo=todo)
            audit_log("repeat", "changed", {"run": directory.id, "changed": changed}, home=self._session.home)
        same = plan if not settings else None
        repeated = await asyncio.to_thread(
            self.make, config, plan.skip, repeats=directory.id, same=same, budget_s=plan.budget_s
        )
        await asyncio.to_thread(start_supervisor, repeated)
        return await asyncio.to_thread(self._runs.record, repeated.id)

    async def _changed(self, config: Config, training: TrainingStarted) -> list[str]:
        """The inputs and versions that differ on rank 0's node from those that a run began with."""
        node = config.nodes[0]
        files = [name for name in training.inputs if name != BASE_MODEL]
        packages = [name for name in training.versions if name != "python"]
        paths = {"data": node.data, "model": node.model}
        request = {**paths, "options": data_options(config), "files": files, "packages": packages}
        async with CheckContext(config, self._session.fleet) as context:
            now = await context.probe(
                node, "inputs", json.dumps(request), result_type=InputsReport, timeout_s=_CHECKSUMS_S
            )
        then = {**training.inputs, **training.versions}
        present = {**now.inputs, **now.versions}
        return [
            f"{name}: {value} then, {present.get(name, 'none')} now"
            for name, value in then.items()
            if present.get(name) != value
        ]

    def _resume(self, directory: RunDir, **wishes: bool) -> None:
        plan = read_plan(directory.plan).without(read_history(directory).record.excluded)
        with shared_hosts(self._session.home, [node.ssh for node in plan.config.nodes]):
            resume_run(directory, **wishes)

    def make(self, config: Config, skip: tuple[str, ...], *, same: RunPlan | None = None, **wishes: Any) -> RunDir:
        """The run's directory with its plan, and its record in the store: the intent, before anything starts. With the
        shares of the plan that is the `same`. `wishes`: fields of RunPlan; of a run whose `run_id` is given, what a
        killed process has left of its directory is used. Raises as `launch` does."""
        skip = tuple(validate_skip([*config.preflight.skip, *skip]))
        make_home(self._session.home)
        # A calibration under way keeps the launch out; a later one sees the run in the store.
        with shared_hosts(self._session.home, [node.ssh for node in config.nodes]):
            if same is not None and same.division is not None:
                division, calibration = same.division, same.calibration
            else:
                config, division, calibration = self._calibrations.divide(config)
            created = datetime.now(UTC)
            directory = self._runs.directory(wishes.get("run_id") or run_id(config.job.name, created))
            plan = RunPlan(
                nonce=secrets.token_hex(16),
                created_at=created,
                config=config,
                skip=skip,
                division=division,
                calibration=calibration,
                **{**wishes, "run_id": directory.id},
            )
            try:
                directory.path.parent.mkdir(mode=0o700, exist_ok=True)
                directory.path.mkdir(mode=0o700, exist_ok="run_id" in wishes)
                directory.requests.mkdir(mode=0o700, exist_ok=True)
                write_plan(directory.plan, plan)
            except OSError as error:
                raise StateError("the run's directory cannot be made", where=str(directory.path), why=error) from error
            self._session.store.put_run(plan.record())
        overridden, ranks = list(plan.skip), len(plan.nodes)
        context = {"run": directory.id, "ranks": ranks, "overridden": overridden, "shares": division.source}
        audit_log("launch", "planned", context, home=self._session.home)
        return directory


def run_id(name: str, created: datetime) -> str:
    """`YYYYmmdd-HHMMSS-<name>-<4 hex>`, UTC. Raises InputError for a name that could be anything but a name."""
    validate_identifier(name, "job name")
    return f"{created:%Y%m%d-%H%M%S}-{name}-{secrets.token_hex(2)}"
