"""What every fault test leaves behind: nothing, also when it fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.flying import PLANNED


@pytest.fixture(autouse=True)
def cleared_away() -> Iterator[None]:
    """End whatever a test has started and not ended."""
    yield
    while PLANNED:
        PLANNED.pop().clear_away()
