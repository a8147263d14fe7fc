"""config: the values that count, each with where it was set; and the JSON Schema for editors."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from engine.api import SCHEMA, Engine, ExitCode, effective, parse_settings
from tui.commands.terminal import Lines, accepted_config, config_file, print_json
from tui.formatting import table


def config(options: argparse.Namespace, engine: Engine) -> int:
    """Print the effective configuration; nothing is run, unless a plan is asked for."""
    if options.schema:
        print(SCHEMA.read_text(encoding="utf-8"), end="")
        return ExitCode.OK
    file = config_file(options)
    chosen = asyncio.run(_chosen(options, engine)) if options.plan else {}
    values = effective(file, parse_settings(options.set), every=options.all, chosen=chosen)
    if options.json:
        shown = [{"key": value.key, "value": value.value, "source": value.source} for value in values]
        print_json({"file": str(file.absolute()), "values": shown})
    else:
        Lines().say(table(("KEY", "VALUE", "FROM"), [(value.key, value.text, value.source) for value in values]))
    return ExitCode.OK


async def _chosen(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    async with engine:
        return (await engine.launches.plan(accepted_config(options, engine))).chosen
