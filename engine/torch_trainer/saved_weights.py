"""The trained weights of a saved state, for a task: a folder on rank 0 while the task goes on, made of the parts that
the ranks have on their disks."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.protocol.attempt import read_regular
from engine.protocol.job import Job, JobError
from engine.protocol.safetensors import CheckpointError, misfit
from engine.protocol.task import Task
from engine.torch_trainer.checkpoint import StateManifest, all_gather_object, first_failure, send_file
from engine.torch_trainer.model import TrainedFolder, link, load_model, load_tokenizer
from engine.torch_trainer.strategies import read_weights
from engine.training.checkpoint_files import FileEntry, verify_file
from engine.training.process import TrainingProcess


@contextlib.contextmanager
def assembled(process: TrainingProcess, job: Job, dtype: torch.dtype, task: Task) -> Iterator[Task]:
    """`task` with weights on rank 0, if it names the parts of a state in their place. `dtype`: of the weights that are
    not trained. Raises JobError."""
    if not task.parts:
        yield task
        return
    folder, leads = process.home / "assembled", process.rank == 0
    if leads:
        # Of an attempt that was killed.
        shutil.rmtree(folder, ignore_errors=True)
    try:
        process.reporter.phase("loading")
        layouts = [_Part.of(process, saved, part).bring(folder / "state") for part, saved in enumerate(task.parts)]
        write = partial(_write, process, job, dtype, folder, layouts[0])
        if (failure := first_failure(write if leads else lambda: None)) is not None:
            raise JobError(f"the weights of the state are not used: {failure}")
        yield replace(task, weights=str(folder / "weights"), parts=[])
    finally:
        if leads:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Part:
    process: TrainingProcess
    owner: int
    folder: Path
    manifest: StateManifest

    @classmethod
    def of(cls, process: TrainingProcess, saved: Sequence[str], part: int) -> _Part:
        """`saved`: as in Task.parts. Raises JobError, on all ranks, where it is not as it was saved."""
        node, folder, digest = saved
        owner = next((rank.rank for rank in process.spec.ranks if rank.node == node), None)
        if owner is None:
            raise JobError(f"{node} has a part of the state, and does not take part")
        text = ""

        def verify() -> None:
            nonlocal text
            if owner == process.rank:
                text = read_regular(Path(folder) / f"manifest-{part}.json").decode(errors="replace")
                manifest = StateManifest.from_json(text.encode())
                if manifest.journal_entry()["manifest"] != digest:
                    raise CheckpointError("its manifest is not the one that it was saved with")
                for entry in manifest.files:
                    verify_file(Path(folder), entry, check_hash=True)
                    process.reporter.going_on()

        if (failure := first_failure(verify)) is not None:
            raise JobError(f"the part of the state in {folder} on {node} is not used: {failure}")
        manifest = StateManifest.from_json(str(all_gather_object(text)[owner]).encode())
        return cls(process, owner, Path(folder), manifest)

    def bring(self, target: Path) -> str:
        """Its files to rank 0's `target`; the layout of the state. Raises JobError, on all ranks."""
        for entry in self.manifest.files:
            if (failure := first_failure(partial(self._bring, entry, target))) is not None:
                raise JobError(f"{entry.name} of the state in {self.folder} cannot be brought to rank 0: {failure}")
        return self.manifest.layout

    def _bring(self, entry: FileEntry, target: Path) -> None:
        leads, path = self.process.rank == 0, target / entry.name
        if self.owner > 0:
            send_file(self.folder, target if leads else None, entry, self.owner, self.process.reporter.going_on)
        elif leads:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            link(str(self.folder / entry.name), str(path))
        self.process.reporter.going_on()


def _write(process: TrainingProcess, job: Job, dtype: torch.dtype, folder: Path, layout: str) -> None:
    """Make what `from_pretrained` of transformers or peft loads, as the training saves it. Raises CheckpointError,
    OSError, JobError."""
    weights = read_weights(folder / "state", layout)
    process.reporter.going_on()
    model = load_model(job, dtype)
    process.reporter.going_on()
    if (why := _misfit(weights, model)) is not None:
        raise CheckpointError(why)
    if job.fine_tune_type == "full":
        # It has those of the trained layers alone.
        model.load_state_dict(weights, strict=False)
        weights = model.state_dict()
    target = folder / "weights"
    TrainedFolder(target, model, load_tokenizer(job)).save([target], weights, {"run": job.home.name})
    process.reporter.going_on()


def _misfit(weights: Mapping[str, Tensor], model: Any) -> str | None:
    """Why `weights` are not all that is trained of `model`, and nothing else."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    saved, whole = ({name: value.shape for name, value in held.items()} for held in (weights, model.state_dict()))
    if (why := misfit(saved, whole, trained)) is not None:
        return why
    # One that is tied has several names.
    present = {parameter for name, parameter in model.named_parameters(remove_duplicate=False) if name in weights}
    lacking = [name for name, parameter in trained.items() if parameter not in present]
    return f"{len(lacking):,} of {len(trained):,} tensors are missing, such as {lacking[0]}" if lacking else None
