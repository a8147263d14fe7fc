"""Chooses the strategy of a PyTorch job, and how it shards and offloads, by what fits the memory of every rank; its
precision, by the GPUs' generations (as nvidia-smi names them, or their compute capability); and the block class that
FSDP wraps.

The order in which candidates are tried is by the model's size. Where several fit, the first one counts: what
communicates less comes first, recomputing activations before offloading."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import memory_text
from engine.models import NvidiaGpu
from engine.plan.document import ChosenTorchSettings
from engine.plan.memory.choice import with_settings
from engine.plan.memory.shape import ModelShape
from engine.plan.torch.memory import TorchMemory, TorchWorkload, torch_estimate
from engine.protocol.job import AUTO

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
    named = next((generation for generation in GENERATIONS if re.search(generation.pattern, gpu.name)), None)
    if named is None and (match := re.fullmatch(r"(\d+)\.(\d+)", gpu.compute_capability or "")):
        capability = int(match[1]), int(match[2])
        return Generation(f"compute capability {gpu.compute_capability}", capability, "")
    return named


def choose_precision(gpus: Sequence[NvidiaGpu | None], *, on_gpu: bool) -> tuple[str, str]:
    """(precision, reason), by the oldest of the ranks' GPUs, since all ranks compute in one type. `gpus`: each rank's
    GPU, None where it is not known."""
    if not on_gpu:
        return "fp32", "the ranks compute on the CPU"
    unnamed = "a GPU whose name is not known"
    generations = {gpu.name if gpu else unnamed: generation_of(gpu) if gpu else None for gpu in gpus}
    by_gpu = {name: generation for name, generation in generations.items() if generation is not None}
    if not gpus or len(by_gpu) < len(generations):
        named = ", ".join(name for name in generations if name not in by_gpu) or "no GPU known"
        return "fp32", f'{named}: float32 runs on each; set precision = "bf16" from Ampere on'
    order = ("bf16", "fp16", "fp32")
    oldest = max(by_gpu, key=lambda name: order.index(by_gpu[name].precision))
    generation, precision = by_gpu[oldest], by_gpu[oldest].precision
    why = {
        "bf16": "has bfloat16 in its tensor cores, whose range needs no loss scaling",
        "fp16": "has fast float16, and no bfloat16: the loss is scaled",
        "fp32": "has no fast 16-bit arithmetic",
    }[precision]
    mixed = " (the oldest of the ranks' GPUs)" if len({generation.name for generation in by_gpu.values()}) > 1 else ""
    return precision, f"{oldest}{mixed}: {generation.name} {why}"


COMFORTABLE = 0.95
"""Share of a GPU's memory up to which candidates are chosen, if any fit: the allocator's blocks are fragmented."""
SMALL, LARGE = 7e9, 70e9
"""Parameters: below the first gradients and optimizer state are sharded first, above the second offloading is tried
before a whole state on GPUs is given up."""
_Way = tuple[str, dict[str, Any]]
"""A strategy, with how it shards."""
_DDP: _Way = ("ddp", {})
_GRAD_OP: _Way = ("fsdp", {"sharding": "grad_op"})
_FULL: _Way = ("fsdp", {"sharding": "full"})
_ZERO: dict[int, _Way] = {stage: ("deepspeed", {"zero_stage": stage}) for stage in (1, 2, 3)}
_ORDER: dict[str, tuple[_Way, ...]] = {
    "small": (_DDP, _GRAD_OP, _FULL, _ZERO[1], _ZERO[2], _ZERO[3]),
    "medium": (_DDP, _FULL, _ZERO[2], _ZERO[3], _GRAD_OP, _ZERO[1]),
    "large": (_DDP, _FULL, _ZERO[3], _ZERO[2], _GRAD_OP, _ZERO[1]),
}
_OFFLOADS: dict[str, tuple[_Way, ...]] = {
    "small": (_FULL, _ZERO[2], _ZERO[3], _GRAD_OP, _ZERO[1]),
    "medium": (_FULL, _ZERO[2], _ZERO[3], _GRAD_OP, _ZERO[1]),
    "large": (_ZERO[3], _FULL, _ZERO[2], _GRAD_OP, _ZERO[1]),
}
BLOCKS: Mapping[str, tuple[str, ...]] = {
    "bloom": ("BloomBlock",), "exaone4": ("Exaone4DecoderLayer",), "falcon": ("FalconDecoderLayer",),
    "falcon_h1": ("FalconH1DecoderLayer",), "falcon_mamba": ("FalconMambaBlock",), "gemma": ("GemmaDecoderLayer",),
    "gemma2": ("Gemma2DecoderLayer",), "gemma3": ("Gemma3DecoderLayer",), "gemma3_text": ("Gemma3DecoderLayer",),
    "gpt2": ("GPT2Block",), "gpt_neox": ("GPTNeoXLayer",), "granite": ("GraniteDecoderLayer",),
    "granitemoe": ("GraniteMoeDecoderLayer",), "granitemoehybrid": ("GraniteMoeHybridDecoderLayer",),
    "iquestcoder": ("LlamaDecoderLayer",), "jamba": ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
    "lfm2": ("Lfm2DecoderLayer",), "llama": ("LlamaDecoderLayer",), "mamba": ("MambaBlock",),
    "mamba2": ("Mamba2Block",), "ministral3": ("Ministral3DecoderLayer",), "mistral": ("MistralDecoderLayer",),
    "mixtral": ("MixtralDecoderLayer",), "nemotron_h": ("NemotronHBlock",), "olmo2": ("Olmo2DecoderLayer",),
    "olmoe": ("OlmoeDecoderLayer",), "opt": ("OPTDecoderLayer",), "phi": ("PhiDecoderLayer",),
    "phi3": ("Phi3DecoderLayer",), "qwen2": ("Qwen2DecoderLayer",), "qwen2_moe": ("Qwen2MoeDecoderLayer",),
    "qwen3": ("Qwen3DecoderLayer",), "qwen3_moe": ("Qwen3MoeDecoderLayer",), "qwen3_next": ("Qwen3NextDecoderLayer",),
    "smollm3": ("SmolLM3DecoderLayer",), "starcoder2": ("Starcoder2DecoderLayer",),
}  # fmt: skip
"""model_type -> the classes of its blocks: `_no_split_modules` of transformers' models, which a test compares."""


