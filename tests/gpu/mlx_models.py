"""What the MLX parts train: models of public shapes with random weights, and examples of one length."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.node.bootstrap import make_private
from tests.bench.known_sizes import QWEN3_4B
from tests.gpu.part import Completed, Visit

_WORKERS: Final = {
    "trainings": "tests.gpu.mlx_worker",
    "models": "tests.gpu.mlx_worker",
    "hang": "tests.gpu.mlx_worker",
    "saved": "tests.gpu.mlx_worker",
}
"""By task; the others are of tests.gpu.mlx_device."""
_START: Final = """
import runpy, sys
sys.modules["torch"] = None
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a worker. transformers, which mlx-lm imports, would import PyTorch, too: seconds for each process."""
_QWEN2: Final[dict[str, Any]] = {
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN2_0B5: Final[dict[str, Any]] = {
    **_QWEN2,
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "intermediate_size": 4_864,
    "num_attention_heads": 14,
}
QWEN2_1B5: Final[dict[str, Any]] = {
    **_QWEN2,
    "hidden_size": 1_536,
    "num_hidden_layers": 28,
    "intermediate_size": 8_960,
    "num_attention_heads": 12,
}
QWEN3_4B_WHOLE: Final[dict[str, Any]] = {
    **_QWEN2,
    **QWEN3_4B,
}
SMALL: Final[dict[str, Any]] = {
    **_QWEN2,
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 2,
}
"""For what the CPU computes, too: heads of 64 as in the larger ones."""
MEDIUM: Final[dict[str, Any]] = {**SMALL, "hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1_536}
"""25 million parameters."""


@dataclass(frozen=True)
class Cell:
    """One training."""

    size: str
    kind: str
    """lora or full."""
    batch: int
    odd: bool = False
    """Of one input less: 2,047 with mlx-lm's default max_seq_length, no multiple of 128 as cuDNN wants it."""

    @property
    def name(self) -> str:
        return f"{self.size}, {self.kind}, batch {self.batch}{', one token less' if self.odd else ''}"


@dataclass(frozen=True)
class Grid:
    """The trainings that are compared, in bfloat16; the least valuable size last, for which the time may not reach."""

    configs: Mapping[str, Mapping[str, Any]]
    cells: tuple[Cell, ...]
    tokens: int
    """Of each example that are learned from: one more goes in."""

    def of_size(self, size: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.size == size]


GRID: Final = Grid(
    {"0.5 B": QWEN2_0B5, "4 B": QWEN3_4B_WHOLE, "1.5 B": QWEN2_1B5},
    (
        Cell("0.5 B", "lora", 1),
        Cell("0.5 B", "lora", 8),
        Cell("0.5 B", "full", 1),
        Cell("0.5 B", "lora", 4, odd=True),
        Cell("0.5 B", "full", 8),
        Cell("1.5 B", "lora", 4),
        Cell("1.5 B", "full", 4),
        Cell("4 B", "lora", 2),
        Cell("4 B", "full", 1),
    ),
    2_048,
)
DRY_GRID: Final = Grid(
    {"tiny": SMALL}, (Cell("tiny", "lora", 1), Cell("tiny", "lora", 1, odd=True), Cell("tiny", "full", 4)), 64
)
EXAMPLES: Final = 8


def kernels() -> dict[str, str]:
    """The environment in which MLX finds the kernels that CUDA's compiler has built for an earlier part."""
    make_private(folder := Path(tempfile.gettempdir()) / f"flightdeck-gpu-{os.getuid()}")
    return {"MLX_PTX_CACHE_DIR": str(folder)}


def grid(visit: Visit) -> Grid:
    return DRY_GRID if visit.dry else GRID


