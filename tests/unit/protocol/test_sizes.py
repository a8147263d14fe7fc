"""Sizes as they are shown."""

from __future__ import annotations

import pytest

from engine.protocol.sizes import room_fault, size_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (812, "812 B"), (999, "999 B"), (1500, "1.5 kB"), (999_499, "999 kB"), (999_500, "1.0 MB")],
)
def test_a_size_has_the_unit_that_fits(count: int, text: str) -> None:
    assert size_text(count) == text


def test_a_lack_of_room_says_how_much_is_missing() -> None:
    assert (
        room_fault(985_000_000, 1_041_000_000) == "it takes 985 MB, and 64.0 MB in reserve: 8.0 MB more than are free"
    )
    assert room_fault(985_000_000, 1_049_000_000) is None
    assert room_fault(0, 0) is None, "nothing is left to write"