@dataclass(frozen=True)
class Candidate:
    """One way to train the job, with what the rank that needs the most of its limit needs."""

    settings: ChosenTorchSettings
    memory: TorchMemory
    fits: bool | None
    """Every rank has enough; None if a limit is unknown."""


@dataclass(frozen=True)
class StrategyChoice:
    chosen: Candidate
    tried: tuple[Candidate, ...]
    """In the order of preference, the chosen one among them."""
    reason: str


def candidates(
    requested: Mapping[str, Any], precision: str, parameters: int, *, ranks: int, on_gpu: bool
) -> list[ChosenTorchSettings]:
    """Those that the values of [job] (`requested`, "auto" where the plan chooses) allow, in the order of preference;
    none if they contradict each other."""
    size, allowed = size_class(parameters), list[ChosenTorchSettings]()
    asked = {key: value for key, value in requested.items() if value not in (AUTO, None)}
    recomputed = asked.get("grad_checkpoint", AUTO)
    places = ["none", "cpu", *(["nvme"] if asked.get("nvme_path") else [])]
    if not on_gpu:
        # All memory is the CPU's: offloading gains nothing, but may be set.
        places = [str(asked.get("offload", "none"))]
    passes = [
        (way, place, recompute)
        for place in places
        for recompute in ((False, True) if recomputed == AUTO else (bool(recomputed),))
        for way in (_ORDER if place == "none" else _OFFLOADS)[size]
    ]
    for (strategy, how), offload, checkpoint in passes:
        settings = {"strategy": strategy, **how, "offload": offload}
        contradicts = any(asked.get(key, value) != value for key, value in settings.items())
        # DeepSpeed's documentation of offload_optimizer: nvme is for stage 3 alone.
        wrong_stage = offload == "nvme" and how != {"zero_stage": 3}
        # `fully_shard` offloads from a GPU only.
        no_gpu = offload != "none" and strategy == "fsdp" and not on_gpu
        # One rank has nobody to share with: sharding is of use only to offload.
        alone = ranks == 1 and strategy != "ddp" and offload == "none" and "strategy" not in asked
        if not (contradicts or wrong_stage or no_gpu or alone):
            allowed.append(ChosenTorchSettings(**settings, precision=precision, grad_checkpoint=checkpoint))
    return list(dict.fromkeys(allowed))


