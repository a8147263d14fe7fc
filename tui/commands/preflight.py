"""preflight, doctor and sync: whether a launch would work, what this machine has, and making every node's workdir
the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

from engine.api import Config, Engine, ExitCode
from engine.errors import plural
from engine.models import CheckResult, CheckStatus, NodeSync, SyncReport
from tui.commands.follow import print_check
from tui.commands.terminal import Lines, accepted_config, has_colour, print_json, progress_lines


def preflight(options: argparse.Namespace, engine: Engine) -> int:
    """Run the checks and stream them; 1 when one would block a launch."""
    config = accepted_config(options, engine)
    lines = progress_lines(options)
    results = asyncio.run(_checks(engine, config, options.skip, lines))
    report = engine.checks.report(config, results, skip=options.skip)
    if options.json:
        print_json(report)
    else:
        failed = [check.name for check in report.checks if check.status is CheckStatus.FAIL]
        text = "would be blocked by " + ", ".join(failed) if failed else "a launch would not be blocked"
        lines.say(f"{lines.word(report.overall_status.value)}: {text}")
        if report.overridden:
            lines.say(lines.ink(f"overridden: {', '.join(report.overridden)}", "red"))
    return ExitCode.FAILED if report.overall_status is CheckStatus.FAIL else ExitCode.OK


async def _checks(engine: Engine, config: Config, skip: list[str], lines: Lines) -> list[CheckResult]:
    results: list[CheckResult] = []
    async with engine:
        async for result in engine.checks.preflight(config, skip=skip):
            if result.status not in (CheckStatus.PENDING, CheckStatus.RUNNING):
                results.append(result)
                print_check(lines, result)
    return results


def doctor(options: argparse.Namespace, engine: Engine) -> int:
    """Check this machine; 1 when something is missing that a run needs."""
    findings = [*asyncio.run(engine.checks.doctor()), _terminal()]
    failed = any(finding.status is CheckStatus.FAIL for finding in findings)
    if options.json:
        print_json(findings)
        return ExitCode.FAILED if failed else ExitCode.OK
    lines = Lines()
    for finding in findings:
        print_check(lines, finding)
    lines.say("something that a run needs is missing" if failed else "this machine can run `flightdeck demo`")
    return ExitCode.FAILED if failed else ExitCode.OK


def _terminal() -> CheckResult:
    if not sys.stdout.isatty():
        return CheckResult(name="terminal", status=CheckStatus.SKIP, summary="stdout is not a terminal")
    columns, rows = os.get_terminal_size()
    problems = []
    if columns < 80 or rows < 24:
        problems.append("smaller than the 80x24 that the console needs")
    if "utf" not in (sys.stdout.encoding or "").lower():
        problems.append("not UTF-8: plain ASCII shapes are drawn")
    summary = f"{os.environ.get('TERM', '?')}, {columns}x{rows}, {'colour' if has_colour(sys.stdout) else 'no colour'}"
    status = CheckStatus.WARN if problems else CheckStatus.PASS
    return CheckResult(name="terminal", status=status, summary="; ".join([summary, *problems]))


def sync(options: argparse.Namespace, engine: Engine) -> int:
    """Copy and compare, or compare only; 1 when a node differs after it."""
    config = accepted_config(options, engine)
    lines = progress_lines(options)
    report = asyncio.run(_synced(engine, config, lines, dry_run=options.dry_run))
    if options.json:
        print_json(report)
    else:
        _print_report(lines, report)
    return ExitCode.OK if report.synced else ExitCode.FAILED


async def _synced(engine: Engine, config: Config, lines: Lines, *, dry_run: bool) -> SyncReport:
    async with engine:
        return await engine.checks.sync(
            config, dry_run=dry_run, on_line=lambda line: lines.say(lines.ink(f"  {line}", "dim"))
        )


def _print_report(lines: Lines, report: SyncReport) -> None:
    for name, node in report.nodes.items():
        if name != report.reference:
            lines.say(
                f"{lines.word('pass' if node.same else 'fail', 5)} {name}: {_difference(node, report.reference or '')}"
            )
    lines.say(f"{lines.word('pass' if report.synced else 'fail', 5)} {report.message}")
    if not report.synced and report.dry_run:
        lines.say("`flightdeck sync` copies what is missing")


def _difference(node: NodeSync, reference: str) -> str:
    extra = f", {plural(node.own_count, 'file')} of its own" if node.own_count else ""
    if node.problem is not None:
        return node.problem
    if node.same:
        return f"as {reference}{extra}"
    parts = [
        f"{count:,} {word}: {', '.join(paths)}{', …' if count > len(paths) else ''}"
        for word, count, paths in (
            ("differ", node.differing_count, node.differing),
            ("missing", node.missing_count, node.missing),
        )
        if count
    ]
    return "; ".join(parts) + extra
