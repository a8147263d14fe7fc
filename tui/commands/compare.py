"""compare and export: runs beside one another, and their metrics for other programs."""

from __future__ import annotations

import argparse
import sys

from engine.api import Engine, ExitCode
from engine.errors import InputError, plural
from tui.commands.terminal import Lines, print_json
from tui.formatting import comparison_rows, table


def compare(options: argparse.Namespace, engine: Engine) -> int:
    comparison = engine.comparisons.compare(options.runs)
    if options.json:
        print_json(comparison)
        return ExitCode.OK
    lines = Lines()
    lines.say(table(("", "", *comparison.names, "BEST"), comparison_rows(comparison)))
    for speed in comparison.speeds:
        lines.say("")
        lines.say(f"{speed.summary}{':' if speed.reasons else ''}")
        for reason in speed.reasons:
            lines.say(f"  {reason}")
    return ExitCode.OK


def export(options: argparse.Namespace, engine: Engine) -> int:
    if options.format == "tensorboard":
        if options.output is None or str(options.output) == "-":
            raise InputError("--format tensorboard writes a folder for each run", todo="name one with -o DIR")
        runs = engine.comparisons.export(options.runs, "tensorboard", folder=options.output)
    elif options.output is None or str(options.output) == "-":
        engine.comparisons.export(options.runs, options.format, output=sys.stdout)
        return ExitCode.OK
    else:
        runs = engine.comparisons.export(options.runs, options.format, output=options.output)
    if options.json:
        print_json({"output": options.output, "runs": runs})
    else:
        Lines().say(f"{options.output}: {plural(len(runs), 'run')}")
        if options.format == "tensorboard":
            Lines().say(f"  tensorboard --logdir {options.output}")
    return ExitCode.OK