def size_class(parameters: int) -> str:
    return "small" if parameters < SMALL else "medium" if parameters <= LARGE else "large"


def choose_strategy(
    shape: ModelShape,
    workloads: Sequence[TorchWorkload],
    limits: Sequence[int | None],
    options: Sequence[ChosenTorchSettings],
    host_limits: Sequence[int | None],
) -> StrategyChoice:
    """The first of `options` (at least one) with which every rank fits, or else the one that needs the least.
    `workloads` and `limits` (bytes, None: unknown) by rank; `host_limits`: each rank's part of its machine's memory."""

    def attempt(settings: ChosenTorchSettings) -> Candidate:
        needs = {load: torch_estimate(shape, with_settings(load, settings)) for load in set(workloads)}
        estimates = [needs[load] for load in workloads]
        lacks = any(
            limit is not None and need > limit
            for memory, here, host in zip(estimates, limits, host_limits, strict=True)
            for need, limit in ((memory.needed_bytes, here), (memory.host_bytes, host))
        )
        fits = False if lacks else None if None in limits else True
        return Candidate(settings, max(estimates, key=lambda estimated: estimated.needed_bytes), fits)

    def lacks_host(trial: Candidate) -> bool:
        return any(limit is not None and trial.memory.host_bytes > limit for limit in host_limits)

    def needs(trial: Candidate) -> str:
        host = f" and {memory_text(trial.memory.host_bytes)} of the machine's memory" if lacks_host(trial) else ""
        return f"{label(trial.settings)} needs {memory_text(trial.memory.needed_bytes)}{host}"

    tried = tuple(map(attempt, options))
    billions = f"{shape.total_parameters / 1e9:.3g} × 10⁹ parameters"
    fitting = [trial for trial in tried if trial.fits]
    room = COMFORTABLE * min((limit for limit in limits if limit is not None), default=0)
    comfortable = [trial for trial in fitting if trial.memory.needed_bytes <= room]
    if fitting:
        chosen = (comfortable or fitting)[0]
        before = [trial for trial in tried[: tried.index(chosen)] if trial.fits is False]
        reason = f"{label(chosen.settings)} fits: {memory_text(chosen.memory.needed_bytes)} for each rank"
        reason = "; ".join([reason, *map(needs, before[:3])])
        return StrategyChoice(chosen, tried, f"{reason} ({billions})")
    if all(trial.fits is False for trial in tried):
        least = min(tried, key=lambda trial: (lacks_host(trial), trial.memory.needed_bytes))
        return StrategyChoice(least, tried, f"nothing fits; {needs(least)}, the least ({billions})")
    # By size alone, as nothing is known about the memory.
    undecided = [trial for trial in tried if trial.fits is None]
    by_size = ("deepspeed", "cpu") if size_class(shape.total_parameters) == "large" else ("fsdp", "none")
    sized = [trial for trial in undecided if (trial.settings.strategy, trial.settings.offload) == by_size]
    chosen = (sized if len(workloads) > 1 and sized else undecided)[0]
    reason = f"by the model's size, since the memory of the ranks is not known ({billions})"
    return StrategyChoice(chosen, tried, reason)


def label(settings: ChosenTorchSettings) -> str:
    """As people call it: "FSDP full, cpu offload"."""
    names = {"ddp": "DDP", "fsdp": f"FSDP {settings.sharding}", "deepspeed": f"ZeRO-{settings.zero_stage}"}
    offload = f", {settings.offload} offload" if settings.offload != "none" else ""
    return names[settings.strategy] + offload + (", activations recomputed" if settings.grad_checkpoint else "")
