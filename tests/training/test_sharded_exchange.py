"""What sharded ranks exchange, in which order, and the sums they get: ranks as threads of this process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from engine.trainer.collective import Collective
from engine.trainer.strategies.base import float32_sum
from engine.trainer.strategies.loss import Rows, loss_sum
from engine.trainer.strategies.sections import Section
from engine.trainer.strategies.sharded import Sharded
from engine.training.data import Batch, DataLoader
from tests.training import kinds
from tests.training.tiny import Tiny, make_job
from tests.training.together import together


def share(rank: int) -> Batch:
    """A rank's examples, of a length of its own."""
    tokens = np.random.default_rng(rank).integers(0, 70, (2, 9 + rank), dtype=np.int32)
    return Batch(tokens, np.array([[1, 9 + rank], [3, 8]], dtype=np.int32), 8 + rank + 5)


class Share:
    """A loader that has one batch for each rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def batch(self, position: int) -> Batch:
        return share(self._rank)


def model(dtype: mx.Dtype) -> nn.Module:
    made = kinds.model("llama", tied=False)
    made.set_dtype(dtype)
    mx.eval(made.parameters())
    return made


def sharded(tiny: Tiny, home: Path, collective: Collective, dtype: mx.Dtype, **keys: Any) -> Sharded:
    job = make_job(tiny, home, strategy="sharded", **keys)
    return Sharded(job, model(dtype), cast("DataLoader", Share(collective.rank)), collective)


def noted(log: list[str], holder: Any, name: str, label: Callable[..., str]) -> None:
    """Replace the method by one that first appends `label` of its arguments to `log`."""
    original = getattr(holder, name)

    def method(*arguments: Any) -> Any:
        log.append(label(*arguments))
        return original(*arguments)

    setattr(holder, name, method)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_next_section_is_gathered_beside_one_section_and_the_last_one_is_summed_behind(
    tiny: Tiny, tmp_path: Path, ranks: int
) -> None:
    def one(collective: Collective) -> list[str]:
        training, log = sharded(tiny, tmp_path, collective, mx.bfloat16), list[str]()
        shards = training._shards
        noted(log, shards, "start_gather", lambda section: f"gather {section}")
        noted(log, shards, "finish_gather", lambda section: f"have {section}")
        noted(log, shards, "with_parameters", lambda section, _: f"compute {section}")
        noted(log, shards, "start_reduce", lambda reduction: f"sum {reduction.section}")
        noted(log, shards, "finish_reduce", lambda reduction: f"summed {reduction.section}")
        training.accumulate(0, last=True)
        return log

    first, *others = together(ranks, one)
    assert all(other == first for other in others)
    forward = ["gather 0", "have 0"]
    for section in range(5):
        forward += [f"gather {section + 1}", f"compute {section}", f"have {section + 1}"]
    backward = ["gather 4", "compute 5", "have 4"]
    for section in range(4, 0, -1):
        backward += [f"gather {section - 1}", f"compute {section}", f"have {section - 1}"]
        backward += [f"sum {section + 1}", f"summed {section + 1}"]
    backward += ["compute 0", "sum 1", "summed 1", "sum 0", "summed 0"]
    assert first == forward + backward


@pytest.mark.parametrize(
    ("dtype", "ranks", "operation"),
    [
        (mx.bfloat16, 2, "start_gather"),
        (mx.bfloat16, 3, "start_gather"),
        (mx.bfloat16, 7, "start_sum"),
        (mx.float32, 2, "start_gather"),
        (mx.float32, 5, "start_sum"),
        (mx.float16, 2, "start_gather"),
    ],
)
def test_sums_are_in_the_order_of_the_ranks_bit_for_bit_by_what_costs_less(
    tiny: Tiny, tmp_path: Path, dtype: mx.Dtype, ranks: int, operation: str
) -> None:
    """Twice as well, where a second micro-batch is added."""

    def one(collective: Collective) -> tuple[list[str], dict[str, mx.array], dict[str, mx.array]]:
        training, log = sharded(tiny, tmp_path, collective, dtype), list[str]()
        original = training._shards.start_reduce
        for name in ("start_gather", "start_sum"):
            noted(log, collective, name, lambda _, name=name: name)

        def start_reduce(reduction: Any) -> None:
            log.clear()
            original(reduction)

        training._shards.start_reduce = start_reduce  # type: ignore[method-assign]
        training.accumulate(0, last=False)
        once = dict(training.sums)
        training.accumulate(1, last=True)
        return log, once, training.sums

    results = together(ranks, one)
    expected = [whole_gradients(dtype, rank) for rank in range(ranks)]
    seen: set[str] = set()
    for log, once, twice in results:
        assert log == [operation]
        for name, value in once.items():
            total = reduce(float32_sum, (gradients[name] for gradients in expected))
            assert value.dtype == mx.float32
            assert mx.array_equal(value, total).item(), name
            assert mx.array_equal(twice[name], total + total).item(), name
        assert seen.isdisjoint(once)
        seen |= once.keys()
    assert seen == expected[0].keys()


def whole_gradients(dtype: mx.Dtype, rank: int) -> dict[str, mx.array]:
    """Those of the whole model for one rank's share; of float16, unscaled in float32."""
    whole, rows = model(dtype), Rows.of(share(rank), half=dtype == mx.float16)
    _, tree = nn.value_and_grad(whole, loss_sum)(whole, rows.tokens, rows.bounds, mx.array(rows.scale))
    return {
        name: value.astype(mx.float32) / rows.scale if dtype == mx.float16 else value
        for name, value in tree_flatten(tree)
    }


