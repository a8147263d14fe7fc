"""Where a training resumes, and the conditions on which both trainers resume from a state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.training.checkpoint_files import Manifest, Recorded
from engine.training.reporting import BestValidation, Reporter, ReportWindow


@dataclass(frozen=True)
class TrainingPoint:
    """The end of an update; all zero at the start of a training."""

    iteration: int = 0
    """The last one that the state has seen, which is also the position in the data."""
    update: int = 0
    window: Mapping[str, Any] = field(default_factory=dict)
    """The sums since the last report (reporting.ReportWindow)."""
    best: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """The best validation so far (reporting.BestValidation)."""


@dataclass(frozen=True)
class ResumePoint(TrainingPoint):
    source: str = "none"
    """"emergency", "checkpoint", "adapter" or "none"."""
    rank: int | None = None
    """Whose state it is; None where each rank has its own part."""
    recorded: bool = False
    """The run's journal has its manifests."""
    saved_by: str = field(default="", compare=False)
    """For the report."""


def first_restored(
    restored: Iterable[ResumePoint | None],
    refused: Callable[[], int],
    needs_state: str,
    reporter: Reporter,
    start: ResumePoint | None = None,
) -> ResumePoint:
    """The first state that could be `restored`, or else `start`, reported. `refused`: how many states were, on all
    ranks. `needs_state`: AttemptSpec.needs_state. Raises JobError with it where there is none."""
    started = time.perf_counter()
    point = next((state for state in restored if state is not None), None)
    count, resumed = refused(), point is not None
    why = f"no state to resume from ({f'{count} were refused' if count else 'no rank has any'})"
    if not resumed and needs_state:
        todo = "bring the state back and `flightdeck resume last`, or begin at iteration 1 with"
        raise JobError(f"{why}, and {needs_state}: {todo} `flightdeck resume last --without-state`")
    point, seconds = point or start or ResumePoint(), time.perf_counter() - started
    facts = {"iteration": point.iteration, "update": point.update, "from_rank": point.rank, "refused": count}
    reporter.event("resumed", source=point.source, seconds=seconds, **facts)
    if not resumed:
        adapter = ", with the weights of resume_adapter_file" if point.source == "adapter" else ""
        reporter.warn(f"{why}: the training starts at iteration 1{adapter}")
        return point
    kind = "an emergency checkpoint" if point.source == "emergency" else "a checkpoint"
    unknown = "" if point.recorded else "; its manifest is not recorded in the run's journal"
    update = f"iteration {point.iteration} (update {point.update})"
    reporter.print(f"resumes after {update} from {kind}{point.saved_by}, in {seconds:.2f} s{unknown}")
    return point


def check_manifest(
    manifest: Manifest, config_hash: str, recorded: Recorded, author: tuple[int, int] | None = None
) -> None:
    """It is of this job, and as it was when the state was saved. Raises CheckpointError."""
    if manifest.config_hash != config_hash:
        raise CheckpointError("it is of another job")
    for name, kind in (("window", ReportWindow), ("best", BestValidation)):
        if unknown := getattr(manifest, name).keys() - kind.__dataclass_fields__.keys():
            raise CheckpointError(f"its manifest has {name} with {ascii(min(unknown))[:80]}")
    manifest.check_recorded(recorded, author)


def check_inputs(manifest: Manifest, present: Sequence[Mapping[str, str]], reporter: Reporter, *, accept: bool) -> None:
    """Its data and its base model are those that any rank has now (`present`: Origin.inputs). Raises JobError."""
    changed = [name for name, value in manifest.inputs.items() if all(held.get(name) != value for held in present)]
    if not changed:
        return
    message = f"{' and '.join(changed)} changed since the state of iteration {manifest.iteration} was saved"
    if not accept:
        raise JobError(
            f"{message}: put back what the run was started with, go on all the same with `flightdeck resume last "
            "--accept-changed-data`, or start a new run with `flightdeck launch`"
        )
    reporter.warn(f"{message}, and --accept-changed-data goes on all the same")
