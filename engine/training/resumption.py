"""The conditions on which both trainers resume from a state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError
from engine.training.checkpoint_files import Manifest, Recorded
from engine.training.reporting import BestValidation, Reporter, ReportWindow

NOT_RECORDED = "; its manifest is not recorded in the run's journal"


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


def no_state(refused: int, reached: int) -> str:
    """Why there is no state to resume from. Raises JobError with it when the run had `reached` an iteration."""
    why = f"no state to resume from ({f'{refused} were refused' if refused else 'no rank has any'})"
    if reached > 0:
        raise JobError(
            f"{why}, and the run had reached iteration {reached}: starting again at 1 would overwrite the adapters "
            "that it has saved. Bring the node that has the state back and `flightdeck resume`, or start a new run "
            "with `flightdeck launch`"
        )
    return f"{why}: the training starts at iteration 1"
