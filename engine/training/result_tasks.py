"""The tasks on what a run has trained, as far as both frameworks do them alike: its weights measured in their variants
(base, adapter, fused) on one split; a fused model kept only when it is measured to have kept what was learned; and the
options of an answer."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from engine.protocol.job import Job, JobError, config_hash
from engine.protocol.sizes import size_text
from engine.protocol.task import KEEP, Task
from engine.training.checkpoint_files import replace_folder
from engine.training.data import RowFormat, Split, files_checksum, warn_of_truncation, with_standard_data
from engine.training.loop import sum_losses
from engine.training.process import TrainingProcess
from engine.training.reporting import Outcome, Reporter, SavedWeights

_EQUAL = 1e-3
"""Largest relative difference of two losses that are the same, where there is no gain to compare with."""
_NO_GAIN = 1e-6
"""Relative to the loss: what float32 does not show."""
VARIANTS = ("base", "adapter")
"""In the order in which they answer: what is fused cannot be taken out again."""
_UNFINISHED = ("assembled*", ".*.fusing*")
"""Folders of weights in the run's own folder that a task removes at its end, unless it is killed."""
Conversation = list[dict[str, str]]
"""Messages with `role` and `content`."""


@dataclass(frozen=True)
class GenerateOptions:
    """Task.options."""

    prompts: list[str | Conversation]
    """Each a user's message, or a conversation."""
    variants: list[str] = field(default_factory=lambda: [*VARIANTS])
    max_tokens: int = 256
    temperature: float = 0.0
    """0: the most probable token, always."""
    top_p: float = 1.0
    seed: int = 0
    """Set anew before each answer."""
    raw: bool = False
    """Without the tokenizer's chat template."""

    @classmethod
    def of(cls, task: Task) -> GenerateOptions:
        """Raises JobError."""
        options = cls(**task.options)
        if "adapter" in options.variants and task.weights is None:
            raise JobError("the run has saved no weights: only the base model can answer")
        return options


@dataclass(frozen=True)
class LmEvalOptions:
    """Task.options."""

    tasks: list[str]
    num_fewshot: int | None = None
    """None: as each task says."""
    limit: int | None = None
    """Examples of each task."""
    include_path: str | None = None
    """A folder of further tasks on the node."""
    apply_chat_template: bool = False

    def measure(self, lm: Any, variant: str, reporter: Reporter) -> None:
        """Report each score of `lm`, which answers lm-eval. Raises JobError."""
        # The node's, and only this needs it.
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        reporter.phase("validating")
        manager = TaskManager(include_path=self.include_path)
        if lacking := [name for name in self.tasks if not manager.match_tasks([name])]:
            raise JobError(f"lm-eval has no task {', '.join(lacking)}")
        chosen = {name: value for name, value in vars(self).items() if name != "include_path"}
        measured = simple_evaluate(lm, task_manager=manager, log_samples=False, **chosen)
        for task, figures in measured["results"].items():
            for key, value in figures.items():
                metric, _, rest = key.partition(",")
                if not rest or metric.endswith("_stderr") or not isinstance(value, float):
                    continue
                stderr = figures.get(f"{metric}_stderr,{rest}")
                name = metric if rest == "none" else key
                about = {"task": task, "metric": name, "stderr": stderr if isinstance(stderr, float) else None}
                reporter.event("result", kind="score", variant=variant, value=value, **about)
                reporter.print(f"{variant}: {task} {name} {value:.4f}")


class TaskStopped(Exception):
    """The task was asked to stop in the middle of what it does."""


