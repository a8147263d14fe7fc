"""The PyTorch trainer on this machine's CPU: every division of the training learns the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.torch.running import TorchRun, run_torch
from tests.training.tiny import Tiny, make_tiny

pytestmark = pytest.mark.needs("torch")

Train = Callable[..., TorchRun]
CLOSE = 1e-4


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def train(tiny: Tiny, tmp_path: Path) -> Train:
    """Train a job with these keys, each in a folder of its own: `train(name, ranks, **keys)`."""
    return partial(_train, tiny, tmp_path)


def _train(tiny: Tiny, folder: Path, name: str, ranks: int, **keys: Any) -> TorchRun:
    return run_torch(folder / name, tiny.job(framework="torch", **keys), ranks=ranks)


def assert_same_losses(one: dict[int, float], other: dict[int, float], count: int) -> None:
    assert list(one) == list(other) == list(range(1, count + 1))
    assert other == pytest.approx(one, abs=CLOSE)


def test_two_ranks_with_accumulation_learn_what_one_does(train: Train) -> None:
    keys = {"strategy": "ddp", "iters": 10, "grad_accumulation_steps": 4, "max_grad_norm": 1.0}
    one, two = train("one", 1, **keys), train("two", 2, **keys)
    assert_same_losses(one.losses(), two.losses(), 10)
    assert one.losses()[10] < one.losses()[1] - 0.1
    saved = [run.files[0].directory.parents[1] / "adapters" / "model" / "model.safetensors" for run in (one, two)]
    assert all(path.stat().st_size > 0 for path in saved)
    assert two.events("start", 1)[0]["distributed_type"] == "MULTI_CPU"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_two_ranks_learn_what_those_of_one_do(train: Train, kind: str) -> None:
    keys = {"strategy": "ddp", "fine_tune_type": kind, "iters": 10, "val_batches": -1, "steps_per_eval": 5}
    one, two = train("one", 1, **keys), train("two", 2, **keys)
    assert_same_losses(one.losses(), two.losses(), 10)
    validations = [[event["val_loss"] for event in run.events("validation")] for run in (one, two)]
    assert validations[0] == pytest.approx(validations[1], abs=CLOSE)
    assert len(validations[0]) == 3
    adapters = two.files[0].directory.parents[1] / "adapters"
    assert (adapters / "adapter_model.safetensors").stat().st_size > 0
