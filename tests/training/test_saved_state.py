"""What preflight works out of a save, from config.json and the file's header, is what mlx-lm's layers really save."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers

from engine.checks.checkpoint import resume_mismatches
from engine.cluster.probe_results import AdapterWeights
from engine.config.models import ClusterConfig, Config, FineTuneType, JobConfig, NodeConfig
from engine.node.probes import storage
from engine.plan.memory.estimate import RankWorkload, estimate
from engine.plan.memory.shape import ModelShape

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
    shape = ModelShape.from_config({**SIZES, "torch_dtype": "float32"})
    assert estimate(shape, RankWorkload(fine_tune_type=kind, num_layers=2)).trainable_parameters == numbers
    assert storage.safetensors_fault(path) is None
    found = AdapterWeights.model_validate(storage.adapter(path))
    node = NodeConfig(name="a", python="python", workdir="/")
    job = JobConfig(name="job", fine_tune_type=kind, mlx_lm={"num_layers": 2, "lora_parameters": LORA})
    config = Config(cluster=ClusterConfig(), nodes=(node,), job=job)
    assert resume_mismatches(found, config, 4) == []
    more = job.model_copy(update={"mlx_lm": {"num_layers": 3, "lora_parameters": LORA}})
    assert len(resume_mismatches(found, config.model_copy(update={"job": more}), 4)) == 1
