"""Models with made weights, their data, and trainings of them by the built-in trainer, for the PyTorch parts."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.config.mlx_lm_keys import TORCH_KEYS, with_defaults
from engine.plan.memory.shape import ModelShape
from tests.gpu.part import Visit
from tests.torch.running import TorchRun, start_torch

Result = TypeVar("Result")
SIZES: Mapping[str, tuple[int, int, int, int]] = {
    "0.2 M": (64, 2, 172, 512),
    "4 M": (256, 4, 688, 1_024),
    "34 M": (512, 8, 1_376, 8_192),
    "0.1 B": (768, 12, 2_048, 16_384),
    "0.35 B": (1_024, 24, 2_816, 32_000),
    "0.5 B": (1_280, 20, 3_456, 32_000),
    "1 B": (2_048, 16, 5_632, 32_000),
}
"""Hidden size, layers, inner size and vocabulary of a Llama."""
CLOSE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 1e-2}
"""The largest difference of a loss."""
_WORDS = ("tower", "raven", "climb", "descend", "turn", "left", "hold", "land", "level", "runway", "report", "over")


def config_of(size: str, dtype: str = "bfloat16") -> dict[str, Any]:
    """Its config.json."""
    hidden, layers, inner, words = SIZES[size]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": max(2, hidden // 64),
        "num_key_value_heads": max(2, hidden // 64),
        "vocab_size": words,
        "max_position_embeddings": 4_096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": dtype,
    }


def shape_of(size: str, dtype: str = "bfloat16") -> ModelShape:
    config = config_of(size, dtype)
    return ModelShape.from_config({**config, "torch_dtype": dtype})


def make_models(visit: Visit, *sizes: str, dtype: str = "bfloat16") -> dict[str, Path]:
    """Write models of these sizes into the part's folder. Raises RuntimeError."""
    folders = {size: visit.scratch / f"model-{size.replace(' ', '')}" for size in sizes}
    wanted = json.dumps({str(folders[size]): config_of(size, dtype) for size in sizes})
    done = visit.call([visit.python, "-m", "tests.gpu.torch_models", visit.device, wanted])
    if done.code != 0:
        raise RuntimeError(f"the models were not made: {done.errors[-500:]}")
    return folders


def write_data(folder: Path, characters: int, rows: int = 64) -> Path:
    """Texts of so many characters, which are so many tokens of the made tokenizer. Returns the folder."""
    folder.mkdir(parents=True)
    dice = random.Random(11)
    for split, count in {"train": rows, "valid": 4}.items():
        texts = (" ".join(dice.choices(_WORDS, k=characters // 4))[:characters] for _ in range(count))
        (folder / f"{split}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def job_of(model: Path, data: Path, **keys: Any) -> dict[str, Any]:
    """A job with each "auto" resolved, as the plan leaves it to the trainer; `keys` win over mlx-lm's defaults."""
    own = {"strategy": "ddp", "precision": "fp32", "val_batches": 0, "steps_per_report": 1, "grad_checkpoint": False}
    given = {**own, **keys}
    settings = with_defaults({key: value for key, value in given.items() if key != "strategy"})
    job = {**settings, **given, "model": str(model), "data": str(data), "framework": "torch", "chunking": False}
    return job | {key: None for key in TORCH_KEYS if job[key] == "auto"}


@dataclass(frozen=True)
class Trained:
    """What a training has reported. `error`: why there is none, with the end of the log; "" for one that completed."""

    error: str
    losses: Mapping[int, float]
    steps: Sequence[Mapping[str, Any]]
    start: Mapping[str, Any]
    warnings: Sequence[str]
    log: str

    @property
    def peak_bytes(self) -> int:
        """Of PyTorch's allocator on a GPU, else resident."""
        return max(int(step["peak_memory_bytes"]) for step in self.steps)


def train(  # noqa: PLR0913
    visit: Visit,
    name: str,
    job: Mapping[str, Any],
    *,
    ranks: int = 1,
    on_cpu: bool = False,
    program: str = "engine.torch_trainer.main",
) -> Trained:
    """Run the job by the trainer, without a supervisor, to its end. `name`: of its folder in the part's."""
    backend = "gloo" if on_cpu or visit.dry else "nccl"
    command = [visit.python, "-m", program]
    # float32 is float32: no TF32 in the comparison with the CPU.
    env = {"NVIDIA_TF32_OVERRIDE": "0"}
    if on_cpu:
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 4))
    run = start_torch(visit.scratch / name, job, ranks=ranks, backend=backend, command=command, env=env)
    return _observed(visit, run)


def _observed(visit: Visit, run: TorchRun) -> Trained:
    error = ""
    try:
        for process in run.processes:
            process.wait(max(1.0, visit.remaining_s - 3.0))
        codes = run.wait()
    except subprocess.TimeoutExpired:
        for process in run.processes:
            process.kill()
        codes = [process.wait(10.0) for process in run.processes]
        error = "not at its end within the part's time"
    logs = "\n".join(run.log(rank) for rank in range(len(codes)))
    failures = [event["message"] for rank in range(len(codes)) for event in run.events("failure", rank)]
    if codes != [0] * len(codes):
        error = error or next(iter(failures), "") or f"exit codes {codes}: {logs[-500:]}"
    warnings = [event["message"] for event in run.events("warning")]
    start = next(iter(run.events("start")), {})
    return Trained(error, run.losses(), run.events("step"), start, warnings, logs)


def side_by_side(calls: Sequence[Callable[[], Result]], most: int = 16) -> list[Result]:
    """The results in order, of as many at once as there are cores for, at most `most`."""
    with ThreadPoolExecutor(max_workers=max(1, min(most, os.cpu_count() or 1))) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def farthest(one: Mapping[int, float], two: Mapping[int, float]) -> float:
    """The largest difference of two runs' losses; infinite where they have other steps, or none."""
    if not one or one.keys() != two.keys():
        return float("inf")
    return max(abs(one[step] - two[step]) for step in one)
