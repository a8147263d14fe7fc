"""The precision for each generation of NVIDIA GPUs, as data with its sources, by the names that nvidia-smi prints, or
else by their compute capability."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.models import NvidiaGpu

AMPERE = (8, 0)
"""The first compute capability with bfloat16 in its tensor cores."""
PASCAL = (6, 0)
"""That of the P100, which computes float16 at twice the rate of float32; Volta (7, 0) has it in tensor cores."""
SLOW_FLOAT16 = (6, 1)
"""Pascal's other GPUs, whose float16 runs at 1/64 of the rate of float32."""


@dataclass(frozen=True)
class Generation:
    name: str
    capability: tuple[int, int]
    """The lowest of its GPUs."""
    pattern: str
    """Matches the names of its GPUs; the first row of GENERATIONS that matches counts."""
    source: str = "https://developer.nvidia.com/cuda-gpus"

    @property
    def precision(self) -> str:
        if self.capability >= AMPERE:
            return "bf16"
        return "fp16" if self.capability >= PASCAL and self.capability != SLOW_FLOAT16 else "fp32"


GENERATIONS = (
    Generation("Blackwell", (10, 0), r"\b(G?B[123]00|GB10|RTX PRO \d{4}|RTX 50[5-9]0)\b"),
    Generation("Hopper", (9, 0), r"\b(H100|H200|H800|H20|GH200)\b"),
    Generation("Ada Lovelace", (8, 9),
        r"\b(L4|L20|L40S?|L2|RTX 40[5-9]0|RTX [2-6]000 Ada|RTX (2000|4000|4500|5000|6000) SFF Ada)\b"),
    Generation("Ampere", (8, 0), r"\b(A100X?|A800|A30X?|A40|A10[GM]?|A16|A2|RTX A\d{3,4}|RTX 30[5-9]0)\b"),
    Generation("Turing", (7, 5),
        r"\b(T4G?|T1000|T[46]00|RTX 20[678]0|GTX 16[3-6]0|(Quadro )?RTX [3-8]000|TITAN RTX)\b"),
    Generation("Volta", (7, 0), r"\b(V100S?|GV100|TITAN V)\b"),
    Generation("Pascal", (6, 0), r"\b(P100|GP100)\b"),
    Generation("Pascal (GeForce)", SLOW_FLOAT16, r"\b(P40|P4|P6|GTX 10[5-8]0|TITAN Xp?|Quadro P\d{3,4})\b"),
    Generation("Maxwell or Kepler", (3, 5), r"\b(Tesla (M60|M40|M4|M6|K80|K40|K20)|GTX [79]\d0)\b"),
)  # fmt: skip


def generation_of(gpu: NvidiaGpu) -> Generation | None:
    """By its name, or else by its compute capability; None where neither is known."""
    # "Tesla V100-SXM2-32GB", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090 Laptop GPU"
    named = next((each for each in GENERATIONS if re.search(each.pattern, gpu.name)), None)
    if named is None and (found := re.fullmatch(r"(\d+)\.(\d+)", gpu.compute_capability or "")):
        capability = int(found[1]), int(found[2])
        return Generation(f"compute capability {gpu.compute_capability}", capability, "")
    return named


def choose_precision(gpus: Sequence[NvidiaGpu | None], *, on_gpu: bool) -> tuple[str, str]:
    """(precision, reason), by the oldest of the ranks' GPUs, since all ranks compute in one type. `gpus`: each rank's
    GPU, None where it is not known."""
    if not on_gpu:
        return "fp32", "the ranks compute on the CPU"
    generations = [generation_of(gpu) if gpu else None for gpu in gpus]
    names = [gpu.name if gpu else "a GPU whose name is not known" for gpu in gpus]
    found = {name: each for name, each in zip(names, generations, strict=True) if each is not None}
    if None in generations or not gpus:
        unknown = (name for name, each in zip(names, generations, strict=True) if each is None)
        named = ", ".join(dict.fromkeys(unknown)) or "no GPU known"
        return "fp32", f'{named}: float32 runs on each; set precision = "bf16" from Ampere on'
    order = ("bf16", "fp16", "fp32")
    oldest = max(found, key=lambda name: order.index(found[name].precision))
    generation, precision = found[oldest], found[oldest].precision
    why = {
        "bf16": "has bfloat16 in its tensor cores, whose range needs no loss scaling",
        "fp16": "has fast float16, and no bfloat16: the loss is scaled",
        "fp32": "has no fast 16-bit arithmetic",
    }[precision]
    mixed = " (the oldest of the ranks' GPUs)" if len({each.name for each in found.values()}) > 1 else ""
    return precision, f"{oldest}{mixed}: {generation.name} {why}"
