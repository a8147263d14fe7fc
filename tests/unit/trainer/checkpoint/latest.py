"""The latest checkpoint of a folder, as the search of a resumed run would take it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.protocol.safetensors import CheckpointError
from engine.trainer.checkpoint.store import Checkpoint, list_checkpoints, verify


def latest(
    folder: Path, on_refused: Callable[[Path, str], object], *, config_hash: str | None = None
) -> Checkpoint | None:
    """The latest one that verifies, of the job with this hash where one is given; None when there is none."""
    for path in reversed(list_checkpoints(folder)):
        try:
            checkpoint = verify(path)
            if config_hash is not None and checkpoint.manifest.config_hash != config_hash:
                raise CheckpointError("it is of another job")
        except (CheckpointError, OSError) as error:
            on_refused(path, str(error))
        else:
            return checkpoint
    return None