@dataclass(frozen=True)
class Asked:
    """What the worker has answered before it ended, in whichever way."""

    answers: list[dict[str, Any]]
    completed: Completed

    @property
    def failure(self) -> str | None:
        """The last line of what it said, where it did not end well."""
        if self.completed.code == 0:
            return None
        if self.completed.timed_out:
            return f"killed after {self.completed.seconds:.0f} s"
        lines = self.completed.errors.strip().splitlines()
        return f"exit code {self.completed.code}: {lines[-1][:300] if lines else 'it printed nothing'}"


def ask(
    visit: Visit,
    task: str,
    request: Mapping[str, Any],
    *,
    limit_s: float | None = None,
    env: Mapping[str, str] | None = None,
) -> Asked:
    """One task of a worker. On the CPU nothing is compiled: each kernel would take g++ a third of a second."""
    given = {**({"MLX_DISABLE_COMPILE": "1"} if visit.dry else kernels()), **(env or {})}
    completed = visit.call(
        [visit.python, "-c", _START, _WORKERS.get(task, "tests.gpu.mlx_device"), task, json.dumps(request)],
        limit_s=limit_s,
        env=given,
    )
    asked = Asked([json.loads(line) for line in completed.output.splitlines() if line.startswith("{")], completed)
    if asked.failure is not None:
        visit.record(f"{task}: {asked.failure}", completed.errors)
    return asked


@dataclass
class Models:
    """Models and data in the part's own folder, written when they are first needed."""

    visit: Visit
    _written: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        return self.visit.scratch

    def write(self, configs: Mapping[str, Mapping[str, Any]], tokens: Sequence[int]) -> None:
        """Each under its name (see `model`), and data of examples of so many learned tokens. Raises RuntimeError."""
        if self._written.issuperset(configs):
            return
        lacking = {self._key(name): dict(config) for name, config in configs.items() if name not in self._written}
        request = {"folder": str(self.folder), "configs": lacking, "examples": EXAMPLES}
        asked = ask(self.visit, "models", request | {"tokens": [count + 1 for count in tokens]})
        if asked.failure is not None:
            raise RuntimeError(f"the models could not be written: {asked.failure}")
        self._written |= set(configs)

    def describe(self, name: str, config: Mapping[str, Any]) -> None:
        """Its config.json alone, all that a plan reads."""
        self.model(name).mkdir()
        (self.model(name) / "config.json").write_text(json.dumps(config))

    def model(self, name: str) -> Path:
        return self.folder / self._key(name)

    def data(self, tokens: int) -> Path:
        return self.folder / f"tokens-{tokens + 1}"

    def job_of(self, cell: Cell, tokens: int, **keys: Any) -> dict[str, Any]:
        length = {"max_seq_length": tokens} if cell.odd else {}
        return self.job(cell.size, cell.kind, cell.batch, tokens, **length, **keys)

    def job(self, name: str, kind: str, batch: int, tokens: int, **keys: Any) -> dict[str, Any]:
        """[job] in mlx-lm's keys, which stock takes, too; `keys` win."""
        return {
            "model": str(self.model(name)),
            "data": str(self.data(tokens)),
            "fine_tune_type": kind,
            "num_layers": -1,
            "batch_size": batch,
            "iters": 100_000,
            "learning_rate": 1e-5,
            "steps_per_report": 3,
            "save_every": 1_000_000,
            "val_batches": 0,
            "max_seq_length": tokens + 1,
            **keys,
        }

    @staticmethod
    def _key(name: str) -> str:
        return name.replace(" ", "").replace(",", "-")


STOCK_FORM: Final = {"optimizer_precision": "parameter", "moments": "float32"}
"""The optimizer's state as stock mlx-lm keeps it."""


def training(
    name: str, trainer: str, device: str, job: Mapping[str, Any], counted: tuple[int, float]
) -> dict[str, Any]:
    """One run of the worker's `trainings`; `counted`: the least reports and seconds after the warm-up."""
    form, (reports, seconds) = STOCK_FORM if trainer == "ours" else {}, counted
    return {
        "name": name,
        "trainer": trainer,
        "device": device,
        "job": {**form, **job},
        "reports": reports,
        "seconds": seconds,
    }