def test_a_single_contribution_keeps_its_own_type(tiny: Tiny, tmp_path: Path) -> None:
    training = sharded(tiny, tmp_path, Collective("ring", 1, 0), mx.bfloat16)
    training.accumulate(0, last=False)
    once = dict(training.sums)
    assert {value.dtype for value in once.values()} == {mx.bfloat16}
    training.accumulate(1, last=True)
    for name, value in once.items():
        assert training.sums[name].dtype == mx.float32
        assert mx.array_equal(training.sums[name], 2 * value.astype(mx.float32)).item()


@pytest.mark.parametrize("ranks", [2, 7])
def test_sums_wait_in_bfloat16_where_the_step_rounds_them(tiny: Tiny, tmp_path: Path, ranks: int) -> None:
    def one(collective: Collective) -> list[dict[str, mx.array]]:
        found = []
        plain = {"optimizer_precision": "parameter"}
        for keys in ({}, plain, {**plain, "grad_accumulation_steps": 2}):
            training = sharded(tiny, tmp_path, collective, mx.bfloat16, **keys)
            training.accumulate(0, last=True)
            found.append(training.sums)
        return found

    for exact, rounded, first_of_two in together(ranks, one):
        for name, value in exact.items():
            assert mx.array_equal(value, first_of_two[name]).item()
            assert (value.dtype, rounded[name].dtype) == (mx.float32, mx.bfloat16)
            assert mx.array_equal(value.astype(mx.bfloat16), rounded[name]).item()


@pytest.mark.parametrize("trained", [1, 2, 4])
def test_inputs_are_kept_from_the_first_trained_section(
    tiny: Tiny, tmp_path: Path, trained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the backward pass begins: those of the last layers, which are trained, and of the head."""
    whole = model(mx.float32)
    whole.freeze()
    for layer in whole.model.layers[-trained:]:
        layer.unfreeze()
    collective = Collective("ring", 1, 0)
    training = Sharded(make_job(tiny, tmp_path, strategy="sharded"), whole, cast("DataLoader", Share(0)), collective)
    outputs: list[weakref.ref[mx.array]] = []
    forward, alive = training._forward, list[int]()

    def noting(*arguments: Any) -> Any:
        output, parameters = forward(*arguments)
        assert output is not None
        outputs.append(weakref.ref(output))
        return output, parameters

    backward = Section.forward_backward

    def counting(section: Section, *arguments: Any, **keys: Any) -> Any:
        alive.append(sum(output() is not None for output in outputs))
        return backward(section, *arguments, **keys)

    monkeypatch.setattr(training, "_forward", noting)
    monkeypatch.setattr(Section, "forward_backward", counting)
    training.accumulate(0, last=True)
    assert alive[0] == trained + 1
