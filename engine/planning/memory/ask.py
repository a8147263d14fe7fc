"""What is asked of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MemoryAsk:
    """One rank's share of a job."""

    fine_tune_type: Literal["lora", "dora", "full"] = "lora"
    num_layers: int = -1
    """Layers that are trained, from the last one; -1 is all."""
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    """Paths of the matrices that get an adapter; None is every matrix of a trained layer, as in mlx-lm."""
    batch: int = 1
    """Sequences of this rank that are on their way at once: a micro-batch, in a pipeline those in flight."""
    sequence: int = 2048
    """Tokens of each, padded."""
    grad_checkpoint: bool = False
    optimizer: str = "adam"
    optimizer_precision: Literal["float32", "parameter"] = "float32"
    strategy: Literal["data", "sharded", "pipeline"] = "data"
    world_size: int = 1
    layers: tuple[int, int] | None = None
    """A pipeline stage's layers, half-open; None is all of them."""
    accumulation: int = 1
    """Micro-batches of an update: from 2 on, the sums so far wait beside the next gradients."""
