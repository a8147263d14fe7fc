"""The fixtures of the trainings: the tiny model, and what one process makes of the partitioned cases."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from tests.training.partitioned_cases import CASES, MORE, PartitionedBench, Ran, make_models
from tests.training.tiny import Tiny, make_tiny


@pytest.fixture(autouse=True)
def without_fused_kernels() -> Iterator[None]:
    """As the trainer does on the CPU: each new shape would cost seconds of the C++ compiler."""
    if mx.default_device() != mx.Device(mx.cpu):
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


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
def one_process_more(bench: PartitionedBench) -> dict[str, Ran]:
    return bench.run("alone more", bench.cases(MORE, "data", 4), 1)
