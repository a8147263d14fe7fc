"""Real runs by `flightdeck launch` and `flightdeck calibrate` on this machine: one rank and two, what a calibration
says beside what the training does, and a run whose rank is killed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from engine.checks.runner import CHECKS
from engine.measurements import Calibration
from engine.models import RunRecord, RunState
from engine.plan.document import MemorySection
from engine.run.json_lines import LineTail
from tests.faults.local_runs import Run
from tests.gpu.head import flightdeck, launch, write_config
from tests.gpu.mlx_models import MEDIUM, SMALL, Cell, Models, ask, grid, training
from tests.gpu.mlx_training import Target, configured, job_env, judged, plans
from tests.gpu.part import Visit

NO_CHECKS: Final = tuple(f"--skip={name}" for name in CHECKS)
_RATE_LIMIT: Final = 0.10
_ITERATIONS: Final = 20
"""Of a run that is only launched."""


def events(run: Run, attempt: int, kind: str) -> list[dict[str, Any]]:
    """The trainer's own, of rank 0."""
    path = run.files_of(0, attempt).events(0)
    return [event for event in LineTail(path).objects() if event.get("event") == kind] if path.exists() else []


def losses(run: Run) -> dict[int, list[float]]:
    """By iteration: of all attempts that took it."""
    values: dict[int, list[float]] = {}
    for attempt in range(1, run.record.attempts + 1):
        for step in events(run, attempt, "step"):
            values.setdefault(step["iteration"], []).append(step["loss"])
    return values


def ended(visit: Visit, run: Run) -> RunRecord:
    """Awaits the end; of another than a success all that tells of it is kept."""
    run.wait(lambda: run.record.state.ended, max(1.0, visit.remaining_s - 3.0))
    record = run.record
    if record.state is not RunState.SUCCEEDED:
        visit.record(f"{record.id}: {record.state}", run.troubles())
    return record


def launches(visit: Visit) -> None:
    """With all checks. Two ranks share one GPU by ring."""
    models = Models(visit)
    model, tokens = (SMALL, 32) if visit.dry else (MEDIUM, 512)
    models.write({"trained": model}, [tokens])
    job = models.job("trained", "full", 4, tokens, iters=_ITERATIONS, steps_per_report=5)
    for ranks in (1, 2):
        title = f"{ranks} rank{'s by ring' if ranks > 1 else ''}"
        tables: dict[str, Mapping[str, Any]] = {"cluster": {"name": "gpu", "backend": "ring"}, "job": job}
        # Two at once would read what the other has half written: each has its own then.
        tables |= job_env(visit) if ranks == 1 else {}
        config = write_config(visit, f"ranks-{ranks}", ranks, **tables)
        made = launch(visit, config)
        visit.record(f"{title}: what the launch printed", made.text)
        if made.record:
            report_run(visit, title, made.run(visit), made.done.seconds)
        else:
            visit.result(f"{title}: launched", "no", target="yes", ok=False, note=made.text[-300:])


def report_run(visit: Visit, title: str, run: Run, launched_s: float) -> None:
    record, taken = ended(visit, run), losses(run)
    note = record.cause or f"{launched_s:.1f} s of all checks, then {_ITERATIONS} iterations"
    ok = record.state is RunState.SUCCEEDED
    visit.result(f"{title}: ended", str(record.state), target="succeeded", ok=ok, note=note)
    finite = [loss for values in taken.values() for loss in values if math.isfinite(loss)]
    steps, target = f"{len(finite)} of {_ITERATIONS}", f"{_ITERATIONS} of {_ITERATIONS}"
    visit.result(f"{title}: finite losses", steps, target=target, ok=steps == target, note=_first_and_last(finite))
    devices = ", ".join(str(event["device"]) for event in events(run, 1, "start"))
    expected = "cpu" if visit.dry else "gpu"
    visit.result(f"{title}: device", devices, target=expected, ok=expected in devices)


def _first_and_last(losses: list[float]) -> str:
    return f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""


