"""The parts that show MLX training on a GPU, the most valuable first."""

from __future__ import annotations

from typing import Final

from tests.gpu.mlx_facts import facts
from tests.gpu.mlx_hang import hang
from tests.gpu.mlx_numbers import attention, losses
from tests.gpu.mlx_runs import calibration, checkpoint, launches
from tests.gpu.mlx_training import compiling, memory, throughput
from tests.gpu.part import Part

# On a GPU the first to use a fused kernel waits for CUDA's compiler, a second or so for each; later parts find it.
PARTS: Final = (
    Part("mlx.facts", "MLX computes on the GPU, which is known as nvidia-smi has it", 50.0, facts, 120.0),
    Part("mlx.throughput", "tokens/s and peak memory beside stock mlx_lm.lora", 160.0, throughput, 200.0),
    Part("mlx.memory", "the plan's estimate beside MLX's own peak", 60.0, memory, 120.0),
    Part("mlx.losses", "losses beside those on the CPU", 45.0, losses, 300.0),
    Part("mlx.checkpoint", "what a checkpoint costs; a killed run goes on bit for bit", 70.0, checkpoint, 400.0),
    Part("mlx.calibration", "`flightdeck calibrate` beside the training", 40.0, calibration, 200.0),
    Part("mlx.launch", "`flightdeck launch`: one rank, and two that share the GPU by ring", 75.0, launches, 300.0),
    Part("mlx.attention", "attention's gradient is computed in tiles", 15.0, attention, 60.0),
    Part("mlx.compile", "compiled functions, CUDA graphs, freed memory, and many lengths", 50.0, compiling, 200.0),
    Part("mlx.hang", "a rank that waits for ever saves its state", 40.0, hang, 120.0),
)
