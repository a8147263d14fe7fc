"""Bytes per parameter at MLX's own peak of real trainings, ours beside stock mlx_lm.lora's, which tests.bench.memory
prints: on one rank, and on two by each strategy, by real mlx.launch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.equal_data import write_equal_data, write_llama
from tests.bench.figures import Figure
from tests.bench.trainers import run_ours, run_stock

SIZES: Final = {
    "num_hidden_layers": 32,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""14 million parameters in many small layers: a lazy graph that frees one as it updates the next gains most. Arrays of
whole pages: for others MLX reuses buffers that are up to two pages larger."""
TOKENS: Final = 33
ITERATIONS: Final = 4
"""The optimizer's state is made in the first, and MLX frees a step's memory while the next one runs."""
FORMS: Final[Mapping[str, dict[str, str]]] = {
    "parameter": {"optimizer_precision": "parameter"},
    "float32": {"optimizer_precision": "float32", "moments": "float32"},
    "kahan, 8-bit moments": {"optimizer_precision": "kahan", "moments": "8bit"},
}
ONE_RANK: Final = {"float32": 15.5, "kahan, 8-bit moments": 8.0}
TWO_RANKS: Final = {"float32": 18.5, "kahan, 8-bit moments": 10.5}
MORE_THAN_STOCK: Final = 2.5
"""What two ranks may need beyond stock on one, in its own precision: all sums are in before anything is applied."""
OF_DATA: Final = 0.55
"""Limit of sharded on two ranks, as a share of data's on two."""


@dataclass
class Peaks:
    """The model, its data, and the runs, below `root`. A peak is that of the rank with the highest."""

    root: Path

    def __post_init__(self) -> None:
        demo = self.root / "demo"
        subprocess.run([sys.executable, "-m", "engine.demo_model", str(demo)], check=True)
        self.parameters = write_llama(self.root / "llama", demo / "model", SIZES, "bfloat16")
        write_equal_data(self.root / "equal", demo / "model", TOKENS, 8)
        (self.root / "kernels").mkdir()

    def ours(self, strategy: str, ranks: int, form: str) -> float:
        """Bytes per parameter of the whole model."""
        # mlx.launch does not quote the path of its temporary files.
        directory = self._directory(f"{strategy}-{ranks}-{form.replace(', ', '-').replace(' ', '-')}")
        run = run_ours(directory, self._job(directory, ranks) | {"strategy": strategy, **FORMS[form]}, (1.0,) * ranks)
        peaks: list[int] = [run.events(rank, "step")[-1]["peak_memory_bytes"] for rank in range(ranks)]
        return max(peaks) / self.parameters

    def stock(self, ranks: int, *, compiled: bool) -> float:
        """The same of mlx_lm.lora, by what it reports itself."""
        directory = self._directory(f"stock-{ranks}-{compiled}")
        environment = {"TMPDIR": str(self.root / "kernels")} | ({} if compiled else {"MLX_DISABLE_COMPILE": "1"})
        reports = run_stock(directory, self._job(directory, ranks), ranks, environment)
        peak: float = reports[-1]["peak_memory"]
        return peak * 1e9 / self.parameters

    def _job(self, directory: Path, ranks: int) -> dict[str, Any]:
        """mlx-lm's own keys; one sequence on each rank."""
        return {
            "model": str(self.root / "llama"),
            "data": str(self.root / "equal"),
            "adapter_path": str(directory / "adapters"),
            "fine_tune_type": "full",
            "optimizer": "adamw",
            "num_layers": -1,
            "batch_size": ranks,
            "max_seq_length": TOKENS,
            "iters": ITERATIONS,
            "steps_per_report": 1,
            "save_every": 1_000_000,
            "val_batches": 0,
        }

    def _directory(self, name: str) -> Path:
        directory = self.root / name
        directory.mkdir()
        return directory


def peak_figures(root: Path) -> Iterator[Figure]:
    """Each beside its target."""
    peaks = Peaks(root)
    stock = peaks.stock(1, compiled=False)
    yield _figure("stock mlx-lm, 1 rank", stock)
    yield _figure("stock mlx-lm, 1 rank, compiled", peaks.stock(1, compiled=True))
    yield _figure("stock mlx-lm, 2 ranks", peaks.stock(2, compiled=False))
    for form in FORMS:
        yield _figure(f"{form}, 1 rank", peaks.ours("data", 1, form), ONE_RANK.get(form, stock))
    for form in FORMS:
        data = peaks.ours("data", 2, form)
        yield _figure(f"{form}, data on 2", data, TWO_RANKS.get(form, stock + MORE_THAN_STOCK))
        sharded = peaks.ours("sharded", 2, form)
        yield _figure(f"{form}, sharded on 2", sharded, OF_DATA * data)
        yield _figure(f"{form}, pipeline on 2", peaks.ours("pipeline", 2, form))


def _figure(name: str, measured: float, limit: float | None = None) -> Figure:
    value = f"{measured:.2f} bytes/parameter"
    if limit is None:
        return Figure(name, value)
    # What is printed decides.
    return Figure(name, value, f"<= {limit:.2f}", round(measured, 2) <= round(limit, 2))
