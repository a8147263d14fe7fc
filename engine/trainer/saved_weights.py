"""The trained weights of a saved state, for a task: one file on rank 0 while the task goes on, put together tensor by
tensor from the parts that the ranks have on their disks; or the state's own, where that is such a file."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import mlx.core as mx

from engine.protocol.job import JobError
from engine.protocol.safetensors import CheckpointError, check_header
from engine.protocol.sizes import size_text
from engine.protocol.task import Task
from engine.trainer.checkpoint import store
from engine.trainer.collective import Collective, TensorSpec, broadcast_object, describe
from engine.trainer.variants import broadcast_tensors, load_tensors
from engine.trainer.weights import WeightStream, write_safetensors
from engine.training.checkpoint_files import unpacked, verify_file
from engine.training.process import TrainingProcess

_AVERAGING, _ANCHOR = "averaging", ":anchor"
"""Where a state of strategy "local" has the weights after the last averaging, which are those that count."""


@contextlib.contextmanager
def assembled(process: TrainingProcess, collective: Collective) -> Iterator[TrainingProcess]:
    """`process` with the weights of its task in a file on rank 0, if the task names the parts of a state in their
    place. Raises JobError, PeerLost, OSError."""
    task, rank = Task(**process.spec.task or {}), collective.rank
    if not task.parts:
        yield process
        return
    # The ranks of one host share the run's folder.
    folder = process.home / f"assembled-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        process.reporter.phase("loading")
        first, *others = [_Part.of(process, collective, part, folder) for part in task.parts]
        path = first.file if first.owner == 0 and not others else None
        path = path or str(_write(process, collective, [first, *others], folder))
        task = replace(task, weights=path, parts=[])
        yield replace(process, spec=replace(process.spec, task=asdict(task)))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    owner: int
    entries: Mapping[str, TensorSpec]
    tensors: dict[str, mx.array]
    """Not read; empty on all ranks but the owner."""
    file: str | None
    """The owner's that has these alone."""

    @classmethod
    def of(cls, process: TrainingProcess, collective: Collective, saved: Sequence[str], scratch: Path) -> _Part:
        """`saved`: as in Task.parts. Raises JobError, on all ranks, where it is not as it was saved."""
        node, folder, manifest = saved
        owner = next((rank.rank for rank in process.spec.ranks if rank.node == node), None)
        if owner is None:
            raise JobError(f"{node} has a part of the state, and does not take part")
        tensors, file, why = dict[str, mx.array](), None, None
        if owner == collective.rank:
            try:
                tensors, file = _tensors(Path(folder), manifest, scratch)
            except (CheckpointError, OSError) as error:
                why = str(error)
        why, file, described = broadcast_object(collective, [why, file, describe({"": tensors})], owner)
        if why is not None:
            raise JobError(f"the part of the state in {folder} on {node} is not used: {why}")
        process.reporter.going_on()
        entries = {name: TensorSpec.of(shape, dtype) for _, name, shape, dtype in described}
        return cls(owner, entries, tensors, file)


def _tensors(folder: Path, manifest: str, scratch: Path) -> tuple[dict[str, mx.array], str | None]:
    """The weights in a part of a state, not read, and the file that has them alone, if any. `manifest`: the SHA-256
    that it was saved with. Raises CheckpointError, OSError."""
    saved = store.verify(folder, check_hashes=False).manifest
    if saved.journal_entry()["manifest"] != manifest:
        raise CheckpointError("its manifest is not the one that it was saved with")
    entries = {entry.name.split(".", 1)[0]: entry for entry in saved.files}
    entry = entries.get(_AVERAGING) or entries.get("weights")
    if entry is None:
        raise CheckpointError("it has no weights")
    verify_file(folder, entry, check_hash=True)
    path = folder / entry.name
    if entry.compression != "none":
        path = scratch / f"part{saved.part}.safetensors"
        with path.open("wb") as file:
            for data in unpacked(folder, entry):
                file.write(data)
    tensors = load_tensors(path) if check_header(path).tensors else {}
    if _AVERAGING in entries:
        anchors = {name.removesuffix(_ANCHOR): value for name, value in tensors.items() if name.endswith(_ANCHOR)}
        return anchors, None
    return tensors, str(path)


def _write(process: TrainingProcess, collective: Collective, parts: list[_Part], folder: Path) -> Path:
    """The file of all parts, on rank 0. Raises JobError, PeerLost, OSError."""
    entries: dict[str, TensorSpec] = {}
    for part in parts:
        # A pipeline's first and last stage have both the embeddings that are the head as well.
        for name in part.entries.keys() & entries.keys():
            part.tensors.pop(name, None)
        entries |= {name: entry for name, entry in part.entries.items() if name not in entries}

    def arrays() -> Iterator[mx.array]:
        for part in parts:
            for tensors in broadcast_tensors(collective, part.tensors, part.owner):
                yield from tensors.values()
                process.reporter.going_on()

    weights, path = WeightStream(entries, arrays()), folder / "weights.safetensors"
    if collective.rank > 0:
        weights.drain()
        return path
    needed, free = sum(entry.nbytes for entry in entries.values()), shutil.disk_usage(folder).free
    if free < needed:
        missing = size_text(needed - free)
        raise JobError(f"the weights of the state need {size_text(needed)}, {missing} more than {folder} has free")
    digest = write_safetensors(path, weights.entries, weights.arrays)
    # Parts of which there was nothing to write.
    weights.drain()
    plural = "s" * (len(parts) > 1)
    process.reporter.print(f"weights from {len(parts)} part{plural} of a state: {size_text(needed)}, SHA-256 {digest}")
    return path