def calibration(visit: Visit) -> None:
    """Of one node: its rate beside the training's, and the peak from its memory probes beside the training's own."""
    models, chosen = Models(visit), grid(visit)
    size, shape = next(iter(chosen.configs.items()))
    models.write({size: shape}, [chosen.tokens])
    cell = Cell(size, "lora", 4)
    job = models.job_of(cell, chosen.tokens)
    seconds = 2.0 if visit.dry else 5.0
    config = configured(visit, models, cell, calibration={"seconds": seconds})
    done = flightdeck(visit, "calibrate", "--json", "--accept", "-c", str(config))
    if done.code != 0:
        visit.record("flightdeck calibrate", done.errors)
        visit.result("flightdeck calibrate", f"exit code {done.code}", target="0", ok=False, note=done.errors[-300:])
        return
    document = json.loads(done.output)
    taken = Calibration.model_validate(
        {key: value for key, value in document.items() if key in Calibration.model_fields}
    )
    measure = taken.nodes[0]
    visit.result("flightdeck calibrate", done.seconds, unit="s", note=f"{measure.steps} steps counted")
    runs = [training(cell.name, "ours", visit.device, job, (2, seconds))]
    (answer,) = ask(visit, "trainings", {"folder": str(models.folder), "runs": runs}).answers
    if "failure" in answer or measure.examples_per_s is None:
        visit.result(f"{cell.name}: trained", str(answer.get("failure", measure.problem)), ok=False)
        return
    trained = answer["tokens_per_s"] / chosen.tokens
    error = measure.examples_per_s / trained - 1
    note = f"{measure.examples_per_s:.3g} of {trained:.3g} examples/s, spread {measure.spread or 0:.1%}"
    name = f"{cell.name}: calibrated over trained rate"
    judged(visit, name, f"{error:+.1%}", Target("within 10%", abs(error) <= _RATE_LIMIT), note)
    section = asyncio.run(plans(visit, models, [cell], calibration={"seconds": seconds}))[cell.name]
    if isinstance(section, MemorySection):
        planned, peak = section.ranks[0].peak_bytes, answer["peak_bytes"]
        error, source = planned / peak - 1, section.ranks[0].source
        note = f"{planned / 1e9:.3g} of {peak / 1e9:.3g} GB, by {source}"
        name = f"{cell.name}: peak from probes over the training's"
        met = abs(error) <= _PROBES_LIMIT and source == "calibration"
        judged(visit, name, f"{error:+.1%}", Target("within 5%", met), note)
    else:
        visit.result(f"{cell.name}: the plan's peak", section, ok=False)


_PROBES_LIMIT: Final = 0.05
_STALL_LIMIT: Final = 0.05


@dataclass(frozen=True)
class Length:
    """Of a run: its iterations, and the updates from one checkpoint to the next."""

    iterations: int
    every: int


def _length(visit: Visit) -> Length:
    return Length(60, 10) if visit.dry else Length(600, 60)


