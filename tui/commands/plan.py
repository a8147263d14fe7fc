"""plan: what would be launched, on what, and why; in prose, or as the document."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.api import (
    Capacity,
    CapacityReport,
    Config,
    Engine,
    ExitCode,
    TorchSection,
    TrainingPlan,
    explained,
    summary,
    with_strategy,
)
from engine.errors import InputError, memory_text, spans
from tui.commands.terminal import DEFAULT_FILE, Lines, accepted, accepted_config, config_file, print_json
from tui.formatting import NOT_MEASURED, table


def plan(options: argparse.Namespace, engine: Engine) -> int:
    """Make the plan; 1 when it could not be launched as it stands. With --apply, 0 when the suggestion was written: it
    is another job's plan that counts then."""
    if options.longest or options.largest_batch:
        return _capacity(options, engine)
    if options.model or options.memory:
        raise InputError("--model and --memory are for --longest and --largest-batch", todo="add one of them")
    configs = [accepted(config, options, engine) for config in engine.load_grid(config_file(options), options.set)]
    if len(configs) > 1:
        return _grid(options, engine, configs)
    config = with_strategy(configs[0], options.strategy, options.layer_split)

    async def make() -> TrainingPlan:
        async with engine:
            return await engine.launches.plan(config)

    made = asyncio.run(make())
    written = _write(made, Path(options.write).expanduser()) if options.write is not None else []
    if options.json or options.format is not None:
        document = made.document(options.format or "v2")
        print_json({**document, "written": written} if options.write is not None else document)
        _say_refusals(Lines(sys.stderr), made)
    else:
        _print(Lines(), made, explain=options.explain)
        for path in written:
            Lines().say(f"written: {path}")
    if options.apply:
        written, kept = engine.launches.apply_plan(config, made)
        lines = Lines(sys.stderr if options.json or options.format is not None else sys.stdout)
        lines.say(f"written into [job] of {config.file}, whose former text is in {kept}:")
        for line in written:
            lines.say(f"  {line}")
        return ExitCode.OK
    return ExitCode.FAILED if made.refused else ExitCode.OK


def _grid(options: argparse.Namespace, engine: Engine, configs: Sequence[Config]) -> int:
    """A line for each run; 1 when one of them could not be launched."""
    if options.apply or options.write is not None:
        raise InputError(f"--set asks for {len(configs)} runs", why="--apply and --write are for one")

    async def make() -> list[TrainingPlan]:
        async with engine:
            chosen = [with_strategy(config, options.strategy, options.layer_split) for config in configs]
            return await engine.launches.plans(chosen)

    plans = asyncio.run(make())
    if options.json or options.format is not None:
        print_json([made.document(options.format or "v2") for made in plans])
    else:
        width = max(len(made.job) for made in plans) + 2
        for made in plans:
            rows, refused = dict(summary(made)), [f"{refusal.name}: {refusal.text}" for refusal in made.refusals]
            texts = refused or [f"{label} {rows[label]}" for label in ("memory", "throughput") if label in rows]
            Lines().wrap(f"{made.job:<{width}}", "; ".join(texts), width)
    return ExitCode.FAILED if any(made.refused for made in plans) else ExitCode.OK


def _capacity(options: argparse.Namespace, engine: Engine) -> int:
    """1 where nothing fits."""
    config = None
    if options.config is not None or DEFAULT_FILE.exists():
        config = with_strategy(accepted_config(options, engine), options.strategy, options.layer_split)
    elif options.model is None:
        raise InputError("there is no job", why=f"no {DEFAULT_FILE}", todo="name a model: --model")

    async def search() -> CapacityReport:
        asked = {"longest": options.longest, "largest_batch": options.largest_batch}
        async with engine:
            memory = options.memory and options.memory * 2**30
            return await engine.launches.capacities(config, options.model, memory, **asked)

    report, lines = asyncio.run(search()), Lines()
    if options.json:
        print_json(report)
    else:
        made_for = f"{report.made_for:,} tokens" if report.made_for else "sequences of any length"
        lines.wrap("", f"{report.model}, made for {made_for}", 2)
        _print_capacities(lines, "longest sequence, one per rank", "TOKENS", report.longest)
        title = f"largest batch of a rank, of {report.sequence:,} tokens each"
        _print_capacities(lines, title, "SEQUENCES", report.largest_batch)
    fits = any(row.amount for row in (*(report.longest or ()), *(report.largest_batch or ())))
    return ExitCode.OK if fits else ExitCode.FAILED


