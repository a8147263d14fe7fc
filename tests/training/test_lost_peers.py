"""When a rank is killed at any moment, every other one soon ends with the whole state of its last update."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.partitioned_cases import start_ranks
from tests.training.tiny import Tiny
from tests.waiting import wait_until

pytestmark = pytest.mark.busy

LONGEST_S = 0.3
"""Several updates."""
LIMIT_S = 120.0
KINDS: dict[str, dict[str, Any]] = {
    "data": {},
    "data, accumulated": {"grad_accumulation_steps": 2},
    "data, int8": {"wire": "int8"},
}
"""Keys of the job."""


def lose_one(tiny: Tiny, home: Path, keys: dict[str, Any], ranks: int, seed: int) -> None:
    dice = random.Random(seed)
    victim, delay_s = dice.randrange(ranks), dice.uniform(0, LONGEST_S)
    home.mkdir(exist_ok=True)
    (home / "case.json").write_text(json.dumps({"job": tiny.job(**keys)}))
    started = start_ranks("tests.training.lost_peer_program", home, ranks)
    try:
        wait_until(lambda: all((home / f"rank{rank}.updates").exists() for rank in range(ranks)), LIMIT_S)
        time.sleep(delay_s)
        started[victim].kill()
        codes = [process.wait(LIMIT_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [-signal.SIGKILL if rank == victim else 5 for rank in range(ranks)]
    survivors = [json.loads((home / f"rank{rank}.json").read_text()) for rank in range(ranks) if rank != victim]
    assert all(survivor["kept"] and survivor["updates"] > 0 for survivor in survivors)
    # The sums of an update are with all ranks, or with none that still needs the lost one for them.
    updates = [survivor["updates"] for survivor in survivors]
    assert max(updates) - min(updates) <= 1


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        pytest.param(kind, ranks, marks=() if (kind, ranks) == ("data", 3) else pytest.mark.slow)
        for kind in KINDS
        for ranks in (2, 3)
    ],
)
def test_survivors_keep_their_last_update(tiny: Tiny, tmp_path: Path, kind: str, ranks: int) -> None:
    lose_one(tiny, tmp_path, KINDS[kind], ranks, seed=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_survivors_keep_their_last_update_at_many_moments(tiny: Tiny, tmp_path: Path, kind: str, ranks: int) -> None:
    for seed in range(10, 20):
        lose_one(tiny, tmp_path / str(seed), KINDS[kind], ranks, seed)
