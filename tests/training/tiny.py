"""A model so small that a step takes a hundredth of a second, with its data in each form that mlx-lm reads."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from engine.protocol.job import Job
from tests.demo_copies import made_demo

WORDS = ("tower", "raven", "climb", "descend", "turn", "left", "hold", "land", "level", "runway", "report", "over")


@dataclass(frozen=True)
class Tiny:
    """Where the model and the data lie."""

    model: Path
    text: Path
    chat: Path
    completions: Path

    def job(self, **keys: Any) -> dict[str, Any]:
        """A full fine-tuning job of 8 iterations; `keys` win."""
        return {
            "model": str(self.model),
            "data": str(self.text),
            "fine_tune_type": "full",
            "batch_size": 8,
            "iters": 8,
            "learning_rate": 1e-3,
            "steps_per_report": 4,
            "val_batches": 0,
            "max_seq_length": 128,
            **keys,
        }


SCHEDULE = {"name": "cosine_decay", "warmup": 3, "warmup_init": 1e-7, "arguments": [3e-3, 30, 1e-5]}
UNEQUAL = (3.0, 1.0)


def undisturbed_job(tiny: Tiny, **keys: Any) -> dict[str, Any]:
    """The job of the fixture `undisturbed`: 30 iterations, validated three times, saved on the way."""
    own = {"iters": 30, "lr_schedule": SCHEDULE, "steps_per_report": 10, "save_every": 20}
    return tiny.job(**{**own, "val_batches": -1, "steps_per_eval": 15, **keys})


def make_job(tiny: Tiny, home: Path, **keys: Any) -> Job:
    return Job.from_spec(tiny.job(**keys), model=None, data=None, workdir=home, home=home)


def write_split(directory: Path, rows: Callable[[random.Random], dict[str, Any]], counts: dict[str, int]) -> None:
    directory.mkdir(parents=True)
    dice = random.Random(11)
    for split, count in counts.items():
        write_rows(directory / f"{split}.jsonl", (rows(dice) for _ in range(count)))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentence(dice: random.Random, shortest: int = 3, longest: int = 30) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(dice.randint(shortest, longest)))


def make_tiny(home: Path) -> Tiny:
    """Below `home`."""
    shrunk = home / "model"
    shutil.copytree(made_demo() / "model", shrunk)
    config = json.loads((shrunk / "config.json").read_text())
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    (shrunk / "config.json").write_text(json.dumps(config))
    write_weights(shrunk, config)
    counts = {"train": 61, "valid": 13, "test": 11}
    write_split(home / "text", lambda dice: {"text": sentence(dice)}, counts)
    write_split(
        home / "chat",
        lambda dice: {
            "messages": [
                {"role": "user", "content": sentence(dice)},
                {"role": "assistant", "content": sentence(dice)},
            ]
        },
        counts,
    )
    write_split(home / "completions", lambda dice: {"prompt": sentence(dice), "completion": sentence(dice)}, counts)
    return Tiny(shrunk, home / "text", home / "chat", home / "completions")


def write_weights(directory: Path, config: dict[str, Any], seed: int = 3) -> None:
    """Random float32 weights for `config`."""
    mx.random.seed(seed)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})
