"""preflight and doctor: whether a run would work, and what this machine has."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus
from engine.session import Engine
from tui.commands.follow import print_check
from tui.commands.terminal import Lines, colour_welcome, config_file, print_json

OK, FAILED = 0, 1


def preflight(options: argparse.Namespace, engine: Engine) -> int:
    """Run the checks and stream them; 1 when one would block a launch."""
    config = engine.load_config(config_file(options))
    lines = Lines(sys.stderr if options.json else sys.stdout)
    results = asyncio.run(_checks(engine, config, options.skip, lines))
    report = engine.preflight_report(config, results, skip=options.skip)
    if options.json:
        print_json({**report.model_dump(mode="json"), "not_checked": engine.checks_not_yet()})
    else:
        failed = [check.name for check in report.checks if check.status is CheckStatus.FAIL]
        words = "would be blocked by " + ", ".join(failed) if failed else "a launch would not be blocked"
        lines.say(f"{lines.word(report.overall_status.value)}: {words}")
        if report.overridden:
            lines.say(lines.ink(f"overridden: {', '.join(report.overridden)}", "red"))
        if missing := engine.checks_not_yet():
            lines.say(lines.ink(f"not checked in this release: {', '.join(missing)}", "dim"))
    return FAILED if report.overall_status is CheckStatus.FAIL else OK


async def _checks(engine: Engine, config: FlightConfig, skip: list[str], lines: Lines) -> list[CheckResult]:
    results: list[CheckResult] = []
    try:
        async for result in engine.preflight(config, skip=skip):
            if result.status not in (CheckStatus.PENDING, CheckStatus.RUNNING):
                results.append(result)
                print_check(lines, result)
    finally:
        await engine.close()
    return results


def doctor(options: argparse.Namespace, engine: Engine) -> int:
    """What this machine has and lacks; 1 when something is missing that a run needs."""
    findings = [*asyncio.run(engine.doctor()), _terminal()]
    failed = any(finding.status is CheckStatus.FAIL for finding in findings)
    if options.json:
        print_json([finding.model_dump(mode="json") for finding in findings])
        return FAILED if failed else OK
    lines = Lines()
    for finding in findings:
        print_check(lines, finding)
    lines.say("something that a run needs is missing" if failed else "this machine can run `flightdeck demo`")
    return FAILED if failed else OK


def _terminal() -> CheckResult:
    """The face's own part of the doctor: what it would draw on."""
    if not sys.stdout.isatty():
        return CheckResult(name="terminal", status=CheckStatus.SKIP, summary="stdout is not a terminal")
    columns, rows = os.get_terminal_size()
    problems = []
    if columns < 80 or rows < 24:
        problems.append("smaller than the 80x24 that the console needs")
    if "utf" not in (sys.stdout.encoding or "").lower():
        problems.append("not UTF-8: plain ASCII shapes are drawn")
    summary = (
        f"{os.environ.get('TERM', '?')}, {columns}x{rows}, {'colour' if colour_welcome(sys.stdout) else 'no colour'}"
    )
    status = CheckStatus.WARN if problems else CheckStatus.PASS
    return CheckResult(name="terminal", status=status, summary="; ".join([summary, *problems]))
