"""data: what a job trains on, as its first node reads it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

from engine.api import DataInspection, Engine, ExitCode
from engine.errors import plural
from tui.commands.terminal import Lines, accepted_config, print_json


def data(options: argparse.Namespace, engine: Engine) -> int:
    """Show the data, and copy it with --write; 1 when it cannot be trained on."""
    if options.path is not None:
        config = engine.checks.data_config(options.path, options.model and options.model.expanduser())
    else:
        config = accepted_config(options, engine)

    async def inspect() -> DataInspection:
        async with engine:
            folder = options.write.expanduser() if options.write is not None else None
            return await engine.checks.data(config, shown=options.rows, folder=folder)

    inspection = asyncio.run(inspect())
    if options.json:
        print_json(inspection)
    else:
        show(Lines(), inspection)
        if options.write is not None and not inspection.faults:
            Lines().say(f"written: {', '.join(f'{options.write}/{name}.jsonl' for name in inspection.files)}")
    return ExitCode.FAILED if inspection.faults else ExitCode.OK


def show(lines: Lines, inspection: DataInspection) -> None:
    lines.say(f"{inspection.source} on {inspection.node}")
    if inspection.files:
        how = inspection.conversion.describe() if inspection.conversion is not None else "mlx-lm's own files"
        lines.wrap("read as   ", how, 10)
    for name, file in inspection.files.items():
        lines.say(f"{name:<10}{plural(file.examples, 'row')}, {file.form}{_lengths(inspection.lengths.get(name, {}))}")
    # The first token is never a target.
    if tokens := sum(max(0, row.tokens - row.cut - 1) for row in inspection.rows):
        lines.say(
            f"masked    {1 - sum(row.targets for row in inspection.rows) / tokens:.0%} of the tokens of these rows:"
        )
    for number, row in enumerate(inspection.rows, 1):
        cut = f", {row.cut:,} of them cut off" if row.cut else ""
        counts = f": {row.tokens:,} tokens{cut}, {row.targets:,} trained on" if row.tokens else ""
        lines.say()
        lines.say(lines.ink(f"row {number}, line {row.line:,} of train.jsonl{counts}", "bold"))
        masked = lines.ink(row.masked, "dim")
        # Without colour brackets tell what is not trained on.
        lines.say((masked if masked != row.masked else f"[{masked}]" * bool(masked)) + row.trained)
    lines.say()
    for word, texts in (("warn", inspection.warnings), ("fail", inspection.faults)):
        for text in texts:
            lines.wrap(f"{lines.word(word)} ", text, 5)


def _lengths(rows: Mapping[int, int]) -> str:
    """`rows`: tokens → how many have them."""
    tokens = sorted(length for length, count in rows.items() for _ in range(count))
    if not tokens:
        return ""
    mean, median, most = sum(tokens) / len(tokens), tokens[len(tokens) // 2], tokens[len(tokens) * 95 // 100]
    return f"; tokens: mean {mean:,.0f}, median {median:,}, 95 % {most:,}, longest {tokens[-1]:,}"
