"""calibrate: what every node does with the job's own step, the links between them, and what follows for a launch."""

from __future__ import annotations

import argparse
import asyncio
import sys
from datetime import UTC, datetime
from typing import Any

from engine.api import Calibration, Config, Engine, ExitCode, NodeMeasure, Prediction
from engine.errors import InputError
from tui.commands.progress import ProgressLines
from tui.commands.scaling import scaling
from tui.commands.terminal import Lines, accepted_config, loaded_config, print_json
from tui.formatting import NOT_MEASURED, ago, calibration_notes, latency, memory, rate, spread, table, throughput

_HEADERS = ("NODE", "THROUGHPUT", "SPREAD", "SHARE", "BATCH", "TOKENS", "STEP", "STATE", "PEAK AT 1", "PEAK AT 2")


def calibrate(options: argparse.Namespace, engine: Engine) -> int:
    """Measure, or show what was measured last; 1 when a node or a link could not be measured, or nothing is stored."""
    config = loaded_config(options, engine) if options.show else accepted_config(options, engine)
    if options.scaling:
        return scaling(options, engine, config)
    if options.per_rank_batch or options.csv is not None:
        raise InputError(f"{'--per-rank-batch' if options.per_rank_batch else '--csv'} goes with --scaling")
    if options.show:
        taken = engine.calibrations.latest(config)
    else:
        taken = asyncio.run(_measured(engine, config, options.quick, Lines(sys.stderr)))
    predicted = engine.calibrations.predict(config, taken)
    if options.json:
        print_json(document(predicted))
    else:
        _print(Lines(), config, predicted)
    return ExitCode.OK if taken is not None and not _failed(taken) else ExitCode.FAILED


def document(predicted: Prediction) -> dict[str, Any]:
    shares = predicted.shares.model_dump(mode="json") | {"micro_batches": predicted.micro_batches}
    calibration = predicted.calibration
    taken = calibration.model_dump(mode="json") if calibration is not None else {"nodes": [], "links": []}
    return taken | {"stale": predicted.stale, "shares": shares, "prediction": predicted.throughput.model_dump()}


async def _measured(engine: Engine, config: Config, quick: bool, lines: Lines) -> Calibration:
    progress, taken = ProgressLines(lines), None
    async with engine:
        async for step in engine.calibrations.measure(config, quick=quick):
            if isinstance(step, Calibration):
                taken = step
            else:
                progress.update(step)
    assert taken is not None, "the calibration has ended without a result"
    return taken


def _failed(taken: Calibration) -> bool:
    problems = [*(measure.problem for measure in taken.nodes), *(link.problem for link in taken.sums)]
    return any(problems) or (taken.group is not None and taken.group.problem is not None)


def _print(lines: Lines, config: Config, predicted: Prediction) -> None:
    taken = predicted.calibration
    if taken is None:
        lines.say("not calibrated: this job has not been measured on these nodes as they are now")
    else:
        old = f", stale (limit {config.calibration.max_age_days:g} days)" if predicted.stale else ""
        how = "quick" if taken.quick else "full"
        lines.say(f"{taken.cluster}, {taken.job}: measured {ago(taken.taken_at, datetime.now(UTC))}{old}, {how}")
        lines.say(table(_HEADERS, [_row(predicted, measure) for measure in taken.nodes]))
    colours = {"not measured": "red", "warning": "yellow"}
    for label, text in calibration_notes(predicted):
        lines.say(f"{lines.ink(label, colours.get(label))}: {text}")


def _row(predicted: Prediction, measure: NodeMeasure) -> list[str]:
    part, batches = predicted.shares.parts.get(measure.node), predicted.micro_batches
    peaks = {probe.batch: probe.peak_bytes for probe in measure.probes}
    return [
        measure.node,
        throughput(measure.examples_per_s),
        spread(measure.spread),
        NOT_MEASURED if part is None else f"{part:.1%}",
        str(batches.get(measure.node, NOT_MEASURED)) if batches is not None else NOT_MEASURED,
        rate(measure.tokens_per_s),
        latency(measure.step_s),
        *(memory(figure) for figure in (measure.state_bytes, peaks.get(1), peaks.get(2))),
    ]
