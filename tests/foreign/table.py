"""The foreign programs: how each is started, how its metrics are read, and where it has its own account of them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "programs"
Losses = dict[int, float]
"""Step -> loss."""


def kept(folder: Path, output: str) -> Losses:
    """What a program of SCRIPTS has written down, from the values in its memory."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def trainer_state(folder: Path, output: str) -> Losses:
    """What transformers' Trainer has saved."""
    newest = max((folder / "out").rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return {row["step"]: row["loss"] for row in json.loads(newest.read_text())["log_history"] if "loss" in row}


def printed(form: str, folder: Path, output: str) -> Losses:
    """Read from its output without colours, as its source says that it prints: two groups, step and loss."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    return {int(step): float(loss) for step, loss in re.findall(form, plain)}


@dataclass(frozen=True)
class Program:
    """`kind`: script, trainer (a library's own loop) or mlx."""

    name: str
    kind: str
    command: tuple[str, ...]
    """`{steps}` stands for how long it trains, in its own unit."""
    read_as: str | None
    """As `flightdeck metrics --try` names the form; None: it prints no loss."""
    total: int | None = None
    """The steps of a training of `steps`, where the program prints them."""
    steps: int = 20
    needs: str = "torch"
    """An ability of tests.needs: "foreign" for its own packages."""
    own: Callable[[Path, str], Losses] = kept
    """The program's own account, from its working directory and rank 0's output."""
    saved: str | None = None
    """Files of the checkpoint with which the same command goes on; None: it always begins anew."""
    precision: float = 1e-4
    """Of what it prints: relative, and absolute."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of [job]."""
    stays: str | None = None
    """What rank 1 prints last in the runs in which its process never ends."""

    @property
    def framework(self) -> str:
        return "mlx" if self.kind == "mlx" else "torch"

    def words(self, steps: int) -> tuple[str, ...]:
        return tuple(word.format(steps=steps) for word in self.command)


_MLX_LM = shlex.split(
    "--model model --train --data data --iters {steps} --batch-size 4 --num-layers 1 --steps-per-report 2 "
    "--steps-per-eval 100000 --val-batches 1 --max-seq-length 64 --adapter-path adapters"
)
_SFT = shlex.split(
    "--model_name_or_path model --dataset_name data --output_dir out --max_steps {steps} --logging_steps 2 "
    "--save_steps {steps} --report_to none --use_cpu --bf16 false --max_length 64 --per_device_train_batch_size 2 "
    "--gradient_checkpointing false"
)

PROGRAMS = (
    Program("nanoGPT", "script", ("torchrun", "nanogpt.py", "--max_iters={steps}"), "nanoGPT", saved="ckpt.pt"),
    Program("DDP tutorial", "script", ("torchrun", "ddp_tutorial.py", "{steps}"), None, saved="snapshot.pt"),
    Program("minGPT-ddp", "script", ("torchrun", "mingpt_ddp.py", "{steps}"), "step and loss", steps=30),
    Program(
        "ImageNet",
        "script",
        ("torchrun", "imagenet.py", "--epochs={steps}", "--resume", "checkpoint.pth.tar"),
        "PyTorch ImageNet",
        steps=2,
        saved="checkpoint.pth.tar",
        precision=1e-4,
    ),
    Program(
        "quickstart",
        "script",
        ("torchrun", "quickstart.py", "{steps}"),
        "[job] metrics",
        total=20,
        job={"metrics": r"loss: (?P<loss>[\d.]+)  \[ *(?P<step>\d+)/ *(?P<total>\d+)\]"},
    ),
    Program(
        "accelerate's checkpointing",
        "script",
        ("accelerate", "launch", "--cpu", "accelerate_checkpointing.py", "{steps}"),
        "progress bar",
        total=20,
        saved="states/step_*/random_states_1.pkl",
        precision=2e-2,
    ),
    Program(
        "DeepSpeed's cifar",
        "script",
        ("deepspeed", "deepspeed_cifar.py", "--deepspeed", "--epochs={steps}"),
        "PyTorch CIFAR-10",
        steps=2,
        saved="saved/latest",
        precision=1e-3,
    ),
    Program(
        "transformers' Trainer",
        "trainer",
        ("torchrun", "trainer.py", "{steps}"),
        "dict",
        total=20,
        own=trainer_state,
        saved="out/checkpoint-*/trainer_state.json",
        precision=1e-3,
    ),
    Program(
        "trl's sft",
        "trainer",
        ("accelerate", "launch", "-m", "trl.scripts.sft", *_SFT),
        "dict",
        total=20,
        needs="foreign",
        own=trainer_state,
        precision=1e-3,
        # PyTorch 2.13 frees DDP's reducer with the GIL held; that joins gloo's thread, which may be waiting for the GIL
        # to free a tensor. So under torchrun itself, too. Rank 0, which has a model to save after the last exchange, is
        # late enough for it.
        stays="Model saved to out",
    ),
    Program(
        "Lightning",
        "trainer",
        ("python", "lightning_ddp.py", "{steps}"),
        "progress bar",
        needs="foreign",
        saved="ckpts/last.ckpt",
        precision=1e-2,
    ),
    Program(
        "mlx_lm.lora",
        "mlx",
        ("mlx_lm.lora", *_MLX_LM),
        "mlx-lm",
        total=20,
        needs="linux",
        own=partial(printed, r"(?m)^ {2,8}(\d+) {4}(\d+\.\d+) [▲▼]"),
    ),
    Program(
        "python -m mlx_lm lora",
        "mlx",
        ("python", "-m", "mlx_lm", "lora", *_MLX_LM),
        "mlx-lm",
        total=20,
        needs="linux",
        own=partial(printed, r"(?m)^ {2,8}(\d+) {4}(\d+\.\d+) [▲▼]"),
    ),
    Program(
        "MLX's transformer_lm",
        "mlx",
        ("python", "transformer_lm.py", "{steps}"),
        "mlx-lm",
        needs="linux",
        saved="weights.npz",
        precision=1e-3,
    ),
)
BY_NAME = {program.name: program for program in PROGRAMS}
