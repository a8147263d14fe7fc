"""The PyTorch trainer on this machine's CPU: every division of the training learns the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.training.checkpoint_files import folder_name
from tests.torch.running import TorchRun, run_torch
from tests.training.launching import launch
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


def resume_from_the_middle(folder: Path, job: dict[str, Any], *, lost: str | None) -> None:
    """Train on two nodes, and again from the middle: on both, or on one without what the other has on its disk."""
    keeping = {"checkpoint_every": 3}
    nodes = ["ana", "ben"]
    whole = run_torch(folder, job, ranks=2, homes=nodes, fields=keeping)
    for node in nodes:
        states = folder / node / "runs" / "run" / "checkpoints"
        shutil.rmtree(states / folder_name(6))
        if node == lost:
            shutil.rmtree(states)
    left = [node for node in nodes if node != lost]
    fields = {**keeping, "resume": True, "reached": 12}
    again = run_torch(folder, job, ranks=len(left), homes=left, fields=fields, attempt=2)
    resumed = again.events("resumed")[0]
    assert (resumed["source"], resumed["iteration"], resumed["refused"]) == ("checkpoint", 6, 0)
    rest = {iteration: loss for iteration, loss in whole.losses().items() if iteration > 6}
    assert list(again.losses()) == list(rest)
    assert again.losses() == pytest.approx(rest, abs=CLOSE)


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


def test_two_ranks_of_fsdp_learn_what_one_does(train: Train) -> None:
    keys = {"iters": 6, "grad_accumulation_steps": 2}
    one, two = train("one", 1, strategy="ddp", **keys), train("two", 2, strategy="fsdp", **keys)
    assert_same_losses(one.losses(), two.losses(), 6)
    assert two.events("start")[0]["partitioned"] == ["optimizer", "gradients", "parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_every_strategy_learns_what_one_rank_does(train: Train, accumulation: int) -> None:
    keys = {"iters": 50, "grad_accumulation_steps": accumulation, "max_grad_norm": 1.0}
    one = train("one", 1, strategy="ddp", **keys).losses()
    assert_same_losses(one, train("ddp", 2, strategy="ddp", **keys).losses(), 50)
    assert_same_losses(one, train("fsdp", 2, strategy="fsdp", **keys).losses(), 50)
    for stage in (1, 2, 3):
        zero = train(f"zero-{stage}", 2, strategy="deepspeed", zero_stage=stage, **keys)
        assert_same_losses(one, zero.losses(), 50)


def test_ddp_goes_on_without_the_node_that_is_lost(tiny: Tiny, tmp_path: Path) -> None:
    job = tiny.job(framework="torch", strategy="ddp", iters=12, grad_accumulation_steps=2)
    resume_from_the_middle(tmp_path, job, lost="ana")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_both_nodes_go_on_where_they_were(tiny: Tiny, tmp_path: Path, strategy: str) -> None:
    job = tiny.job(framework="torch", strategy=strategy, iters=12, grad_accumulation_steps=2)
    resume_from_the_middle(tmp_path, job, lost=None)


@pytest.mark.slow
def test_mlx_and_pytorch_learn_the_same(tiny: Tiny, tmp_path: Path, train: Train) -> None:
    job = tiny.job(iters=50, optimizer="adamw", grad_accumulation_steps=2, max_grad_norm=1.0)
    mlx = launch(tmp_path / "mlx", job).succeeded().losses()
    torch = train("torch", 1, **{**job, "strategy": "ddp"}).losses()
    assert list(torch.values()) == pytest.approx(mlx, abs=1e-3)
    assert len(mlx) == 50
    assert mlx[-1] < mlx[0] - 1
