"""Small states, and parts of a trainer that save and restore them, for the tests of checkpoints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.resume import CheckpointLocations
from engine.trainer.checkpoint.saving import PeriodicCheckpoints
from engine.trainer.checkpoint.store import CheckpointFolder, Snapshot
from engine.trainer.weights import State
from engine.training.checkpoint_files import MANIFEST_NAME, Origin
from engine.training.reporting import Reporter

WINDOW = {"loss_sum": 1.5, "losses": 1}


class FakeStrategy:
    """A strategy's state: one number per part."""

    any_part = False

    def __init__(self) -> None:
        self.restored: dict[int, float] = {}
        self.unfit: set[float] = set()
        self.others: set[float] = set()
        """Values of another rank's part."""

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        return float(np.asarray(state["weights"]["w"])[0]) not in self.unfit | self.others

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        value = float(np.asarray(state["weights"]["w"])[0])
        if value in self.unfit:
            raise ValueError("w is of another shape")
        self.restored[part] = value


def state(value: float) -> State:
    arrays = {"weights": {"w": mx.full((50,), value)}, "optimizer": {"step": mx.array(3, mx.uint64)}}
    mx.eval(arrays)
    return arrays


def snapshot(update: int, value: float | None = None) -> Snapshot:
    return Snapshot(2 * update, update, WINDOW, state(update if value is None else value))


INPUTS = {"train.jsonl": "crc32 00000001", "the base model": "0" * 16}


def origin(part: int = 0, parts: int = 1, job: str = "job", inputs: Mapping[str, str] = INPUTS) -> Origin:
    return Origin(job, world_size=max(parts, 2), part=part, parts=parts, inputs=inputs)


def reporter(path: Path, rank: int = 0) -> Reporter:
    path.parent.mkdir(exist_ok=True)
    return Reporter(EventWriter(path, rank, 2))


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def corrupt(checkpoint: store.Checkpoint) -> None:
    file = checkpoint.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def tamper(folder: Path, file: str = "weights.safetensors", manifest: str = MANIFEST_NAME) -> None:
    """Change a file of a state, and its hash in the manifest beside it."""
    content = bytearray((folder / file).read_bytes())
    content[-3] ^= 1
    (folder / file).write_bytes(content)
    document = json.loads((folder / manifest).read_bytes())
    (entry,) = (entry for entry in document["files"] if entry["name"] == file)
    entry["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / manifest).write_text(json.dumps(document, indent=1, sort_keys=True))


def spec(checkpoint_folder: str | None = None, workdir: Path = Path(), **fields: Any) -> AttemptSpec:
    """Of one rank; `fields`: more of its."""
    rank = RankSpec(0, "n0", "python", str(workdir), checkpoint_folder=checkpoint_folder)
    return AttemptSpec("run", 2, "", "ring", 1, [rank], None, **fields)


def locations(home: Path, checkpoint_folder: str | None = None, **fields: Any) -> CheckpointLocations:
    """Of a run in `home`."""
    return CheckpointLocations(spec(checkpoint_folder, home, **fields), 0, home)


def periodic(home: Path, *, part: int = 0, parts: int = 1, url: str | None = None) -> PeriodicCheckpoints:
    """One every two updates, of a rank of two; its events are in `home`/e<part>."""
    folder, every = CheckpointFolder(home / f"p{part}", url), spec(checkpoint_every=2, checkpoint_keep=2)
    return PeriodicCheckpoints(folder, every, origin(part, parts), reporter(home / f"e{part}", part))


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.list_checkpoints(folder)]
