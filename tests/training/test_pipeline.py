"""Pipeline training: contiguous layers on each rank, 1F1B, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.partitioned_cases import CASES, DEEP, MORE, PartitionedBench, compare

pytestmark = pytest.mark.busy

STEPS = 50


@pytest.fixture
def run(two_ranks: Any) -> Any:
    return two_ranks["pipeline"]


@pytest.mark.parametrize("name", CASES)
def test_two_stages_train_as_one_process_does(name: str, one_process: Any, run: Any) -> None:
    """With an uneven split. Embeddings that are the head too get both gradients."""
    compare(name, one_process[name], run[name])


def test_a_stage_holds_and_reads_only_its_own_layers(one_process: Any, run: Any) -> None:
    whole = one_process["full"].ranks[0]
    first, last = run["full"].ranks
    assert first["held"] + last["held"] == whole["held"]
    for rank in (first, last):
        assert rank["loaded"] <= 1.2 * whole["loaded"] * rank["held"] / whole["held"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("0-1,1-3", ("full", "tied")),
        ("0-2,2-3", ("full",)),
        ("0-1,1-2,2-3", tuple(CASES)),
        ("0-1,1-2,2-3,3-4", tuple(DEEP)),
    ],
)
def test_fifty_steps(split: str, names: tuple[str, ...], bench: PartitionedBench) -> None:
    alone = bench.run(f"alone for {split}", bench.cases(names, "data", STEPS), 1)
    ran = bench.run(f"pipeline {split}", bench.cases(names, "pipeline", STEPS, split=split), split.count(",") + 1)
    for name in names:
        compare(name, alone[name], ran[name])


@pytest.mark.slow
def test_every_precision_optimizer_and_kind_of_fine_tuning(bench: PartitionedBench, one_process_more: Any) -> None:
    ran = bench.run("pipeline more", bench.cases(MORE, "pipeline", 4, split="0-2,2-3"), 2)
    for name in MORE:
        compare(name, one_process_more[name], ran[name])