def _print_capacities(lines: Lines, title: str, unit: str, capacities: Sequence[Capacity] | None) -> None:
    if capacities is None:
        return
    lines.say()
    lines.say(lines.ink(title, "bold"))
    rows = []
    for row in capacities:
        amount, needed = f"{row.amount:,}" if row.amount else "none fits", NOT_MEASURED
        if (memory := row.memory) is not None:
            needed = f"{memory_text(memory.needed_bytes)} of {memory_text(memory.limit_bytes or 0)}"
        figures = (NOT_MEASURED if row.amount is None else amount, needed, getattr(row.settings, "text", NOT_MEASURED))
        rows.append([spans(row.nodes), row.method, row.weights, *figures])
    lines.say(table(("NODE", "METHOD", "WEIGHTS", unit, "NEEDED", "SETTINGS"), rows, lines.width, lead=4))
    for row in capacities:
        if row.why_not:
            lines.wrap(f"{spans(row.nodes)}, {row.method}: ", row.why_not, 2)


def _write(made: TrainingPlan, folder: Path) -> list[str]:
    """The plan's files for PyTorch's own tools, in `folder`, which is made; returns their paths. Raises InputError."""
    if not isinstance(made.torch, TorchSection):
        raise InputError("--write has nothing to write", why=made.torch.reason, todo='set [job] framework = "torch"')
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.torch.files.items():
            (folder / name).write_text(text, encoding="utf-8")
            paths.append(str(folder / name))
    except OSError as error:
        raise InputError(f"{folder} cannot be written", why=error.strerror or str(error)) from error
    return paths


def _print(lines: Lines, made: TrainingPlan, *, explain: bool) -> None:
    rows = summary(made)
    width = max(len(label) for label, _ in rows) + 2
    for label, text in rows:
        lines.wrap(f"{label:<{width}}", text, width)
    if explain:
        for section, reasons in explained(made):
            lines.say()
            lines.say(lines.ink(section, "bold"))
            for label, text in reasons:
                lines.wrap(f"  {label}: " if label else "  ", text, 4)
    else:
        lines.say()
        for advice in made.advice:
            lines.wrap("advice: ", advice.text + (" [disputed]" if advice.disputed else ""), 2)
    command = made.distributed_config.mlx_launch_command
    if command is not None:
        lines.say()
        lines.say(lines.ink("without Flight Deck it is", "dim"))
        # Not wrapped: it is there to be pasted.
        lines.say(command)
        for note in made.distributed_config.launch_notes:
            lines.wrap(lines.ink("  note: ", "dim"), note, 4)
    if isinstance(made.torch, TorchSection):
        _print_torch(lines, made.torch)
    lines.say()
    for warning in made.warnings:
        lines.wrap(f"{lines.word('warn')} {warning.name}: ", warning.text, 2)
    _say_refusals(lines, made)
    if not made.refused:
        lines.say(lines.ink("flightdeck launch launches it; --explain says why, --json is the document", "dim"))


def _print_torch(lines: Lines, section: TorchSection) -> None:
    """The strategies side by side, and the commands."""
    lines.say()
    width = max((len(candidate.name) for candidate in section.candidates), default=0) + 2
    for candidate in section.candidates:
        host = f" and {memory_text(candidate.host_bytes)} of the machine's memory" if candidate.host_bytes else ""
        fits = {True: "fits", False: "too much", None: "limit not known"}[candidate.fits]
        mark = lines.ink(" <- chosen", "bold") if candidate.chosen else ""
        lines.say(f"{candidate.name:<{width}}{memory_text(candidate.needed_bytes)}{host} per rank, {fits}{mark}")
    for launcher, command in section.commands.items():
        lines.say()
        lines.say(lines.ink(f"with {launcher} it is", "dim"))
        # Not wrapped: it is there to be pasted.
        lines.say(command)
    for note in section.notes:
        lines.wrap(lines.ink("  note: ", "dim"), note, 4)
    lines.wrap("", f"flightdeck plan --write DIR writes {', '.join(section.files)}", 2)


def _say_refusals(lines: Lines, made: TrainingPlan) -> None:
    for refusal in made.refusals:
        override = f" (in spite of it: {refusal.override})" if refusal.override else ""
        lines.wrap(f"{lines.ink('refused', 'red')} {refusal.name}: ", refusal.text + override, 2)
