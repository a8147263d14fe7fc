"""Sharded training: each tensor on one rank, and the numbers of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from engine.trainer.collective import Collective
from engine.trainer.strategies.sharded import Shards, assign_owners
from tests.training import kinds
from tests.training.partitioned_cases import CASES, MORE, PartitionedBench, compare
from tests.training.tiny import Tiny, make_job

pytestmark = pytest.mark.busy

STEPS = 50


@pytest.fixture
def run(two_ranks: Any) -> Any:
    return two_ranks["sharded"]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_does(name: str, one_process: Any, run: Any) -> None:
    """With shares of 3:1, and sizes that two does not divide."""
    compare(name, one_process[name], run[name])


def test_a_rank_holds_and_reads_its_part_alone(one_process: Any, run: Any) -> None:
    whole = one_process["full"].ranks[0]
    for rank in run["full"].ranks:
        assert rank["state"] <= 0.6 * whole["state"], "weights, gradients and moments, by MLX's own figures"
        assert rank["loaded"] <= 0.6 * whole["loaded"]
    assert sum(rank["held"] for rank in run["full"].ranks) == whole["held"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "names"), [(2, ("full", "tied")), (3, tuple(CASES)), (4, ("full",))])
def test_fifty_steps(ranks: int, names: tuple[str, ...], bench: PartitionedBench) -> None:
    alone = bench.run(f"alone for sharded {ranks}", bench.cases(names, "data", STEPS), 1)
    ran = bench.run(f"sharded {ranks}", bench.cases(names, "sharded", STEPS), ranks)
    for name in names:
        compare(name, alone[name], ran[name])


@pytest.mark.slow
def test_every_precision_optimizer_and_kind_of_fine_tuning(bench: PartitionedBench, one_process_more: Any) -> None:
    ran = bench.run("sharded more", bench.cases(MORE, "sharded", 4), 2)
    for name in MORE:
        compare(name, one_process_more[name], ran[name])


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(1, 100), max_size=9), min_size=1, max_size=12), st.integers(1, 8))
def test_every_tensor_has_one_owner_and_no_rank_is_ahead_by_more_than_one_tensor(
    sections: list[list[int]], ranks: int
) -> None:
    named = [{f"{number}.{place}": cost for place, cost in enumerate(costs)} for number, costs in enumerate(sections)]
    owners = assign_owners(named, ranks)
    assert owners.keys() == {name for section in named for name in section}
    assert set(owners.values()) <= set(range(ranks))
    for section in named:
        loads = [sum(cost for name, cost in section.items() if owners[name] == rank) for rank in range(ranks)]
        assert max(loads) - min(loads) <= max(section.values(), default=0)


def test_a_section_is_put_together_to_the_bit_and_forgotten(tiny: Tiny, tmp_path: Path) -> None:
    """On one rank, which owns all: types of 1, 2 and 4 bytes, odd sizes, and a scalar's worth."""
    model = kinds.model("llama", tied=True)
    model.model.layers[0].mlp.gate_proj.weight = mx.random.normal((48, 32)).astype(mx.bfloat16)
    model.model.layers[0].self_attn.odd = mx.arange(7, dtype=mx.uint8)
    model.model.layers[0].self_attn.halves = mx.array([-0.0, 1.5, float("nan")], dtype=mx.float16)
    before = dict(tree_flatten(model.parameters()))
    shards = Shards(make_job(tiny, tmp_path), model, Collective("ring", 1, 0))
    gathered: dict[str, mx.array] = {}
    for number in range(len(shards.sections)):
        shards.start_gather(number)
        found = shards.finish_gather(number)
        with shards.with_parameters(number, found) as section:
            assert dict(tree_flatten(section.model.parameters())) == found
        gathered |= found
    assert gathered.keys() == before.keys()
    for name, value in before.items():
        assert gathered[name].dtype == value.dtype
        assert mx.array_equal(gathered[name], value, equal_nan=True).item(), name
