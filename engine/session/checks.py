"""Checks: the preflight without a launch, and the nodes' workdirs made alike."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import UTC, datetime

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus, PreflightReport, SyncReport
from engine.session.calibrations import Calibrations


class Checks(Calibrations):
    """Of a configuration's nodes, before anything is launched on them."""

    def checks_not_yet(self) -> dict[str, str]:
        """Checks of the design that this release does not have → what they would look at."""
        from engine.preflight.registry import NOT_YET

        return dict(NOT_YET)

    async def preflight(self, config: FlightConfig, *, skip: Iterable[str] = ()) -> AsyncIterator[CheckResult]:
        """Run the checks that a launch would run, on the nodes that it would take; each is yielded as RUNNING and again
        when it ends. Closing the iterator ends them. Raises InputError when a name in `skip` is no check, or no node
        would be left, and StateError."""
        from engine.preflight.checklist import run_checks
        from engine.preflight.scene import Scene
        from engine.security.audit import audit_log

        taken, division, calibration = await asyncio.to_thread(self._divided, config)
        scene = Scene(taken, self.fleet(config), division=division, calibration=calibration)
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
