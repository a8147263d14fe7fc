"""As in test_lost_peers, where each rank has only a part of the state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.partitioned_cases import PartitionedBench
from tests.training.test_lost_peers import lose_one

pytestmark = pytest.mark.busy

KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "sharded": (2, {"strategy": "sharded"}),
    "sharded, 3 ranks": (3, {"strategy": "sharded"}),
    "pipeline": (2, {"strategy": "pipeline", "layer_split": "0-1,1-3"}),
    "pipeline, 3 stages": (3, {"strategy": "pipeline", "layer_split": "0-1,1-2,2-3"}),
}
"""Ranks, and keys of the job."""


@pytest.mark.parametrize(
    "kind", [kind if kind == "sharded, 3 ranks" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_survivors_keep_their_part_of_the_last_update(bench: PartitionedBench, tmp_path: Path, kind: str) -> None:
    ranks, keys = KINDS[kind]
    lose_one(bench.tiny, tmp_path, {"model": str(bench.models["tied"]), **keys}, ranks, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_keep_their_part_of_the_last_update_at_many_moments(
    bench: PartitionedBench, tmp_path: Path, kind: str
) -> None:
    ranks, keys = KINDS[kind]
    for seed in range(10, 20):
        lose_one(bench.tiny, tmp_path / str(seed), {"model": str(bench.models["tied"]), **keys}, ranks, seed)
