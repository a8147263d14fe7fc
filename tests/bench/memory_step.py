"""One training step's memory by MLX's own figures, in a process of its own, which tests.bench.memory starts:

    python -m tests.bench.memory_step DIRECTORY

DIRECTORY holds a model without weights, and request.json: {"job": …, "batches": […]}. The model is filled with random
weights and loaded, adapted and stepped by the trainer's own code. Prints one JSON object: parameters, bytes of the
state, and batch → bytes of the peak.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from engine.protocol.job import Job
from engine.trainer.model import count_parameters, load_model
from engine.trainer.single_node_bench import SingleNodeTrainer
from engine.training.data import Batch
from engine.training.sampler import Indices


class Tokens:
    """Data of nothing but real tokens."""

    def batch(self, indices: Indices) -> Batch:
        tokens = np.arange(1, 65, dtype=np.int32)[None].repeat(len(indices), 0)
        return Batch(tokens, np.asarray([[1, 64]] * len(indices), np.int32), 63 * len(indices))


def write_weights(directory: Path) -> None:
    """Random weights in the config's type, packed when it says so."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(config))
    if config["model_type"] == "gemma3_text":
        # Its files have no head of their own.
        model.sanitize({})
    model.set_dtype(getattr(mx, config["torch_dtype"]))
    if packing := config.get("quantization"):
        size = packing["group_size"]
        divides = lambda _, part: hasattr(part, "to_quantized") and part.weight.shape[-1] % size == 0  # noqa: E731
        nn.quantize(model, group_size=size, bits=packing["bits"], class_predicate=divides)
    mx.save_safetensors(str(directory / "model.safetensors"), dict(tree_flatten(model.parameters())))


def main(directory: Path) -> int:
    mx.set_default_device(mx.cpu)
    # As the trainer does on the CPU.
    mx.disable_compile()
    request = json.loads((directory / "request.json").read_text())
    write_weights(directory)
    mx.clear_cache()
    job = Job.from_spec(request["job"], model=str(directory), data=str(directory), workdir=directory, home=directory)
    model, _ = load_model(job)
    training = SingleNodeTrainer(job, model, Tokens(), lambda position: np.arange(1))
    found = {batch: training.probe(batch) for batch in request["batches"]}
    trainable, total = count_parameters(model)
    answer = {
        "trainable": trainable,
        "total": total,
        "state": max(state for state, _ in found.values()),
        "peaks": {batch: peak for batch, (_, peak) in found.items()},
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
