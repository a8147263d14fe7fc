"""The PyTorch trainer with several ranks on one GPU, which NCCL refuses: their group exchanges by gloo, through the
machine's memory. Everything else is engine.torch_trainer.main, in whose place the nodes' python runs this.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, PartialState

from engine.protocol.job import TorchSettings
from engine.torch_trainer import main, strategies
from engine.torch_trainer.unpickling import restrict_unpickling

_make = strategies.make_accelerator


def make_accelerator(
    backend: str, strategy: str, settings: TorchSettings, config: dict[str, Any], timeout: timedelta | None = None
) -> Accelerator:
    if backend != "nccl":
        return _make(backend, strategy, settings, config, timeout)
    restrict_unpickling()
    dist.init_process_group("cpu:gloo,cuda:gloo", timeout=timeout)
    # So told, Accelerate gathers by what gloo has for a GPU.
    PartialState(backend="gloo")
    precision = {"fp32": "no"}.get(settings.precision, settings.precision)
    return Accelerator(mixed_precision=precision, gradient_accumulation_steps=config["gradient_accumulation_steps"])


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    strategies.make_accelerator = make_accelerator
    main.main()
