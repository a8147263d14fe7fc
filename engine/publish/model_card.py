"""The model card (README.md) of what a run has trained: only what is known of it, and nothing of its machines but their
number and chips. For the front matter: https://huggingface.co/docs/hub/model-cards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import yaml

from engine.config.models import Config
from engine.errors import InputError, plural, reason_text
from engine.models import RunRecord, RunState
from engine.protocol.job import AUTO
from engine.publish.model_folder import ModelFolder
from engine.snapshots import ResultFile, RunResult
from engine.task_result import Evaluated, Fused, Variant

_CACHED = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+)/")
"""A model in the cache of huggingface_hub, by its owner and name."""
_LENGTH = ("iters", "epochs", "batch_size", "batch_tokens", "grad_accumulation_steps", "max_seq_length")
_UPDATES = ("learning_rate", "lr_schedule", "optimizer", "num_layers", "lora_parameters", "mask_prompt", "seed")
_NOUNS = {"lora": "LoRA adapter", "dora": "DoRA adapter", "full": "model"}


@dataclass(frozen=True)
class PublicationRequest:
    run: str
    target: str
    """"lmstudio", "ollama", "gguf" or "hub"."""
    folder: Path
    place: str | None = None
    """OWNER/NAME on the Hub, or the folder to write into; None: LM Studio's own, or the working directory."""
    private: bool = False
    base_model: str | None = None
    license: str | None = None
    progress_bars: bool = False


@dataclass(frozen=True)
class TrainedRun:
    record: RunRecord
    result: RunResult
    config: Config
    known_chips: Sequence[str]
    request: PublicationRequest
    measured: Callable[[RunRecord, ModelFolder, str | None], Iterable[Evaluated | Fused]]
    """The findings of tasks on the published weights, newest first, by their path on a node."""

    @property
    def base_on_hub(self) -> str | None:
        cached = _CACHED.search(self.config.job.model or "")
        return self.request.base_model or (f"{cached[1]}/{cached[2]}" if cached is not None else None)

    @property
    def base(self) -> str:
        """Its base model's name: the one on the Hub, else that of its folder."""
        return self.base_on_hub or PurePosixPath(self.config.job.model or "").name or "unknown"

    def saved_as(self, folder: ModelFolder) -> ResultFile | None:
        """The run's own file of these weights, if any. Raises InputError for an adapter of another run, OSError."""
        saved = [file for file in self.result.files if file.holds == folder.holds]
        matching = [file for file in saved if file.sha256 in folder.hashes.values()]
        if saved and not matching and folder.holds != "model":
            what, why = "these are not the run's weights", f"{self.record.id} has recorded no file of their SHA-256"
            raise InputError(what, where=str(folder.path), why=why, todo="fetch them again")
        return min(matching, key=lambda file: file.best, default=None)


def model_card(run: TrainedRun, folder: ModelFolder, name: str, usage: Sequence[str]) -> str:
    """Markdown. `name`: that of the publication. `usage`: commands for a shell. Raises InputError, OSError."""
    noun, saved, record = _NOUNS[run.config.job.fine_tune_type], run.saved_as(folder), run.record
    measured = [*run.measured(record, folder, saved.path if saved is not None else None)]
    what = f"A model with its {noun} fused" if folder.holds == "model" and noun != "model" else f"A {noun}"
    what = "The layers that full fine-tuning has trained" if folder.holds == "weights" else what
    checksums = [*run.result.inputs.items(), *((file, f"SHA-256 {digest}") for file, digest in folder.hashes.items())]
    end = f"**The run did not succeed: it ended as {record.state.value}** ({reason_text(record.reason) or 'unknown'})"
    end = "The run ended" if record.state is RunState.SUCCEEDED else end
    lines = ["---", yaml.safe_dump(_front_matter(run, folder), sort_keys=False).rstrip(), "---", f"# {name}", ""]
    end = f"{end} at iteration {record.iteration} of {record.iterations}."
    lines += [f"{what}, trained from {run.base} with MLX Flight Deck.", end]
    if saved is not None:
        lines.append(f"These weights were saved at iteration {saved.iteration}{', the best' * saved.best}.")
    lines += ["", "## Losses", "", *_table(("", "iteration", "loss", "perplexity"), _losses(run.result, measured))]
    if (kept := next((result.kept for result in measured if isinstance(result, Fused)), None)) is not None:
        lines += ["", f"The fused model keeps {kept:.1%} of the gain of what was trained over the base model."]
    lines += ["", "## Training", "", *_table(("", ""), _training(run)), "", "## Checksums", ""]
    lines += ["Those of the data are of its examples, that of the base model of samples of its files.", ""]
    lines += [*_table(("", ""), checksums), "", "## Use", "", "```sh", *usage, "```", ""]
    return run.config.job.redactor()("\n".join(lines))


def _front_matter(run: TrainedRun, folder: ModelFolder) -> dict[str, Any]:
    relation = ("adapter" if folder.holds == "adapter" else "finetune") if run.base_on_hub else None
    front = {"license": run.request.license, "base_model": run.base_on_hub, "base_model_relation": relation}
    tags = [folder.library, run.config.job.fine_tune_type, "flightdeck"]
    about = {"run": run.record.id, "checksums": dict(run.result.inputs)}
    rest = {"library_name": folder.library, "pipeline_tag": "text-generation", "tags": tags, "flightdeck": about}
    return {key: value for key, value in {**front, **rest}.items() if value is not None}


def _losses(result: RunResult, measured: Sequence[Evaluated | Fused]) -> Iterator[tuple[str, ...]]:
    points = (("first validation", result.first), ("best validation", result.best), ("last validation", result.last))
    rows: list[tuple[str, str, float | None]] = [("base model", "", result.base)]
    rows += [(label, str(point.iteration), point.loss) for label, point in points if point is not None]
    tasks = {task.variant: task for task in reversed(measured) if isinstance(task, Evaluated)}
    tasks = {variant: tasks[variant] for variant in get_args(Variant) if variant in tasks}
    rows += [("test", "", result.test_loss)]
    rows += [(f"{name}, {task.tokens:,} tokens of {task.split}", "", task.loss) for name, task in tasks.items()]
    for label, iteration, loss in rows:
        if loss is not None:
            yield label, iteration, f"{loss:.4f}", f"{math.exp(loss):,.3f}" if loss < 50 else ""


def _training(run: TrainedRun) -> Iterator[tuple[str, str]]:
    job, result, energy = run.config.job, run.result, run.result.energy
    chips = f" ({', '.join(run.known_chips)})" if run.known_chips else ""
    machines = f"{len({node.ssh for node in run.config.nodes})}{chips}"
    rows: dict[str, Any] = {"base model": run.base, "method": f"{job.fine_tune_type}, {job.framework}, {job.strategy}"}
    rows |= {"machines": machines, "ranks": run.record.world_size, "trained tokens": result.tokens}
    rows["seconds"] = None if result.seconds is None else round(result.seconds)
    if energy is not None:
        rows["kWh"] = f"{energy.joules / 3.6e6:.3f}, measured on {plural(len(energy.nodes), 'node')}"
    rows |= {key: job.mlx_lm.get(key) for key in _LENGTH + _UPDATES} | dict(result.versions)
    if rows["learning_rate"] == AUTO and result.learning_rate is not None and not rows["lr_schedule"]:
        # With batch_tokens the rule's rate is known to the trainer alone.
        rows["learning_rate"] = f"{result.learning_rate:.4g}"
    yield from ((name, str(value)) for name, value in rows.items() if value is not None)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
