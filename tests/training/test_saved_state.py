"""What preflight works out of a save, from config.json and the file's header, is what mlx-lm's layers really save."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

from engine.config.models import ClusterConfig, FineTuneType, FlightConfig, JobConfig, NodeConfig
from engine.planning.memory.estimate import MemoryAsk, estimate
from engine.planning.memory.shape import ModelShape
from engine.preflight.answers import Weights
from engine.preflight.checkpoint import mismatches
from engine.worker.looks import safetensors

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}
LORA = {"rank": 8, "dropout": 0.0, "scale": 20.0}


def saved(path: Path, kind: FineTuneType, layers: int) -> tuple[Path, int]:
    """A file of the trained weights, and how many numbers are in it."""
    model = llama.Model(llama.ModelArgs.from_dict(SIZES))
    model.freeze()
    if kind == "full":
        for layer in model.layers[-layers:]:
            layer.unfreeze()
    else:
        linear_to_lora_layers(model, layers, LORA, use_dora=kind == "dora")
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(path), weights)
    return path, sum(value.size for value in weights.values())


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_its_size_and_its_header_are_what_preflight_says(tmp_path: Path, kind: FineTuneType) -> None:
    path, numbers = saved(tmp_path / "adapters.safetensors", kind, layers=2)
    shape = ModelShape.of({**SIZES, "torch_dtype": "float32"})
    assert estimate(shape, MemoryAsk(fine_tune_type=kind, num_layers=2)).trainable_parameters == numbers
    assert safetensors.fault(path) is None
    found = Weights.model_validate(safetensors.adapter(path))
    node = NodeConfig(name="a", python="python", workdir="/")
    job = JobConfig(name="job", fine_tune_type=kind, mlx_lm={"num_layers": 2, "lora_parameters": LORA})
    config = FlightConfig(cluster=ClusterConfig(), nodes=(node,), job=job)
    assert mismatches(found, config, 4) == []
    more = job.model_copy(update={"mlx_lm": {"num_layers": 3, "lora_parameters": LORA}})
    assert len(mismatches(found, config.model_copy(update={"job": more}), 4)) == 1
