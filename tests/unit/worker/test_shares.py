"""A batch divided over ranks: whole, by largest remainder, something for everybody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.shares import share_counts, share_slice

shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(st.integers(1, 4_096), shares)
def test_shares_add_up_to_the_batch_with_something_for_everybody(total: int, parts: list[float]) -> None:
    total = max(total, len(parts))
    counts = share_counts(total, parts)
    assert sum(counts) == total
    assert min(counts) >= 1
    quotas = [total * part / sum(parts) for part in parts]
    if min(quotas) >= 1:
        assert all(abs(count - quota) < 1 + 1e-9 for count, quota in zip(counts, quotas, strict=True))


@given(st.integers(1, 512), shares, st.integers(0, 512))
def test_slices_of_any_batch_are_disjoint_and_whole(total: int, parts: list[float], length: int) -> None:
    total = max(total, len(parts))
    counts = share_counts(total, parts)
    length = min(length, total)
    whole = list(range(length))
    pieces = [whole[share_slice(length, counts, rank)] for rank in range(len(counts))]
    assert [item for piece in pieces for item in piece] == whole


@pytest.mark.parametrize(
    ("total", "parts", "counts"),
    [(8, [1, 1], [4, 4]), (8, [3, 1], [6, 2]), (7, [1, 1], [4, 3]), (4, [1000, 1, 1], [2, 1, 1]), (10, [2, 3], [4, 6])],
)
def test_shares_by_largest_remainder(total: int, parts: list[float], counts: list[int]) -> None:
    assert share_counts(total, parts) == counts


@pytest.mark.parametrize("parts", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_shares_that_mean_nothing_are_refused(parts: list[float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        share_counts(8, parts)


def test_a_batch_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for 3 ranks"):
        share_counts(2, [1.0, 1.0, 1.0])
