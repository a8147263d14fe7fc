"""Every model type of the installed mlx-lm with LoRA, DoRA and full fine-tuning, unquantized and in 4 bits: what the
plan says, and one training step by the trainer's own code, its loss and gradients beside stock mlx-lm's:

    python -m tests.bench.models [--write] [--only KIND …] [--results FILE]

Each type is a tiny model with random weights, tried in a process of its own on MLX's CPU build
(tests.bench.models_step). The plan sees its config.json and the job alone. Exits 1 when the two disagree in a cell, or
a figure differs from stock's. `--results` keeps what has been tried, line by line: run again, the rest is tried.
`--write` puts the table into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine.plan.planner import make_plan
from tests.bench.figures import machine, system
from tests.bench.memory import TOKENIZER
from tests.bench.models_step import BITS, TRAININGS, Step, job_settings, model_config, with_optional_packages
from tests.bench.tiny_models import model_types
from tests.unit.plan.clusters import inputs, mac

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
DIVIDING = ("sharded", "pipeline")
LOSS_LIMIT, GRADIENT_LIMIT = 1e-6, 5e-5


@dataclass(frozen=True)
class Cell:
    """A step and the plan's verdict on it, for nodes without a GPU as for the step."""

    step: Step
    refusals: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Refused where it cannot be trained, and trained with stock's loss and gradients where it can."""
        step = self.step
        if step.failure is not None:
            return bool(self.refusals)
        return not self.refusals and self.differs is None

    @property
    def differs(self) -> str | None:
        """From stock mlx-lm; None if it does not."""
        step = self.step
        if step.failure is not None or step.loss_difference is None or step.gradient_difference is None:
            return None if step.failure is not None else f"stock ends with {step.stock}"
        far = step.loss_difference > LOSS_LIMIT or step.gradient_difference > GRADIENT_LIMIT
        return f"loss {step.loss_difference:.1e}, gradients {step.gradient_difference:.1e}" if far else None

    @property
    def text(self) -> str:
        return ("refused" if self.refusals else "trains") if self.agrees else "DISAGREES"

    def __str__(self) -> str:
        step = self.step
        name = f"{step.kind}, {step.training}, {step.bits} bits"
        figures = step.failure or (
            f"loss {step.loss:.6f} {step.loss_difference:+.1e}, gradients {step.gradient_difference:.1e}"
            if step.loss is not None and step.loss_difference is not None
            else f"stock ends with {step.stock}"
        )
        return f"{name:<40} {self.text:<10} {figures}"


def refusals(kind: str, training: str, bits: int, *, device: str = "cpu", **more: Any) -> tuple[str, ...]:
    """The plan's, for two nodes with this MLX device; none if it would launch."""
    nodes = [mac(f"n{rank}", rank, "", 512, gpu=device) for rank in range(2)]
    asked = inputs(nodes, settings=job_settings(training), model=model_config(kind, bits), **more)
    return tuple(issue.text for issue in make_plan(asked).refusals)


