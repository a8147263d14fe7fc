"""Trainings under NCCL's rules, as MLX has them: a stream of the GPU, its types, neither send nor recv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from engine.failures.explanation import explain
from engine.failures.signatures import BY_ID
from engine.protocol.attempt import AttemptSpec
from engine.protocol.job import JobError
from engine.protocol.measurements import AllSumResult
from engine.trainer.allreduce_check import check
from engine.trainer.collective import Collective, broadcast_arrays
from engine.trainer.train import make_strategy
from engine.training.process import TrainingProcess
from tests.training.nccl_stand_in import nccl
from tests.training.test_update import Trained, train, train_rank
from tests.training.tiny import Tiny, make_job

JOB: dict[str, Any] = {"iters": 4, "val_batches": 1, "steps_per_eval": 4, "save_every": 4}


def train_on_two(tiny: Tiny, home: Path, **keys: Any) -> list[Trained]:
    def one(collective: Collective) -> Trained:
        folder = home / f"rank{collective.rank}"
        folder.mkdir(parents=True)
        return train_rank(tiny, folder, (collective, [3.0, 1.0]), **JOB, **keys)

    with nccl() as on_ranks:
        return on_ranks(2, one)


@pytest.mark.parametrize(
    "keys",
    [{"wire": wire} for wire in ("auto", "float32", "int8")] + [{"strategy": "sharded"}],
    ids=lambda keys: "-".join(keys.values()),
)
def test_two_ranks_train_as_one_does(tiny: Tiny, tmp_path: Path, keys: dict[str, Any]) -> None:
    """With validation, saving, and comparisons of the replicas, the first one before any update."""
    (tmp_path / "alone").mkdir()
    alone, both = train(tiny, tmp_path / "alone", **JOB), train_on_two(tiny, tmp_path / "both", **keys)
    losses = [[event["loss"] for event in trained.of("step")] for trained in (alone, *both)]
    assert losses[1] == losses[2]
    assert np.allclose(losses[1], losses[0], atol=2e-3 if keys.get("wire") == "int8" else 1e-5)
    validations = [[event["val_loss"] for event in trained.of("validation")] for trained in (alone, *both)]
    assert len(validations[0]) == 2 and np.allclose(validations[1], validations[0], atol=2e-3)
    assert [event["agreed"] for event in both[0].of("replica_check")] == [True] * (0 if "strategy" in keys else 5)


def test_a_model_in_16_bits_is_put_together_from_its_parts(tiny: Tiny, tmp_path: Path) -> None:
    """Its parameters travel as words: NCCL sums no uint16."""
    model = tmp_path / "model"
    shutil.copytree(tiny.model, model)
    weights = mx.load(str(model / "model.safetensors"))
    assert isinstance(weights, dict)
    half = {name: value.astype(mx.bfloat16) for name, value in weights.items()}
    mx.save_safetensors(str(model / "model.safetensors"), half, metadata={"format": "mlx"})
    first, _ = train_on_two(tiny, tmp_path, strategy="sharded", model=str(model))
    saved = mx.load(str(first.job.adapter_path / "model" / "model.safetensors"))
    assert isinstance(saved, dict) and saved.keys() == half.keys()
    assert {value.dtype for value in saved.values()} == {mx.bfloat16}
    frozen = "model.embed_tokens.weight"
    assert bool(mx.array_equal(saved[frozen], half[frozen]))


def test_a_type_that_nccl_does_not_have_is_broadcast() -> None:
    kinds = (mx.int16, mx.uint16, mx.uint8, mx.bfloat16, mx.float32)
    values = {str(kind): mx.arange(7).astype(kind) for kind in kinds}
    mx.eval(values)
    with nccl() as on_ranks:
        found = on_ranks(2, lambda each: broadcast_arrays(each, {"a": values} if each.rank == 0 else None, 0))
    assert all(bool(mx.array_equal(found[1]["a"][name], value)) for name, value in values.items())


def test_the_preflight_sums_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[object] = []
    monkeypatch.setattr(mx, "set_default_device", devices.append)

    def one(collective: Collective) -> AllSumResult:
        result = AllSumResult(collective.rank)
        check(result, Namespace(backend="nccl", world_size=2, seconds=0.1))
        return result

    with nccl() as on_ranks:
        found = on_ranks(2, one)
    assert all(result.exact and result.error is None for result in found) and devices == [mx.gpu, mx.gpu]


def test_a_pipeline_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    process = TrainingProcess(AttemptSpec("run", 1, "", "nccl", 2, []), tmp_path, 0, Mock(), Mock())
    job = make_job(tiny, tmp_path, strategy="pipeline")
    with pytest.raises(JobError, match='strategy = "pipeline" is not possible with nccl'):
        make_strategy(process, job, Mock(), Mock(), Mock())


WAITS = """
import ctypes
import mlx.core as mx
from engine.trainer.collective import Collective
mx.distributed.init = lambda **_: ctypes.PyDLL(None).sleep(60)
Collective("nccl", 2, 0, 0.2)
"""


def test_a_rank_that_waits_for_the_others_in_mlx_is_ended() -> None:
    """MLX's rank 0 waits for ever, with Python's lock: no other thread runs."""
    ended = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 1 and ended.stderr.startswith("Timeout (0:00:00.200000)!")
    found = explain(ended.stderr.splitlines())
    assert found is not None and found.signature is BY_ID["nccl.group_late"]
