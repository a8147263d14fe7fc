"""The fixtures of the trainings: the tiny model, and the runs that several modules look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from tests.training.launching import Launched, launch
from tests.training.partitioned_cases import CASES, MORE, PartitionedBench, Ran, make_models
from tests.training.tiny import UNEQUAL, Tiny, make_tiny, undisturbed_job


def disable_fused_kernels() -> None:
    """As the trainer does on the CPU: each new shape would cost seconds of the C++ compiler."""
    if mx.default_device() == mx.Device(mx.cpu):
        mx.disable_compile()


@pytest.fixture(autouse=True, scope="module")
def fixtures_without_fused_kernels() -> Iterator[None]:
    disable_fused_kernels()
    yield
    mx.enable_compile()


@pytest.fixture(autouse=True)
def without_fused_kernels() -> None:
    """Also after a test that has enabled them."""
    disable_fused_kernels()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def undisturbed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """Two ranks with unequal shares, to which nothing happens."""
    return launch(tmp_path_factory.mktemp("undisturbed"), undisturbed_job(tiny), shares=UNEQUAL).succeeded()


@pytest.fixture(scope="session")
def bench(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> PartitionedBench:
    """Models for the partitioned strategies."""
    home = tmp_path_factory.mktemp("divided")
    return PartitionedBench(tiny, make_models(tiny, home / "models"), home)


@pytest.fixture(scope="session")
def one_process(bench: PartitionedBench) -> dict[str, Ran]:
    """What one process makes of the cases that every run of the tests has."""
    return bench.run("alone", bench.cases(CASES, "data", 4), 1)


@pytest.fixture(scope="session")
def two_ranks(bench: PartitionedBench) -> dict[str, dict[str, Ran]]:
    """By strategy, what two ranks make of the cases: a pipeline with an uneven split, and shards with shares of 3:1,
    in sizes that two does not divide."""
    own: dict[str, dict[str, Any]] = {"pipeline": {"split": "0-1,1-3"}, "sharded": {"shares": [3.0, 1.0]}}
    cases = [
        {**case, "name": f"{strategy} {case['name']}"}
        for strategy, more in own.items()
        for case in bench.cases(CASES, strategy, 4, **more)
    ]
    ran = bench.run("two ranks", cases, 2)
    return {strategy: {name: ran[f"{strategy} {name}"] for name in CASES} for strategy in own}


@pytest.fixture(scope="session")
def one_process_more(bench: PartitionedBench) -> dict[str, Ran]:
    return bench.run("alone more", bench.cases(MORE, "data", 4), 1)
