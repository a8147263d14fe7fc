"""Tasks on trained weights: those of a few updates in this process, and a task's ranks, here or on a ring.

python -m tests.training.task_runs DIRECTORY      (one rank of the ring; see `run_on_ring`)
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import load, quantize_model, save

from engine.protocol.attempt import AttemptSpec, RankSpec
from engine.protocol.events import EventWriter
from engine.protocol.job import Job, JobError
from engine.protocol.task import Task
from engine.trainer.collective import Collective
from engine.trainer.fused_model import fuse
from engine.trainer.model import load_model, row_format
from engine.trainer.strategies.data_parallel import DataParallel
from engine.trainer.variants import Variants
from engine.trainer.weights import scalar, write_safetensors
from engine.training.data import DataLoader, Split
from engine.training.process import Control, TrainingProcess
from engine.training.reporting import Reporter
from tests.training import kinds
from tests.training.partitioned_cases import run_ranks
from tests.training.tiny import Tiny

Events = list[dict[str, Any]]


def make_model(kind: str, directory: Path, tiny: Tiny, dtype: mx.Dtype = mx.float32, **keys: Any) -> Path:
    """A tiny model of an architecture, with the tiny one's tokenizer; `keys` of its configuration win."""
    directory.mkdir(parents=True)
    for file in tiny.model.glob("tokenizer*"):
        shutil.copy(file, directory)
    vocabulary = json.loads((tiny.model / "config.json").read_text())["vocab_size"]
    config = {**kinds.config(kind, tied=False), "vocab_size": vocabulary, **keys}
    (directory / "config.json").write_text(json.dumps(config))
    architecture = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(5)
    model: nn.Module = architecture.Model(architecture.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
    return directory


def quantize(source: Path, target: Path, wider: str = "none") -> Path:
    """A copy in 4 bits by mlx-lm's own functions; the layers whose names end so in 8."""
    model, tokenizer, config = load(str(source), return_config=True)
    wide = {"group_size": 32, "bits": 8}
    model, config = quantize_model(
        model, config, 32, 4, quant_predicate=lambda name, _: wide if name.endswith(wider) else True
    )
    save(target, source, model, tokenizer, config)
    return target


def train(job: dict[str, Any], target: Path) -> Path:
    """Train one rank for the job's iterations, and write its weights as the trainer does."""
    home = target.parent
    loaded = Job.from_spec(job, model=None, data=None, workdir=home, home=home)
    model, tokenizer = load_model(loaded)
    examples = Split(loaded, "train", row_format(loaded, tokenizer), lambda _: None)
    loader = DataLoader(examples, loaded, [1.0], 0, Reporter(EventWriter(None, 0, 1)))
    training = DataParallel(loaded, model, loader, Collective("ring", 1, 0))
    model.train()
    for position in range(loaded.iters):
        step = training.accumulate(position, last=True)
        training.exchange([])
        training.apply(step.tokens)
    weights = training.trained_weights()
    write_safetensors(target, weights.entries, weights.arrays)
    return target


def run_rank(home: Path, job: dict[str, Any], task: Task, collective: Collective, *, stop: bool = False) -> Events:
    """One rank's part of a task; its events. With `stop` it has been asked to stop."""
    home.mkdir(parents=True, exist_ok=True)
    rank, size = collective.rank, collective.size
    ranks = [RankSpec(number, f"n{number}", sys.executable, str(home)) for number in range(size)]
    spec = AttemptSpec("run", 1, "nonce", "ring", size, ranks, job, task=asdict(task))
    path, control = home / f"rank{rank}.events.jsonl", Control()
    if stop:
        control.stop.set()
    process = TrainingProcess(spec, home, rank, control, Reporter(EventWriter(path, rank, 1)))
    if task.kind == "fuse":
        try:
            fuse(process, collective)
        except JobError as error:
            verdicts = [event for event in read_events(path) if event.get("kind") == "fused"]
            if rank == 0 and [event["why"] for event in verdicts] != [str(error)]:
                raise
        else:
            assert not any(event.get("accepted") is False for event in read_events(path)), "its run has succeeded"
    else:
        Variants.of(process, collective).measure_all()
    return read_events(path)


def read_events(path: Path) -> Events:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_here(home: Path, job: dict[str, Any], task: Task, *, stop: bool = False) -> Events:
    """A task on one rank, in this process."""
    return run_rank(home, job, task, Collective("ring", 1, 0), stop=stop)


def run_on_ring(directory: Path, ranks: int, cases: dict[str, tuple[dict[str, Any], Task]]) -> dict[str, list[Events]]:
    """Tasks, one after the other, on so many ranks of a ring; by name, the events of each rank."""
    directory.mkdir(parents=True)
    described = {name: [job, asdict(task)] for name, (job, task) in cases.items()}
    (directory / "cases.json").write_text(json.dumps(described))
    run_ranks("tests.training.task_runs", directory, ranks)
    return {
        name: [read_events(directory / name / f"rank{rank}.events.jsonl") for rank in range(ranks)] for name in cases
    }


def stock_loss(model: Path, rows: Path, adapters: Path | None = None) -> float:
    """The mean cross-entropy over all targets of a file of texts, by stock mlx-lm and MLX, row by row."""
    loaded, tokenizer = load(str(model), adapter_path=str(adapters) if adapters else None)
    total, targets = 0.0, 0
    for line in rows.read_text().splitlines():
        tokens = mx.array([[*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_token_id]])
        logits = loaded(tokens[:, :-1]).astype(mx.float32)
        total += scalar(nn.losses.cross_entropy(logits, tokens[:, 1:]).sum())
        targets += tokens.size - 1
    return total / targets


def losses(events: Events) -> dict[str, float]:
    """By variant."""
    return {event["variant"]: event["loss"] for event in events if event.get("kind") == "evaluation"}


def verdict(events: Events) -> dict[str, Any]:
    (judged,) = [event for event in events if event.get("kind") == "fused"]
    return judged


def main(directory: Path) -> None:
    mx.set_default_device(mx.cpu)
    mx.disable_compile()
    collective = Collective("ring", int(os.environ["RANKS"]), int(os.environ.get("MLX_RANK", "0")))
    for name, (job, task) in json.loads((directory / "cases.json").read_text()).items():
        run_rank(directory / name, job, Task(**task), collective)
    collective.barrier()
    # Past MLX's own end, which may wait for peers that are gone.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
