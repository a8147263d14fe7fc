"""The parts that show PyTorch training on a GPU, the most valuable first."""

from __future__ import annotations

from typing import Final

from tests.gpu.part import Part
from tests.gpu.torch_facts import facts
from tests.gpu.torch_memory import memory
from tests.gpu.torch_runs import out_of_memory, recovery, run_launch
from tests.gpu.torch_throughput import throughput
from tests.gpu.torch_trainings import division, precision

_DRY_S: Final = 300.0
PARTS: Final = (
    Part("torch.facts", "facts and telemetry are true, by nvidia-smi and a known process", 60.0, facts, _DRY_S),
    Part("torch.launch", "a run of each backend; two NCCL ranks on one GPU are refused", 60.0, run_launch, _DRY_S),
    Part("torch.precision", "losses in bf16, fp16 and fp32, LoRA and full, are the CPU's", 50.0, precision, _DRY_S),
    Part("torch.memory", "the plan's estimate against the allocator's peak, four sizes", 75.0, memory, _DRY_S),
    Part("torch.throughput", "tokens/s and MFU beside transformers' Trainer", 80.0, throughput, _DRY_S),
    Part(
        "torch.oom", "what does not fit is refused; launched anyway, its failure is named", 60.0, out_of_memory, _DRY_S
    ),
    Part("torch.recovery", "a killed rank's run goes on; an abort leaves nothing", 75.0, recovery, _DRY_S),
    Part("torch.division", "DDP and FSDP2 have the losses of one rank", 40.0, division, _DRY_S),
)
