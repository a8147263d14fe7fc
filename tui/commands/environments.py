"""environments: python environments that Flight Deck makes on the nodes."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from datetime import datetime

from engine.api import Config, Engine, EnvironmentPlan, ExitCode, NodePythons
from engine.errors import InputError
from tui.commands.terminal import Lines, accepted_config, agreed, print_json, progress_lines
from tui.formatting import size, table


def environments(options: argparse.Namespace, engine: Engine) -> int:
    """List them, make one on each node, or remove one; 1 when a node has failed."""
    if (options.id is None) == (options.action == "remove"):
        raise InputError(
            "`environments remove` needs an ID, and nothing else takes one", todo="`flightdeck environments`"
        )
    config = accepted_config(options, engine)
    if options.action == "make":
        return asyncio.run(_make(options, engine, config))
    if options.action == "remove":
        _agree(options, f"remove environment {options.id} from {', '.join(options.node) or 'every node'}?")

    reports = asyncio.run(_ask(options, engine, config))
    if options.json:
        print_json(reports)
    else:
        _print_reports(config, reports)
    return ExitCode.FAILED if any(report.problem for report in reports.values()) else ExitCode.OK


async def _ask(options: argparse.Namespace, engine: Engine, config: Config) -> dict[str, NodePythons]:
    async with engine:
        if options.id is not None:
            await engine.environments.remove(config, options.id, options.node)
        return await engine.environments.all(config, options.node)


def _print_reports(config: Config, reports: dict[str, NodePythons]) -> None:
    lines, pythons, rows = Lines(), {node.name: node.python for node in config.nodes}, []
    for node, report in reports.items():
        if report.problem:
            lines.wrap(f"{lines.ink(node, 'red')}: ", report.problem, 2)
        for made in report.environments:
            versions = {name: made.packages.get(name) for name in ("mlx", "mlx-lm", "torch")}
            packages = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
            used = "in use" if f"/{made.id}/" in pythons[node] else ""
            since = f"{datetime.fromtimestamp(made.made_at):%Y-%m-%d %H:%M}"
            rows.append([node, made.id, packages or f"{len(made.packages)} packages", size(made.bytes), since, used])
    lines.say(table(("NODE", "ID", "PACKAGES", "SIZE", "MADE", ""), rows, lines.width) if rows else "no environments")


async def _make(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    lines, failed = progress_lines(options), set[str]()
    async with engine:
        plans = await engine.environments.plan(config, options.node, offline=options.offline)
        for plan in plans:
            lines.wrap(f"{lines.ink(plan.node, 'red' if plan.problem else 'bold')}: ", plan.describe(), 2)
        if any(plan.problem for plan in plans):
            return _end(options, config, plans, {plan.node for plan in plans})
        _agree(
            options, f"make them, and write their pythons into {config.file}? (`environments remove` takes them back)"
        )
        async for progress in engine.environments.make(config, [plan for plan in plans if not plan.made]):
            lines.wrap(f"{lines.ink(progress.node, 'red' if progress.failed else None)}: ", progress.text, 2)
            if progress.failed:
                failed.add(progress.node)
        # One python on some nodes and another on the others would not start.
        if not failed:
            config = engine.environments.use(config, plans)
            lines.say(f"{config.file}: python of {', '.join(plan.node for plan in plans)} is written")
    return _end(options, config, plans, failed)


def _end(options: argparse.Namespace, config: Config, plans: Sequence[EnvironmentPlan], failed: set[str]) -> int:
    if options.json:
        pythons = {node.name: node.python for node in config.nodes}
        print_json({"file": str(config.file), "plans": plans, "failed": sorted(failed), "pythons": pythons})
    return ExitCode.FAILED if failed else ExitCode.OK


def _agree(options: argparse.Namespace, question: str) -> None:
    """Raises InputError where nobody agrees, also without a terminal."""
    if not agreed(options, question):
        raise InputError("nothing is changed", why="it was not agreed to")
