"""nodes, preflight and doctor: what there is to run on, and whether it would work."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from datetime import UTC, datetime

from engine.config.models import FlightConfig
from engine.models import CheckResult, CheckStatus, NodeFacts
from engine.session import Engine
from tui.commands.follow import print_check
from tui.commands.terminal import Lines, colour_welcome, config_file, print_json
from tui.formatting import NOT_MEASURED, age, size, table

OK, FAILED = 0, 1


def nodes(options: argparse.Namespace, engine: Engine) -> int:
    """Probe every node of the configuration; 1 when one did not answer."""
    facts = asyncio.run(engine.facts(engine.load_config(config_file(options))))
    if options.json:
        print_json([fact.model_dump(mode="json") for fact in facts])
    else:
        lines = Lines()
        headers = ("RANK", "NODE", "HOST", "CHIP", "CORES", "MEMORY", "DISK FREE", "PYTHON", "MLX", "MLX-LM", "SEEN")
        lines.say(table(headers, [_node_row(rank, fact) for rank, fact in enumerate(facts)]))
        for fact in facts:
            if fact.problem:
                lines.say(f"{lines.ink(fact.node, 'red')}: {fact.problem}")
    return FAILED if any(fact.problem for fact in facts) else OK


def _node_row(rank: int, fact: NodeFacts) -> list[str]:
    used, total = size(fact.memory_used_bytes), size(fact.memory_total_bytes)
    seen = age(fact.probed_at, datetime.now(UTC))
    return [
        str(rank),
        fact.node,
        fact.host,
        fact.chip or NOT_MEASURED,
        str(fact.cores or NOT_MEASURED),
        f"{used} of {total}" if fact.memory_total_bytes else NOT_MEASURED,
        size(fact.disk_free_bytes),
        fact.python or NOT_MEASURED,
        fact.mlx or NOT_MEASURED,
        fact.mlx_lm or NOT_MEASURED,
        seen if seen == "now" else f"{seen} ago",
    ]


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
        lines.say(lines.ink(f"not checked in this release: {', '.join(engine.checks_not_yet())}", "dim"))
    return FAILED if report.overall_status is CheckStatus.FAIL else OK


async def _checks(engine: Engine, config: FlightConfig, skip: list[str], lines: Lines) -> list[CheckResult]:
    results: list[CheckResult] = []
    async for result in engine.preflight(config, skip=skip):
        if result.status not in (CheckStatus.PENDING, CheckStatus.RUNNING):
            results.append(result)
            print_check(lines, result)
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
