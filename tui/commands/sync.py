"""sync: every node's workdir as this machine's, and the proof."""

from __future__ import annotations

import argparse
import asyncio
import sys

from engine.config.models import FlightConfig
from engine.models import NodeSync, SyncReport
from engine.session import Engine
from tui.commands.terminal import Lines, config_file, print_json

OK, FAILED = 0, 1


def sync(options: argparse.Namespace, engine: Engine) -> int:
    """Copy and compare, or compare only; 1 when a node differs after it."""
    config = engine.load_config(config_file(options))
    lines = Lines(sys.stderr if options.json else sys.stdout)
    report = asyncio.run(_synced(engine, config, lines, dry_run=options.dry_run))
    if options.json:
        print_json(report.model_dump(mode="json"))
    else:
        _tell(lines, report)
    return OK if report.synced else FAILED


async def _synced(engine: Engine, config: FlightConfig, lines: Lines, *, dry_run: bool) -> SyncReport:
    try:
        return await engine.sync(config, dry_run=dry_run, heard=lambda line: lines.say(lines.ink(f"  {line}", "dim")))
    finally:
        await engine.close()


def _tell(lines: Lines, report: SyncReport) -> None:
    for name, node in report.nodes.items():
        if name != report.reference:
            lines.say(
                f"{lines.word('pass' if node.same else 'fail', 5)} {name}: {_words(node, report.reference or '')}"
            )
    lines.say(f"{lines.word('pass' if report.synced else 'fail', 5)} {report.words}")
    if not report.synced and report.dry_run:
        lines.say("`flightdeck sync` copies what is missing")


def _words(node: NodeSync, reference: str) -> str:
    own = f", {node.own_count:,} files of its own" if node.own_count else ""
    if node.problem is not None:
        return node.problem
    if node.same:
        return f"as {reference}{own}"
    parts = [
        f"{count:,} {word}: {', '.join(paths)}{', …' if count > len(paths) else ''}"
        for word, count, paths in (
            ("differ", node.differing_count, node.differing),
            ("missing", node.missing_count, node.missing),
        )
        if count
    ]
    return "; ".join(parts) + own