def checkpoint(visit: Visit) -> None:
    """Two runs to which nothing happens, and one whose rank is killed and which recovers by itself."""
    models, length = Models(visit), _length(visit)
    model, tokens, batch = (SMALL, 32, 2) if visit.dry else (MEDIUM, 512, 4)
    models.write({"trained": model}, [tokens])
    job = models.job("trained", "full", batch, tokens, iters=length.iterations, learning_rate=1e-4)
    tables = {"job": job, "checkpoint": {"every": length.every}, "recovery": {"backoff_s": 0}, **job_env(visit)}
    config = write_config(visit, "checkpoint", 1, **tables)
    first = launch(visit, config, *NO_CHECKS).run(visit)
    if ended(visit, first).state is RunState.SUCCEEDED:
        stall(visit, first)
    # At the same time: what is compared is what they compute.
    second, killed = (launch(visit, config, *NO_CHECKS).run(visit) for _ in range(2))
    killed.wait(lambda: _is_on_its_way(killed, 2 * length.every + length.every // 2), visit.remaining_s / 2)
    os.kill(killed.identity(0).trainer_pid, signal.SIGKILL)
    for name, run in {"first": first, "second": second, "killed": killed}.items():
        record = ended(visit, run)
        ok, note = record.state is RunState.SUCCEEDED, record.cause or f"{record.attempts} attempts"
        visit.result(f"{name} run: ended", str(record.state), target="succeeded", ok=ok, note=note)
    resumed(visit, first, second, killed)


def _is_on_its_way(run: Run, iteration: int) -> bool:
    """It has a checkpoint, and has passed this iteration."""
    committed = any(event["phase"] == "committed" for event in events(run, 1, "checkpoint"))
    return committed and events(run, 1, "step")[-1]["iteration"] > iteration


def stall(visit: Visit, run: Run) -> None:
    """What the main thread waits for a checkpoint, as a share of a step and of all the time."""
    steps, saved = events(run, 1, "step"), events(run, 1, "checkpoint")
    between = [later["t"] - earlier["t"] for earlier, later in pairwise(steps)]
    step = statistics.median(between)
    waits = [
        event["blocking_seconds"] for event in saved if event["phase"] == "committed" and "blocking_seconds" in event
    ]
    skipped = sum(event["phase"] == "skipped" for event in saved)
    if not waits:
        visit.result("checkpoints", "none was committed", ok=False)
        return
    size = max(event.get("bytes", 0) for event in saved)
    wait = statistics.median(waits)
    note = (
        f"{wait * 1e3:.2f} ms of a step of {step * 1e3:.1f} ms; {len(waits)} of {size / 1e6:.0f} MB, {skipped} skipped"
    )
    visit.result("wait for a checkpoint, of a step", f"{wait / step:.1%}", note=note)
    share = sum(waits) / (steps[-1]["t"] - steps[0]["t"])
    target = Target("< 5%", share < _STALL_LIMIT)
    judged(visit, "wait for checkpoints, of the time", f"{share:.2%}", target, f"every {_length(visit).every} updates")
    mean = statistics.fmean(between) / step
    visit.result("all steps with their checkpoints, mean over median", round(mean, 3), unit="×")
    begins = {event["iteration"] for event in saved if event["phase"] == "begin" and event.get("kind") == "state"}
    after = [later["t"] - earlier["t"] for earlier, later in pairwise(steps) if earlier["iteration"] in begins]
    if after:
        visit.result("step after a checkpoint began, over a step", statistics.median(after) / step, unit="×")


def resumed(visit: Visit, first: Run, second: Run, killed: Run) -> None:
    """The losses of the killed run beside those of the others, of which two are compared first."""
    whole = {iteration: losses[-1] for iteration, losses in losses(first).items()}
    again = {iteration: losses[-1] for iteration, losses in losses(second).items()}
    same, apart = difference(whole, again)
    # Kernels whose sums come in any order are no fault of the trainer's.
    visit.result("two undisturbed runs: losses", same, target="bit for bit", ok=True if apart == 0.0 else None)
    twice = {iteration: losses for iteration, losses in losses(killed).items() if len(losses) > 1}
    differ = sum(len(set(losses)) > 1 for losses in twice.values())
    visit.result("killed run: iterations trained twice", len(twice), note=f"{differ} with another loss the second time")
    recovered = {iteration: losses[-1] for iteration, losses in losses(killed).items()}
    same, after = difference(whole, recovered)
    # Where two runs alike are not the same, no resumed one can be: it may then be as far from them as they are.
    limit = 0.0 if apart == 0.0 else 2 * apart
    target = "bit for bit" if apart == 0.0 else f"within {limit:.1e}"
    complete = len(recovered) == _length(visit).iterations and killed.record.attempts > 1
    visit.result(
        "killed and resumed run: losses",
        same,
        target=target,
        ok=complete and after <= limit,
        note=f"{len(recovered)} iterations, {killed.record.attempts} attempts",
    )


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> tuple[str, float]:
    """In words, and the largest relative difference; infinite where their iterations differ."""
    if one.keys() != other.keys() or not one:
        return f"{len(one)} and {len(other)} iterations", math.inf
    apart = {iteration: abs(other[iteration] / loss - 1) for iteration, loss in one.items()}
    differing = [iteration for iteration, loss in sorted(one.items()) if other[iteration] != loss]
    if not differing:
        return "the same, bit for bit", 0.0
    return f"differ from iteration {differing[0]}, by up to {max(apart.values()):.1e}", max(apart.values())
