"""What a run leaves loads in mlx-lm as its own adapters do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate, load

from tests.training.conftest import Tiny
from tests.training.launching import launch


@pytest.mark.parametrize(
    "kind", [pytest.param("lora", marks=pytest.mark.slow), pytest.param("dora", marks=pytest.mark.slow), "full"]
)
def test_the_saved_adapter_is_loaded_and_generates(tiny: Tiny, tmp_path: Path, kind: str) -> None:
    run = launch(tmp_path, tiny.job(fine_tune_type=kind, save_every=5), shares=(1.0, 1.0)).succeeded()

    assert {path.name for path in run.adapters.iterdir()} == {
        "adapter_config.json",
        "adapters.safetensors",
        "0000005_adapters.safetensors",
    }
    base, _ = load(str(tiny.model))
    model, tokenizer = load(str(tiny.model), adapter_path=str(run.adapters))
    saved = mx.load(str(run.adapters / "adapters.safetensors"))
    loaded = dict(tree_flatten(model.parameters()))
    assert isinstance(saved, dict)
    assert saved and all(mx.array_equal(loaded[name], value).item() for name, value in saved.items())
    prompt = mx.array([tokenizer.encode("tower to raven")])
    assert not mx.allclose(model(prompt), base(prompt)).item()
    assert isinstance(generate(model, tokenizer, "tower to", max_tokens=2), str)

    if kind == "lora":
        fused = tmp_path / "fused"
        command = ["--model", str(tiny.model), "--adapter-path", str(run.adapters), "--save-path", str(fused)]
        subprocess.run([sys.executable, "-m", "mlx_lm", "fuse", *command], check=True, capture_output=True)
        whole, _ = load(str(fused))
        assert mx.allclose(whole(prompt), model(prompt), atol=1e-4).item()