def tried(kind: str, tokenizer: Path) -> list[Step]:
    """All trainings of a type; those before which the process ended have its last line."""
    with TemporaryDirectory() as name:
        for file in tokenizer.iterdir():
            shutil.copy(file, name)
        argv = [sys.executable, "-m", "tests.bench.models_step", kind, name]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    steps = [Step(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    ended = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]
    missing = list(product(BITS, TRAININGS))[len(steps) :]
    return steps + [Step(kind, training, bits, failure=ended, stock=ended) for bits, training in missing]


def _kept(file: Path | None) -> dict[str, list[Step]]:
    """Kind → its steps, of `--results`."""
    found: dict[str, list[Step]] = {}
    if file is not None and file.exists():
        for line in file.read_text().splitlines():
            step = Step(**json.loads(line))
            found.setdefault(step.kind, []).append(step)
    return {kind: steps for kind, steps in found.items() if len(steps) == len(BITS) * len(TRAININGS)}


def _divided(kind: str) -> str:
    """The plan's answer to the strategies that divide a model."""
    refused = [refusals(kind, "lora", 32, strategy=strategy) for strategy in DIVIDING]
    return "refused" if all(refused) else "train" if not any(refused) else "one is refused"


def _row(kind: str, cells: Sequence[Cell]) -> str:
    compared = [cell.step for cell in cells if cell.step.loss_difference is not None]
    figures = ["", "", ""]
    if compared:
        loss = max(step.loss_difference or 0.0 for step in compared)
        gradients = max(step.gradient_difference or 0.0 for step in compared)
        figures = [f"{compared[0].loss:.6f}", f"{loss:.0e}", f"{gradients:.0e}"]
    on_mac = "refused" if refusals(kind, "lora", 32, device="gpu") else "trains"
    return f"| {' | '.join([kind, *(cell.text for cell in cells), *figures, on_mac, _divided(kind)])} |"


def document(found: dict[str, list[Cell]]) -> str:
    """docs/models.md."""
    cells = [cell for row in found.values() for cell in row]
    heads = " | ".join(f"{training}{', 4 bits' if bits == 4 else ''}" for bits, training in product(BITS, TRAININGS))
    # One example of each kind: the matrices that they name differ.
    texts = {text for cell in cells for text in cell.refusals}
    texts |= {text for kind in found for text in refusals(kind, "lora", 32, device="gpu")}
    reasons = {re.split(r"; | \(\d bits", text)[0]: text for text in sorted(texts)}
    failures = sorted({cell.step.failure.rpartition(": [job] ")[2] for cell in cells if cell.step.failure})
    rows = "\n".join(_row(kind, row) for kind, row in found.items())
    return f"""# Models: what can be trained, and what is refused

Written by `python -m tests.bench.models --write` on {date.today().isoformat()}: {system()}, on the CPU.

These are all {len(found)} model types of this mlx-lm, with those that it loads as another one. Each cell is a tiny
model of the type with random float32 weights, unquantized or in 4 bits: what the plan says from its config.json and the
job, and one real training step by the trainer's own code (loading, adapters, gradients, optimizer), which knows nothing
of these refusals. The two agree in {sum(cell.agrees for cell in cells)} of {len(cells)} cells.

What trains has the loss and gradients of mlx-lm's own code, with the same weights and batch: the columns give mlx-lm's
loss with LoRA, and the largest relative differences in the row, of the loss and of any tensor's gradient, with the
logits computed in chunks (limits: {LOSS_LIMIT:.0e} and {GRADIENT_LIMIT:.0e}). The last two columns, LoRA on Macs and
the strategies that divide a model, are the plan's answers alone.

MLX's CPU build multiplies by experts in float32 alone: on nodes without a GPU the plan refuses such a model in 16 bits.
What mlx-lm itself cannot train is refused up to the mlx-lm with which it was tried; a newer one may train it.

| model | {heads} | loss | its difference | of gradients | on Macs | {", ".join(DIVIDING)} |
|{"---|" * (len(TRAININGS) * len(BITS) + 6)}
{rows}

`flightdeck plan` and preflight (`hardware_layer`) refuse with what to change:

{chr(10).join(f"- {reason}" for reason in reasons.values())}

What these trainings end with, where nothing has refused them:

{chr(10).join(f"- `{failure}`" for failure in failures)}

Also before the launch, and not by a rank:

- `lora_parameters.keys` that name no matrix of the trained layers, with those that there are. Where the memory estimate
  does not know the architecture, a node builds the model with mlx-lm, without its weights, and tells (`model_present`).
- A `strategy` that cannot divide the architecture, and an `lr_schedule` whose arguments do not fit.
- `report_to` without its package or API key: `wandb` on this machine, `swanlab` on rank 0's node.
- Lines of chat or prompts that the model's chat template refuses, in the plan and by `data_matches`. mlx-lm's own code
  renders one line of each kind (roles, tools, empty or missing texts) on one node, of each file as many as it reads in
  ten seconds.
"""


def main() -> int:
    with_optional_packages()
    parser = argparse.ArgumentParser(description="What trains, by the plan, by a real step and by stock mlx-lm.")
    parser.add_argument("--write", action="store_true", help=f"the table into {DOCUMENT.name}")
    parser.add_argument("--jobs", type=int, default=2, help="types at once")
    parser.add_argument("--only", nargs="+", choices=model_types(), metavar="KIND", help="these types alone")
    parser.add_argument("--results", type=Path, help="keep the steps in this file, and do not repeat those in it")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write takes all of them")
    kinds, kept = options.only or model_types(), _kept(options.results)
    print(machine())
    found: dict[str, list[Cell]] = {}
    with TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        subprocess.run([sys.executable, "-c", TOKENIZER, name], check=True, capture_output=True)
        for steps in pool.map(lambda kind: kept.get(kind) or tried(kind, Path(name)), kinds):
            if options.results is not None and steps[0].kind not in kept:
                with options.results.open("a") as file:
                    file.writelines(json.dumps(asdict(step)) + "\n" for step in steps)
            for step in steps:
                cell = Cell(step, refusals(step.kind, step.training, step.bits))
                found.setdefault(step.kind, []).append(cell)
                print(cell, flush=True)
                if not cell.agrees:
                    print(f"    the plan: {'; '.join(cell.refusals) or 'launches'}; {cell.differs or ''}", flush=True)
    if options.write:
        DOCUMENT.write_text(document(found), encoding="utf-8")
    return 0 if all(cell.agrees for row in found.values() for cell in row) else 1


if __name__ == "__main__":
    sys.exit(main())
