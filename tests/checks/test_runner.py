"""The runner: all at once, in time, cancellable, and never a silent pass."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from engine.checks.check import Check, verdict
from engine.checks.context import CheckContext
from engine.checks.runner import CHECKS, run_checks, validate_skip
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.config.models import Config
from engine.errors import InputError
from engine.models import CheckResult, CheckStatus
from engine.node.processes import start_time
from engine.security.paths import state_home


async def passes(_: CheckContext) -> CheckResult:
    return verdict("a", CheckStatus.PASS, "fine")


async def fails(_: CheckContext) -> CheckResult:
    return verdict("a", CheckStatus.FAIL, "not fine")


async def breaks(_: CheckContext) -> CheckResult:
    raise RuntimeError("a bug")


async def hangs(_: CheckContext) -> CheckResult:
    await asyncio.Event().wait()
    raise AssertionError


def context(config: Config) -> CheckContext:
    """With connections to nothing but this machine; to be closed where a check looks at a node."""
    return CheckContext(config, Fleet(state_home()))


def nobody(event: str, status: str, context: dict[str, object]) -> None:
    """An audit log that is looked at by another test."""


def registry(*checks: Check) -> dict[str, Check]:
    return {check.name: check for check in checks}


async def outcome(config: Config, *checks: Check, skip: tuple[str, ...] = ()) -> dict[str, CheckResult]:
    looked_at = context(config)
    try:
        report = await run_checks(
            looked_at, skip=skip, on_result=lambda _: None, checks=registry(*checks), audit=nobody
        )
    finally:
        await looked_at.close()
    return {result.name: result for result in report.checks}


async def test_every_check_is_reported_as_running_and_again_when_it_ends(config: Config) -> None:
    reported: list[tuple[str, CheckStatus]] = []
    check = Check("a", "", passes, 5)
    report = await run_checks(
        context(config),
        on_result=lambda result: reported.append((result.name, result.status)),
        checks=registry(check),
        audit=nobody,
    )
    assert reported == [("a", CheckStatus.RUNNING), ("a", CheckStatus.PASS)]
    assert report.overall_status is CheckStatus.PASS
    assert report.checks[0].duration_s is not None


async def test_one_failure_fails_the_preflight_and_stops_only_what_needs_it(config: Config) -> None:
    found = await outcome(
        config, Check("a", "", fails, 5), Check("b", "", passes, 5, needs=("a",)), Check("c", "", passes, 5)
    )
    assert found["b"].status is CheckStatus.SKIP
    assert found["b"].summary == "not run: a failed"
    assert found["c"].status is CheckStatus.PASS


async def test_a_check_that_breaks_is_a_failure_and_not_a_crash(config: Config) -> None:
    found = await outcome(config, Check("a", "", breaks, 5), Check("b", "", passes, 5))
    assert (found["a"].status, found["b"].status) == (CheckStatus.FAIL, CheckStatus.PASS)
    assert "a bug" in found["a"].summary


async def test_a_late_check_is_a_failure(config: Config) -> None:
    found = await outcome(config, Check("a", "", hangs, 0.05))
    assert (found["a"].status, "no answer" in found["a"].summary) == (CheckStatus.FAIL, True)


async def test_an_override_by_name_is_a_skip_with_its_reason_and_lets_others_run(config: Config) -> None:
    audited: list[tuple[str, str, dict[str, object]]] = []
    checks = registry(Check("a", "", fails, 5), Check("b", "", passes, 5, needs=("a",)))
    report = await run_checks(
        context(config),
        skip=["a"],
        on_result=lambda _: None,
        checks=checks,
        audit=lambda event, status, context: audited.append((event, status, context)),
    )
    assert [result.status for result in report.checks] == [CheckStatus.SKIP, CheckStatus.PASS]
    assert report.checks[0].summary == "overridden"
    assert (report.overall_status, report.overridden) == (CheckStatus.PASS, ["a"])
    assert audited == [("preflight_override", "overridden", {"check": "a"})]


async def test_a_job_with_a_command_skips_model_and_data_with_a_reason(config: Config) -> None:
    job = config.job.model_copy(update={"command": ("python", "-c", "pass")})
    chosen = [CHECKS[name] for name in ("model_present", "data_matches", "program_present")]
    chosen = [replace(check, needs=()) for check in chosen]
    found = await outcome(config.model_copy(update={"job": job}), *chosen)
    assert [found[check.name].status for check in chosen] == [CheckStatus.SKIP, CheckStatus.SKIP, CheckStatus.PASS]
    assert "a command of its own" in found["data_matches"].summary


def test_a_name_that_is_no_check_is_refused() -> None:
    with pytest.raises(InputError, match="no such check"):
        validate_skip(["speling"])


@pytest.mark.usefixtures("quick_end")
async def test_cancelling_ends_the_processes_that_a_check_started(tmp_path: Path, config: Config) -> None:
    pid_file = tmp_path / "pid"
    # A child of the child too: the whole group must go.
    script = (
        f"import os, time; open({str(pid_file)!r} + str(os.fork() == 0), 'w').write(str(os.getpid())); time.sleep(600)"
    )

    async def spawns(_: CheckContext) -> CheckResult:
        await LocalTransport().run([sys.executable, "-c", script], timeout_s=600)
        return verdict("a", CheckStatus.PASS, "")

    task = asyncio.create_task(outcome(config, Check("a", "", spawns, 600)))
    files = [Path(f"{pid_file}{child}") for child in (True, False)]
    while not all(file.exists() and file.read_text() for file in files):
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [start_time(int(file.read_text())) for file in files] == [None, None]


@pytest.mark.usefixtures("quick_end")
async def test_a_program_over_its_time_limit_is_ended_and_its_output_kept() -> None:
    finished = await LocalTransport().run(["/bin/sh", "-c", "echo so far; exec sleep 600"], timeout_s=2.0)
    assert (finished.code, finished.stdout) == (None, b"so far\n")