def remove_leftovers(home: Path) -> None:
    """Remove the unfinished weights of tasks on this node that were killed. Those of `home`, this task's run, are its
    own from now on: it holds the lock there until its process ends. Nothing on a disk that knows no locks."""
    lock = "task.lock"
    with contextlib.suppress(OSError):
        fcntl.flock(os.open(home / lock, os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_SH)
    for left in [folder for name in _UNFINISHED for folder in home.parent.glob(f"*/{name}") if folder.parent != home]:
        # Held by a task that goes on.
        with contextlib.suppress(OSError), (left.parent / lock).open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def messages_of(prompt: str | Conversation) -> Conversation:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def evaluated_split(job: Job, task: Task, form: RowFormat, reporter: Reporter) -> tuple[str, Split]:
    """The split that the task names, else the test split, else the one for validation. Raises JobError."""
    job = with_standard_data(job)
    names = [task.options["split"]] if task.options.get("split") else ["test", "valid"]
    for name in names:
        if len(examples := Split(job, name, form, partial(warn_of_truncation, job, reporter), reporter.going_on)):
            return name, examples
    files = " and ".join(f"{name}.jsonl" for name in names)
    raise JobError(f"{job.data} has no examples to evaluate on: {files} missing or empty")


@dataclass(frozen=True)
class MeasuredVariants(ABC):
    """Every call is made by every rank."""

    process: TrainingProcess
    job: Job
    task: Task
    split: str
    examples: Split

    @property
    def facts(self) -> dict[str, object]:
        """All that must be the same on every rank. Raises OSError."""
        data, model = f"{self.split}.jsonl {self.examples.checksum:08x}", files_checksum(self.job, adapter=False)
        configuration = config_hash(self.process.spec.job or {})
        return {"the job's configuration": configuration, "the model": model, "the data": data}

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """Rank 0's. Raises PeerLost."""

    @abstractmethod
    def _sum(self, values: list[float]) -> list[float]:
        """The sums over all ranks."""

    @abstractmethod
    def _load(self, path: Path | None) -> Any:
        """As `measure`."""

    @abstractmethod
    def _losses(self, model: Any) -> Iterator[tuple[float, int]]:
        """This rank's part of each batch: the sum of cross-entropies, and the number of targets. `model`: as loaded."""

    def measure_all(self) -> None:
        """Measure those that the task asks for, by default all that there are, and end. Raises JobError, PeerLost."""
        paths, fused = {"base": "", "adapter": self.task.weights}, self.task.fused
        # It may be gone since.
        if fused is not None and self.broadcast(Path(fused).is_dir()):
            paths["fused"] = fused
        present = {name: Path(path) if path else None for name, path in paths.items() if path is not None}
        chosen = self.task.options.get("variants") or present
        if lacking := [name for name in chosen if name not in present]:
            raise JobError(f"there is nothing to evaluate as {', '.join(lacking)}, only {', '.join(present)}")
        self.end(stopped=any(self.measure(name, present[name]) is None for name in chosen))

    def wait(self) -> None:
        """For all ranks: the first one to exit would take the others down."""
        self._sum([0.0])

    def end(self, *, stopped: bool) -> None:
        self.wait()
        self.process.reporter.end(Outcome(not stopped, stopped, 0))

    def measure(self, variant: str, path: Path | None) -> float | None:
        """The mean cross-entropy over all targets, reported by rank 0; None when stopped. `path`: of what was trained,
        or of a model's directory, on rank 0's node; None: the job's model. Raises JobError, PeerLost."""
        reporter = self.process.reporter
        reporter.phase("loading")
        model = self._load(path)
        reporter.phase("validating")
        started = time.perf_counter()
        total, tokens, stopped = sum_losses(self._losses(model), self._sum, self.process.control, reporter)
        seconds = time.perf_counter() - started
        # One model at a time: the next one takes its place.
        del model
        gc.collect()
        if stopped:
            return None
        if not tokens:
            raise JobError(f"no row of {self.split}.jsonl has a target: there is nothing to evaluate")
        loss = total / tokens
        if self.process.rank == 0:
            measured = {"loss": loss, "perplexity": float(np.exp(loss)), "tokens": tokens, "seconds": seconds}
            reporter.event("result", kind="evaluation", variant=variant, split=self.split, **measured)
            reporter.print(f"{variant}: {self.split} loss {loss:.4f}, perplexity {measured['perplexity']:.3f}")
        return loss

    def _batches(self) -> Iterator[Any]:
        limit = self.task.options.get("batches")
        return self.examples.fixed_batches(self.job.batch_size, self.job.seed, -1 if limit is None else limit)


@dataclass(frozen=True)
class FusionResult:
    kept: float | None
    """Share of the gain; None without a gain."""
    accepted: bool
    why: str | None
    """Why it is not accepted, or that there was no gain."""

    @classmethod
    def of(cls, base: float, adapter: float, fused: float, *, keep: float, rounding: str) -> FusionResult:
        """From the three losses. `rounding`: what fusing did to the weights."""
        gain = base - adapter
        if not gain > _NO_GAIN * abs(base):
            equal = abs(fused - adapter) <= _EQUAL * abs(adapter)
            why = f"there is no gain to keep: the loss is {adapter:.4f} with the adapter and {base:.4f} without"
            return cls(None, equal, why if equal else f"{why}, but {fused:.4f} fused ({rounding})")
        kept = (base - fused) / gain
        losses = f"the loss is {base:.4f} without the adapter, {adapter:.4f} with it, {fused:.4f} fused"
        why = f"{rounding} kept {kept:.1%} of the gain, less than {100 * keep:g}%: {losses}"
        return cls(kept, kept >= keep, None if kept >= keep else why)


@dataclass(frozen=True)
class FusionTask(ABC):
    """Rank 0 writes the model, all measure it."""

    variants: MeasuredVariants

    @property
    def source(self) -> Path:
        """The weights to fuse. Raises JobError."""
        if self.variants.task.weights is None:
            raise JobError("there are no weights to fuse")
        return Path(self.variants.task.weights)

    @property
    def target(self) -> Path:
        return Path(self.variants.task.options.get("path") or self.variants.process.home / "fused").expanduser()

    @property
    def scratch(self) -> Path:
        """Where the model is until it has been measured; always the same, so that a killed fusion's is found."""
        return self.target.with_name(f".{self.target.name}.fusing")

    @property
    @abstractmethod
    def _model_bytes(self) -> int:
        """Bytes of the weights that will be written. Raises JobError, OSError."""

    @abstractmethod
    def _write(self) -> tuple[SavedWeights, str] | tuple[None, None]:
        """On rank 0: write the model into `scratch`, in bounded memory; with what that did to the weights ("rounding to
        bfloat16"). None when stopped. Raises JobError, OSError."""

    def _choices(self) -> list[dict[str, Any]]:
        """Other forms, each with its bytes of weights: none where the base is not quantized."""
        return []

    def run_to_end(self) -> None:
        """Raises JobError, also where the fused model is not accepted, PeerLost, OSError."""
        try:
            result = self._run()
            if result is not None and not result.accepted:
                self.variants.wait()
                raise JobError(str(result.why))
            self.variants.end(stopped=result is None)
        finally:
            if self.variants.process.rank == 0:
                shutil.rmtree(self.scratch, ignore_errors=True)

    def _run(self) -> FusionResult | None:
        """Fuse and measure, on every rank; None when stopped."""
        leads, measure = self.variants.process.rank == 0, self.variants.measure
        if leads and self.target.exists():
            raise JobError(f"{self.target} exists already: remove it, or name another path")
        if leads:
            # Before anything is measured.
            self._make_room(self._model_bytes)
        source = self.source
        if (base := measure("base", None)) is None or (adapter := measure("adapter", source)) is None:
            return None
        self.variants.process.reporter.phase("saving")
        saved, rounding = self._write() if leads else (None, None)
        rounding = self.variants.broadcast(rounding)
        if rounding is None or (fused := measure("fused", self.scratch)) is None:
            return None
        keep = self.variants.task.options.get("keep")
        result = FusionResult.of(base, adapter, fused, keep=KEEP if keep is None else keep, rounding=rounding)
        if saved is not None:
            self._report(saved, result)
        return result

    def _report(self, saved: SavedWeights, result: FusionResult) -> None:
        reporter = self.variants.process.reporter

        def take() -> SavedWeights:
            replace_folder(self.scratch, self.target)
            return replace(saved, path=self.target, folder=self.target)

        if result.accepted:
            reporter.save(0, self.target, take, last=True)
        choices = [] if result.accepted else self._choices()
        facts = {"path": str(self.target), "bytes": saved.bytes, **asdict(result), "choices": choices}
        reporter.event("result", kind="fused", **facts)
        reporter.print(f"{'fused' if result.accepted else 'not fused'}{f': {result.why}' if result.why else ''}")

    def _make_room(self, needed: int) -> None:
        """For a model of so many bytes in `scratch`, which is made anew. Raises JobError, OSError."""
        folder = self.target.parent
        for left in (self.scratch, *folder.glob(f".{self.scratch.name}.*")):
            shutil.rmtree(left, ignore_errors=True)
        try:
            self.scratch.mkdir(parents=True)
        except OSError as error:
            raise JobError(f"{self.target} cannot be made: {error.strerror}") from error
        if (free := shutil.disk_usage(folder).free) < needed:
            missing = size_text(needed - free)
            raise JobError(f"the fused model needs {size_text(needed)}, {missing} more than {folder} has free")
