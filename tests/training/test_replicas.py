"""A rank whose parameters are corrupted on purpose is named within one replica check, and nothing good is overwritten.

The ranks are real, under mlx.launch; one of them has one bit of one element flipped in the middle of its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn

from engine.trainer import replica_check
from engine.trainer.replica_check import ReplicaMismatch, find_mismatch, parameter_digests
from tests.training.launching import Launched, launch
from tests.training.tiny import Tiny

pytestmark = pytest.mark.busy

CORRUPTING = Path(__file__).parent / "corrupting"
LORA: dict[str, Any] = {
    "fine_tune_type": "lora",
    "num_layers": 2,
    "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0},
}


def run_training(
    tiny: Tiny, home: Path, ranks: int, corrupt: str | None, *, every: int = 5, on: str = "stop", **keys: Any
) -> Launched:
    """`corrupt`: as sitecustomize has it, "rank update part"."""
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if corrupt is not None:
        environment |= {"PYTHONPATH": str(CORRUPTING), "CORRUPT": corrupt}
    fields = {"env": environment, "replica_check_every": every, "on_corruption": on}
    return launch(home, tiny.job(**{"iters": 40, **keys}), shares=(1.0,) * ranks, spec_fields=fields)


def checks(run: Launched, rank: int = 0) -> list[tuple[int, bool]]:
    return [(event["iteration"], event["agreed"]) for event in run.events(rank, "replica_check")]


@pytest.mark.slow
def test_replica_checks_do_not_change_the_training(tiny: Tiny, tmp_path: Path) -> None:
    compared = run_training(tiny, tmp_path / "with", 2, None, every=5, iters=12, save_every=8).succeeded()
    plain = run_training(tiny, tmp_path / "without", 2, None, every=0, iters=12, save_every=8).succeeded()
    # Before the first step, each five updates, and before what is saved.
    for rank in (0, 1):
        assert checks(compared, rank) == [(0, True), (5, True), (8, True), (10, True), (12, True)]
    assert checks(plain) == []
    assert compared.losses() == plain.losses()
    assert all(np.array_equal(value, plain.weights()[name]) for name, value in compared.weights().items())


def test_the_corrupted_rank_of_three_is_named_and_all_stop(tiny: Tiny, tmp_path: Path) -> None:
    run = run_training(tiny, tmp_path, 3, "2 7 trained", save_every=3)
    records = run.ended()
    assert [record.code for record in records] == [0, 0, 7]
    for rank in range(3):
        assert checks(run, rank) == [(0, True), (3, True), (5, True), (6, True), (9, False)]
        found = run.events(rank, "replica_check")[-1]
        assert (found["ranks"], found["certain"], found["agreed_at"], found["differing"]) == ([2], True, 6, 1)
    (failure,) = run.events(2, "failure")
    assert (failure["error_type"], failure["ranks"], failure["certain"]) == ("Corrupted", [2], True)
    assert "the parameters of rank 2 are corrupted" in failure["message"]
    assert "the ranks last agreed at iteration 6; kept: what was saved at iteration 6" in failure["message"]
    for rank in (0, 1):
        end = run.events(rank)[-1]
        assert (end["event"], end["completed"], end["stopped"], end["iteration"]) == ("end", False, True, 6)
    # Nothing corrupted was written over what was saved when the ranks last agreed.
    assert [event["iteration"] for event in run.events(0, "checkpoint")] == [3, 3, 6, 6]
    numbered = sorted(run.adapters.glob("*_adapters.safetensors"))
    assert [file.name[:7] for file in numbered] == ["0000003", "0000006"]
    assert numbered[-1].read_bytes() == (run.adapters / "adapters.safetensors").read_bytes()


@pytest.mark.slow
def test_what_is_kept_is_what_an_undisturbed_training_has(tiny: Tiny, tmp_path: Path) -> None:
    run = run_training(tiny, tmp_path, 3, "2 7 trained", save_every=3)
    run.ended()
    # Nothing corrupted was written over the state of the iteration when the ranks last agreed.
    clean = run_training(tiny, tmp_path / "clean", 3, None, iters=6, save_every=3).succeeded()
    assert all(np.array_equal(value, clean.weights()[name]) for name, value in run.weights().items())


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.slow
def test_frozen_parameters_identify_the_corrupted_one_of_two_ranks(tiny: Tiny, tmp_path: Path, bad: int) -> None:
    run = run_training(tiny, tmp_path, 2, f"{bad} 7 frozen", **LORA)
    assert [record.code for record in run.ended()] == [7 * (rank == bad) for rank in (0, 1)]
    found = run.events(0, "replica_check")[-1]
    assert (found["iteration"], found["ranks"], found["certain"]) == (10, [bad], True)
    # Adapters are small: they were kept as they were when all agreed, and are what is saved, by whichever rank.
    clean = run_training(tiny, tmp_path / "clean", 2, None, iters=5, **LORA).succeeded()
    assert run.events(0, "checkpoint")[-1]["iteration"] == 5
    assert all(np.array_equal(value, clean.weights()[name]) for name, value in run.weights().items())


@pytest.mark.slow
def test_two_differing_ranks_without_frozen_parameters_are_both_named(tiny: Tiny, tmp_path: Path) -> None:
    run = run_training(tiny, tmp_path, 2, "1 7 trained")
    assert [record.code for record in run.ended()] == [7, 7]
    found = run.events(1, "replica_check")[-1]
    assert (found["iteration"], found["ranks"], found["certain"], found["agreed_at"]) == (10, [0, 1], False, 5)
    assert "it is not known which are right" in found["message"]
    # A whole second copy of the model is not kept, and nothing had been saved.
    assert "nothing was saved" in run.events(0, "failure")[0]["message"]
    assert not (run.adapters / "adapters.safetensors").exists()


@pytest.mark.slow
def test_with_warn_the_training_continues_and_an_intact_ranks_parameters_are_saved(tiny: Tiny, tmp_path: Path) -> None:
    run = run_training(tiny, tmp_path, 2, "0 7 frozen", on="warn", iters=12, save_every=6, **LORA).succeeded()
    assert checks(run) == [(0, True), (5, True), (6, True), (10, False), (12, False)]
    assert [event["iteration"] for event in run.events(0, "checkpoint")] == [6, 6, 12, 12, 12, 12]
    warnings = [event["message"] for event in run.events(0, "warning")]
    assert any("the parameters of rank 0 are corrupted" in warning for warning in warnings)
    assert "saving the parameters of rank 1: those of rank 0 are corrupted" in warnings


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8])
@pytest.mark.parametrize("shape", [(1,), (3,), (5, 7), (4096,), (3, 4096), (130, 333)])
def test_any_flipped_bit_changes_the_digest(dtype: mx.Dtype, shape: tuple[int, ...]) -> None:
    dice = np.random.default_rng(5)
    data = dice.integers(0, 256, size=int(np.prod(shape)) * dtype.size, dtype=np.uint8)

    def digest(changed: np.ndarray) -> str:
        return parameter_digests({"w": mx.array(changed).view(dtype).reshape(shape)})["w"]

    clean = digest(data)
    assert digest(data.copy()) == clean
    for place in {0, len(data) - 1, *dice.integers(0, len(data), size=20).tolist()}:
        damaged = data.copy()
        damaged[place] ^= 1 << int(dice.integers(0, 8))
        assert digest(damaged) != clean, place


@pytest.mark.parametrize("size", [3, 4096, 4096 + 5])
def test_the_host_reads_a_digests_own_memory_and_not_a_parameters(size: int) -> None:
    # MLX moves what the host reads of a CUDA array, with all that shares its memory, out of the GPU's.
    for dtype in (mx.float32, mx.uint32):
        parameter = mx.arange(size).astype(dtype)
        pieces = replica_check._pieces(parameter)
        mx.eval(parameter, pieces)
        assert not any(np.shares_memory(np.asarray(piece), np.asarray(parameter)) for piece in pieces)


def test_exchanged_elements_or_parameters_change_the_digest() -> None:
    values = np.arange(3 * 4096, dtype=np.float32)
    turned = values.copy()
    turned[[5, 4096 * 2 + 9]] = turned[[4096 * 2 + 9, 5]]
    assert parameter_digests({"w": mx.array(values)}) != parameter_digests({"w": mx.array(turned)})
    one, two = parameter_digests({"a": mx.array(values), "b": mx.array(values)}).values()
    assert one != two


DIGESTS = st.lists(st.sampled_from("abc"), min_size=2, max_size=2)


@given(st.lists(DIGESTS, min_size=1, max_size=7), st.none() | st.sampled_from("abc"))
def test_a_mismatch_names_no_rank_that_agrees_and_is_certain_only_with_a_majority(
    rows: list[list[str]], frozen: str | None
) -> None:
    found = find_mismatch(rows, frozen)
    same = all(row == rows[0] for row in rows)
    assert (found is None) is same
    if found is None:
        return
    assert found.ranks and set(found.ranks) <= set(range(len(rows)))
    accused = set(found.ranks)
    if not found.certain:
        assert accused == set(range(len(rows)))
    elif frozen is not None and any(rows[rank][0] != frozen for rank in accused):
        assert all((rows[rank][0] != frozen) is (rank in accused) for rank in range(len(rows)))
    else:
        assert len(accused) * 2 < len(rows)


def test_a_majority_names_the_others() -> None:
    good, bad = ["a", "b"], ["a", "c"]
    assert find_mismatch([good, bad, good], "a") == ReplicaMismatch((1,), certain=True)
    assert find_mismatch([good, bad], "a") == ReplicaMismatch((0, 1), certain=False)
    assert find_mismatch([good, ["c", "b"]], "a") == ReplicaMismatch((1,), certain=True)


def test_a_digest_needs_no_memory_of_the_size_of_a_parameter() -> None:
    model = nn.Linear(2048, 4096, bias=False)
    mx.eval(model.parameters())
    size = model.weight.nbytes
    parameter_digests({"w": model.weight})
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    parameter_digests({"w": model.weight})
    assert mx.get_peak_memory() - before < size / 100
