"""However gradients travel, two and three ranks of strategy "data" train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.partitioned_cases import PartitionedBench, Ran, compare
from tests.training.test_resume import job, kill_and_go_on, run_training
from tests.training.tiny import Tiny

pytestmark = pytest.mark.busy

NAMES = ("full", "tied", "clipped", "bfloat16", "float16")
ITERS = 6
STEPS = 300
SHARES = {1: [1.0], 2: [3.0, 1.0], 3: [2.0, 1.0, 1.0]}


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
def test_in_int8_the_loss_is_within_a_hundredth(bench: PartitionedBench) -> None:
    names = ("full", "bfloat16")
    alone, ran = run(bench, 1, names, ("auto",), STEPS)["auto"], run(bench, 2, names, ("int8",), STEPS)["int8"]
    for name in names:
        assert ran[name].ranks[0]["losses"] == ran[name].ranks[1]["losses"]
        assert abs(ran[name].ranks[0]["valid"] / alone[name].ranks[0]["valid"] - 1) < 0.01
        assert np.mean(ran[name].losses[-20:]) < 0.8 * np.mean(ran[name].losses[:5])


def test_killed_in_int8_it_goes_on_bit_by_bit(tiny: Tiny, tmp_path: Path) -> None:
    """What is rounded away is in no checkpoint: nothing is, by the update that a checkpoint follows."""
    what = job(tiny, wire="int8")
    whole = run_training(tmp_path / "whole", what, every=3).succeeded()
    kill_and_go_on(tmp_path / "killed", what, whole, [8])
