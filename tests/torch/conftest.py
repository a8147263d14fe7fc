"""The fixtures of the trainings with PyTorch: the tiny model and its data."""

from __future__ import annotations

import pytest

from tests.training.tiny import Tiny, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make_tiny(tmp_path_factory.mktemp("tiny"))
