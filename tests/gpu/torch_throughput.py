"""Tokens per second and MFU of the built-in fine-tuning beside transformers' Trainer: the same model, data and
precision, in alternation on the same GPU.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tests.gpu.head import smi
from tests.gpu.part import ROOT, Visit
from tests.gpu.torch_jobs import SIZES, job_of, make_models, shape_of, write_data
from tests.machine import free_port

AS_FAST: Final = 1.0
_ROUNDS, _TURN_S = 5, 1.2
_PEAK: Final = {
    "B200": 2_250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
    "L4": 121e12, "A10G": 70e12, "RTX 4090": 165e12,
}  # fmt: skip
"""Dense bf16 operations per second in NVIDIA's datasheets, by what the card's name contains; the first that does."""


@dataclass
class Turns:
    """torch_ours or torch_plain under way."""

    visit: Visit
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    peak_bytes: int = 0

    def take(self, steps: int) -> float:
        """Seconds of so many steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n".encode())
        self.process.stdin.flush()
        done = self.answer()
        self.peak_bytes = int(done["peak_bytes"])
        return float(done["seconds"])

    def answer(self) -> dict[str, Any]:
        """Its next one. Raises RuntimeError where it ends or hangs."""
        stream, line = self.process.stdout, b""
        assert stream is not None
        while not line.startswith(b"turn "):
            readable, _, _ = select.select([stream], [], [], max(0.1, self.visit.remaining_s - 3.0))
            line = os.read(stream.fileno(), 65_536) if readable else b""
            if not line:
                raise RuntimeError(f"{self.name} has ended, or hangs: {self.log.read_text(errors='replace')[-1500:]}")
            line = line[max(0, line.rfind(b"turn ")) :]
        answered: dict[str, Any] = json.loads(line[5:])
        return answered

    def end(self) -> None:
        self.process.kill()
        with self.process:
            pass


def start(visit: Visit, side: str, kind: str, job: dict[str, Any], tokens: int) -> Turns:
    folder = visit.scratch / f"{side}-{kind}"
    folder.mkdir()
    request = folder / "request.json"
    backend = "gloo" if visit.dry else "nccl"
    request.write_text(json.dumps({"job": job, "backend": backend, "tokens": tokens, "folder": str(folder)}))
    own = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if visit.dry:
        # On the CPU the built-in trainer gives freed memory back at once, which a GPU knows nothing of.
        own["MALLOC_MMAP_THRESHOLD_"] = str(2**25)
    if side == "ours":
        own |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [visit.python, "-m", f"tests.gpu.torch_{side}", str(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **own},
            cwd=ROOT,
        )
    return Turns(visit, f"{side}, {kind}", process, log)


def throughput(visit: Visit) -> None:
    size, precision, batch, tokens, rounds = "0.5 B", "bf16", 2, 2_048, _ROUNDS
    if not visit.dry and int(smi(visit, "memory.free")[0][0]) < 70_000:
        size = "0.1 B"
    if visit.dry:
        size, precision, batch, tokens, rounds = "4 M", "fp32", 2, 128, 3
    model = make_models(visit, size)[size]
    data = write_data(visit.scratch / "data", tokens + 8)
    keys: dict[str, Any] = {"precision": precision, "batch_size": batch, "max_seq_length": tokens + 1, "num_layers": -1}
    keys |= {"iters": 100_000, "optimizer": "adamw", "learning_rate": 1e-5, "max_grad_norm": 1.0}
    kinds = ("lora", "full")
    running = {
        (side, kind): start(visit, side, kind, job_of(model, data, fine_tune_type=kind, **keys), tokens)
        for kind in kinds
        for side in ("ours", "plain")
    }
    try:
        for turns in running.values():
            turns.answer()
        for kind in kinds:
            ours, plain = running["ours", kind], running["plain", kind]
            compared = _alternate(ours, plain, rounds, 0.5 if visit.dry else _TURN_S)
            operations = _operations(size, kind, tokens)
            _report(visit, f"{size}, {kind}, {precision}", compared, batch * tokens, operations)
    finally:
        for turns in running.values():
            visit.record(f"{turns.name}: log", turns.log.read_text(errors="replace"))
            turns.end()


def _operations(size: str, kind: str, tokens: int) -> float:
    """Floating-point operations per token: 6 for each parameter in a product, 4 where the base is frozen, and those of
    attention over the whole sequence (Chowdhery et al., "PaLM", appendix B)."""
    hidden, layers, _, words = SIZES[size]
    products = shape_of(size).total_parameters - hidden * words
    return (6 if kind == "full" else 4) * products + 12 * layers * hidden * tokens


@dataclass(frozen=True)
class Compared:
    """By side, "ours" and "plain": the median seconds of a step, and the allocator's peak in bytes."""

    seconds: Mapping[str, float]
    peak_bytes: Mapping[str, int]
    note: str


def _alternate(ours: Turns, plain: Turns, rounds: int, turn_s: float) -> Compared:
    for turns in (ours, plain):
        turns.take(3)
    steps = max(8, min(200, round(turn_s / (plain.take(2) / 2))))
    took: dict[str, list[float]] = {"ours": [], "plain": []}
    for number in range(rounds):
        # Who comes first changes, since the card warms up.
        pair = [("ours", ours), ("plain", plain)]
        for side, turns in pair if number % 2 == 0 else pair[::-1]:
            took[side].append(turns.take(steps) / steps)
    medians = {side: median(seconds) for side, seconds in took.items()}
    peaks = {"ours": ours.peak_bytes, "plain": plain.peak_bytes}
    return Compared(medians, peaks, f"medians of {rounds} alternating turns of {steps} steps")


def _report(visit: Visit, name: str, compared: Compared, tokens: int, operations: float) -> None:
    """`tokens`: of a step; `operations`: of a token."""
    ratio = compared.seconds["plain"] / compared.seconds["ours"]
    if visit.dry:
        visit.result(f"{name}: ours over the Trainer's, on the CPU", ratio, unit="×", note=compared.note)
        return
    peak, source = _peak(visit)
    for side, label in (("ours", "ours"), ("plain", "transformers' Trainer")):
        rate = tokens / compared.seconds[side]
        visit.result(f"{name}: {label}", round(rate), unit="tokens/s")
        visit.result(f"{name}: {label}, MFU", f"{rate * operations / peak:.1%}" if peak else "not known", note=source)
    ok, target = ratio >= AS_FAST, f">= {AS_FAST:.1f}"
    visit.result(f"{name}: ours over the Trainer's", ratio, unit="×", target=target, ok=ok, note=compared.note)
    peaks = compared.peak_bytes
    note = f"{peaks['ours'] / 1e9:.2f} of {peaks['plain'] / 1e9:.2f} GB"
    visit.result(f"{name}: our peak memory over the Trainer's", peaks["ours"] / peaks["plain"], unit="×", note=note)


def _peak(visit: Visit) -> tuple[float | None, str]:
    """Operations per second of the card, and where the figure is from."""
    card = smi(visit, "name")[0][0]
    named = next((key for key in _PEAK if key in card), None)
    return (
        (_PEAK[named], f"of {_PEAK[named] / 1e12:.0f} TFLOPS, {named}") if named else (None, f"no datasheet of {card}")
    )
