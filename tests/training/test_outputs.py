"""mlx-lm's own commands accept the output of a run of two ranks: generate, fuse, and lora that continues from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate, load

from tests.training.launching import Launched, launch
from tests.training.tiny import UNEQUAL, Tiny, undisturbed_job

pytestmark = pytest.mark.busy

LIMIT_S = 240.0
PROMPT = "tower to raven"


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, undisturbed: Launched) -> Callable[[str], Launched]:
    """A run of two unequal ranks of the kind, made once."""
    runs = {"full": undisturbed}

    def of(kind: str) -> Launched:
        if kind not in runs:
            job = undisturbed_job(tiny, fine_tune_type=kind)
            runs[kind] = launch(tmp_path_factory.mktemp(kind), job, shares=UNEQUAL).succeeded()
        return runs[kind]

    return of


def mlx_lm(command: str, **options: Any) -> str:
    """What one of mlx-lm's commands prints."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [word for word in words if word != "True"]
    argv = [sys.executable, "-m", "mlx_lm", command, *words]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(path: Path) -> dict[str, mx.array]:
    found = mx.load(str(path / "adapters.safetensors"))
    assert isinstance(found, dict) and found
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param("lora", marks=pytest.mark.slow), pytest.param("dora", marks=pytest.mark.slow), "full"]
)
def test_the_saved_adapter_is_loaded_and_generates(tiny: Tiny, trained: Callable[[str], Launched], kind: str) -> None:
    run = trained(kind)

    assert {path.name for path in run.adapters.iterdir()} == {
        "adapter_config.json",
        "adapters.safetensors",
        "0000020_adapters.safetensors",
    }
    base, _ = load(str(tiny.model))
    model, tokenizer = load(str(tiny.model), adapter_path=str(run.adapters))
    loaded = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(loaded[name], value).item() for name, value in weights(run.adapters).items())
    prompt = mx.array([tokenizer.encode(PROMPT)])
    assert not mx.allclose(model(prompt), base(prompt)).item()
    assert isinstance(generate(model, tokenizer, PROMPT, max_tokens=2), str)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_it_is_fused_into_one_model_that_says_the_same(
    tiny: Tiny, trained: Callable[[str], Launched], tmp_path: Path, kind: str
) -> None:
    adapters, fused = trained(kind).adapters, tmp_path / "fused"
    mlx_lm("fuse", model=tiny.model, adapter_path=adapters, save_path=fused)
    model, tokenizer = load(str(tiny.model), adapter_path=str(adapters))
    whole, _ = load(str(fused))
    prompt = mx.array([tokenizer.encode(PROMPT)])
    assert mx.allclose(whole(prompt), model(prompt), atol=1e-4).item()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_mlx_lm_generate_takes_it(tiny: Tiny, trained: Callable[[str], Launched], kind: str) -> None:
    adapters = trained(kind).adapters
    model, tokenizer = load(str(tiny.model), adapter_path=str(adapters))
    options = {"prompt": PROMPT, "max_tokens": 8, "ignore_chat_template": True, "verbose": False}
    output = mlx_lm("generate", model=tiny.model, adapter_path=adapters, **options)
    assert output == generate(model, tokenizer, PROMPT, max_tokens=8) + "\n"
    assert output != mlx_lm("generate", model=tiny.model, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
@pytest.mark.needs("g++")
def test_mlx_lm_lora_goes_on_from_it(tiny: Tiny, trained: Callable[[str], Launched], tmp_path: Path, kind: str) -> None:
    """With a learning rate of 0 it saves what it has loaded: all of it, by the same names, to the bit. It loads what
    fits and says nothing of the rest, so that nothing less would show."""
    adapters = trained(kind).adapters
    saved_job = json.loads((adapters / "adapter_config.json").read_text())
    # A schedule would have a rate of its own.
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**saved_job, "lr_schedule": None}))
    mlx_lm(
        "lora",
        config=config,
        train=True,
        resume_adapter_file=adapters / "adapters.safetensors",
        adapter_path=tmp_path,
        iters=1,
        learning_rate=0.0,
    )
    saved, ours = weights(tmp_path), weights(adapters)
    assert saved.keys() == ours.keys()
    assert all(mx.array_equal(saved[name], value).item() for name, value in ours.items())
