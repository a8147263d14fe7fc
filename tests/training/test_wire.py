"""However gradients travel, two and three ranks of strategy "data" train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.partitioned_cases import PartitionedBench, Ran, compare
from tests.training.test_resume import job, kill_and_go_on, run_training
from tests.training.tiny import Tiny, write_rows

pytestmark = pytest.mark.busy

NAMES = ("full", "tied", "clipped", "bfloat16", "float16")
ITERS = 6
STEPS = 300
SHARES = {1: [1.0], 2: [3.0, 1.0], 3: [2.0, 1.0, 1.0], 4: [3.0, 2.0, 1.0, 1.0]}


def run(bench: PartitionedBench, ranks: int, names: tuple[str, ...], wires: tuple[str, ...], iters: int) -> Any:
    """By wire and name, in buckets of which every model has several."""
    more: dict[str, Any] = {"shares": SHARES[ranks], "bucket": 4_000}
    cases = []
    for wire in wires:
        for case in bench.cases(names, "data", iters, **more):
            cases.append({**case, "name": f"{wire} {case['name']}", "job": {**case["job"], "wire": wire}})
    ran = bench.run(f"{'-'.join(wires)} {len(names)} on {ranks}", cases, ranks)
    return {wire: {name: ran[f"{wire} {name}"] for name in names} for wire in wires}


@pytest.fixture(scope="module")
def alone(bench: PartitionedBench) -> dict[str, Ran]:
    found: dict[str, Ran] = run(bench, 1, NAMES, ("auto",), ITERS)["auto"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_as_one_process(bench: PartitionedBench, alone: dict[str, Ran], ranks: int) -> None:
    ran = run(bench, ranks, NAMES, ("auto", "float32"), ITERS)
    for name in NAMES:
        for wire in ("auto", "float32"):
            compare(name, alone[name], ran[wire][name])
        if ranks == 2:
            # Of two numbers there is one sum.
            assert ran["auto"][name].losses == ran["float32"][name].losses


@pytest.mark.slow
def test_fifty_steps(bench: PartitionedBench) -> None:
    names = ("full", "tied", "clipped")
    alone = run(bench, 1, names, ("auto",), 50)["auto"]
    for ranks in (2, 3, 4):
        for ran in run(bench, ranks, names, ("auto", "float32"), 50).values():
            for name in names:
                compare(name, alone[name], ran[name])


@pytest.mark.slow
def test_a_rank_without_targets_takes_part(bench: PartitionedBench, tmp_path: Path) -> None:
    """A batch is all of the data, and the prompts of a third of it fill max_seq_length."""
    rows = [{"prompt": "tower " * 60, "completion": "raven"}, *[{"prompt": "hold", "completion": "left over"}] * 2] * 4
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "valid.jsonl", rows[1:3])
    keys = {"data": str(tmp_path), "mask_prompt": True, "max_seq_length": 40, "batch_size": len(rows)}
    (case,) = bench.cases(("full",), "data", 8, bucket=4_000)
    case["job"] |= keys
    alone, both = (
        bench.run(f"no targets {len(shares)}", [{**case, "shares": shares}], len(shares))["full"]
        for shares in ([1.0], [11.0, 1.0])
    )
    compare("full", alone, both)
    assert 0 in both.ranks[1]["targets"] and min(both.ranks[0]["targets"]) > 0


@pytest.mark.slow
def test_in_int8_the_loss_is_within_a_hundredth(bench: PartitionedBench) -> None:
    names = ("full", "bfloat16")
    alone, ran = run(bench, 1, names, ("auto",), STEPS)["auto"], run(bench, 2, names, ("int8",), STEPS)["int8"]
    for name in names:
        assert ran[name].ranks[0]["losses"] == ran[name].ranks[1]["losses"]
        assert abs(ran[name].ranks[0]["valid"] / alone[name].ranks[0]["valid"] - 1) < 0.01
        assert np.mean(ran[name].losses[-20:]) < 0.8 * np.mean(ran[name].losses[:5])


@pytest.mark.slow
def test_killed_in_int8_it_goes_on_bit_by_bit(tiny: Tiny, tmp_path: Path) -> None:
    """What is rounded away is in no checkpoint: nothing is, by the update that a checkpoint follows."""
    what = job(tiny, wire="int8")
    whole = run_training(tmp_path / "whole", what, every=3).succeeded()
    kill_and_go_on(tmp_path / "killed", what, whole, [8])
