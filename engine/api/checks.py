"""Checks without a launch: preflight, this machine's own state, and the sync of the nodes' workdirs."""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from engine.api.calibrations import CalibrationsApi
from engine.api.session import Session, stream
from engine.checks.check import worst
from engine.checks.context import CheckContext
from engine.checks.dataset import DataInspection, copy_data, inspect_data
from engine.checks.doctor import examine_machine
from engine.checks.rsync import sync_workdirs
from engine.checks.runner import run_checks, validate_skip
from engine.config.draft import answer_form, data_and_subset
from engine.config.mlx_lm_keys import with_defaults
from engine.config.models import ClusterConfig, Config, DataConfig, JobConfig, NodeConfig
from engine.errors import InputError
from engine.models import CheckResult, CheckStatus, PreflightReport, SyncReport
from engine.notify.channels import send_to_all
from engine.protocol.manifest import DATA_PREFIX
from engine.security.audit import audit_log
from engine.security.identifiers import safe_repr
from engine.snapshots import ChannelAnswer, Notification


class ChecksApi:
    def __init__(self, session: Session, calibrations: CalibrationsApi) -> None:
        self._session = session
        self._calibrations = calibrations

    def preflight(self, config: Config, *, skip: Iterable[str] = ()) -> AsyncGenerator[CheckResult, None]:
        """Run the checks that a launch would run, on the nodes that it would use; each is yielded as RUNNING and again
        when it ends. Closing the iterator ends them. Raises InputError for a name in `skip` that is no check or when
        no node would be left, and StateError."""
        fleet, audit = self._session.fleet, functools.partial(audit_log, home=self._session.home)

        async def work(report: Callable[[CheckResult], None]) -> None:
            used, division, calibration = await asyncio.to_thread(self._calibrations.divide, config)
            async with CheckContext(used, fleet, division=division, calibration=calibration) as context:
                await run_checks(context, skip=skip, on_result=report, audit=audit)

        return stream(work, name="preflight")

    def report(self, config: Config, results: Iterable[CheckResult], *, skip: Iterable[str] = ()) -> PreflightReport:
        """The report on results of `preflight`. Raises InputError as it does."""
        ended = [result for result in results if result.status not in (CheckStatus.PENDING, CheckStatus.RUNNING)]
        return PreflightReport(
            checks=ended,
            overall_status=worst(result.status for result in ended),
            overridden=validate_skip([*config.preflight.skip, *skip]),
        )

    def data_config(self, data: str, model: Path | None = None) -> Config:
        """For a path on this machine, or "hf:org/set SUBSET" as its cache has it, with mlx-lm's defaults, without a
        configuration file. Raises InputError for a name or subset of another form."""
        chosen = str(model.absolute()) if model is not None else None
        name, subset = data_and_subset(data)
        if name.startswith(DATA_PREFIX) and (accepted := answer_form("data", data)):
            raise InputError(f"{safe_repr(data)} is not a data set", todo=f"give {accepted}")
        path = name if name.startswith(DATA_PREFIX) else str(Path(name).expanduser().absolute())
        node = NodeConfig(name="here", python=sys.executable, workdir=str(Path.cwd()), data=path)
        job = JobConfig(name="data", data=path, model=chosen, mlx_lm=with_defaults({}))
        return Config(cluster=ClusterConfig(), nodes=(node,), job=job, data=DataConfig(subset=subset))

    async def data(self, config: Config, *, shown: int, folder: Path | None = None) -> DataInspection:
        """A job's data as its first node reads it, with `shown` rows; its files are copied to `folder`. Raises
        InputError, LaunchError, NodeUnreachable, FileDiffers."""
        async with CheckContext(config, self._session.fleet) as context:
            inspection = await inspect_data(context, shown)
            if folder is not None and not inspection.faults:
                await copy_data(context, inspection, folder)
            return inspection

    def notifications(self, config: Config) -> list[ChannelAnswer]:
        """Send a test by each channel of [notify] (up to 45 s; blocking). Raises InputError where there is none."""
        if not config.notify.active:
            todo = 'add desktop = true, terminal = true, command = […], webhooks = […] or apprise = ["env:NAME"]'
            raise InputError("[notify] has no channel", where=str(config.file), todo=todo)
        return send_to_all(config, Notification("end", "a test of flightdeck", f"from {socket.gethostname()}"))

    async def doctor(self) -> list[CheckResult]:
        """Check this machine for a run of its own."""
        return await examine_machine(self._session.home)

    async def sync(
        self, config: Config, *, dry_run: bool = False, on_line: Callable[[str], None] = lambda _: None
    ) -> SyncReport:
        """Make the nodes' workdirs alike, by the user's script or by rsync, and prove it; `dry_run` compares only.
        `on_line` receives each line of output. Raises InputError, LaunchError."""
        async with CheckContext(config, self._session.fleet) as context:
            report = await sync_workdirs(context, self._session.home, dry_run=dry_run, on_line=on_line)
        differing = [name for name, node in report.nodes.items() if not node.same]
        details = {"method": report.method, "dry_run": dry_run, "message": report.message, "differing": differing}
        audit_log("sync", "success" if report.synced else "failed", details, home=self._session.home)
        return report
