"""Dataset chunks and the ranks' shares of a batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.partition import COORDINATOR_CHUNK_SIZE, chunk_plan, progress_text, share_counts, share_slice


@pytest.mark.parametrize(
    ("size", "enabled", "chunks"),
    [
        (50_000, True, 1),
        (49_999, False, 1),
        (50_001, True, 2),
        (100_000, True, 2),
        (5_000_000, True, 100),
        (1, False, 1),
    ],
)
def test_chunking_begins_with_a_whole_chunk(*, size: int, enabled: bool, chunks: int) -> None:
    plan = chunk_plan(size)
    assert (plan.enabled, plan.num_chunks, plan.chunk_size) == (enabled, chunks, COORDINATOR_CHUNK_SIZE)


@pytest.mark.parametrize("size", [0, -1, -100, 2.5, True, "many", None])
def test_an_invalid_size_is_a_clear_error(size: object) -> None:
    with pytest.raises(ValueError, match=f"dataset_size = {size!r}: must be a whole number, at least 1"):
        chunk_plan(size)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"chunk_size = {size!r}: must be a whole number, at least 1"):
        chunk_plan(100, size)  # type: ignore[arg-type]


@given(st.integers(1, 10**7), st.integers(1, 10**6))
def test_chunks_cover_the_data_once(size: int, chunk_size: int) -> None:
    plan = chunk_plan(size, chunk_size)
    assert plan.enabled == (size >= chunk_size)
    assert (plan.num_chunks - 1) * chunk_size < size <= plan.num_chunks * chunk_size
    few = [plan.bounds(chunk) for chunk in {0, plan.num_chunks // 2, plan.num_chunks - 1}]
    assert all(0 < end - start <= chunk_size for start, end in few)


@given(st.integers(1, 2_000), st.integers(1, 300))
def test_bounds_follow_one_another(size: int, chunk_size: int) -> None:
    plan = chunk_plan(size, chunk_size)
    covered = [example for start, end in map(plan.bounds, range(plan.num_chunks)) for example in range(start, end)]
    assert covered == list(range(size))


@pytest.mark.parametrize("chunk", [-1, 3])
def test_a_chunk_out_of_range_is_an_error(chunk: int) -> None:
    with pytest.raises(IndexError, match=f"chunk {chunk} of 3"):
        chunk_plan(25, 10).bounds(chunk)


@pytest.mark.parametrize(
    ("chunk", "chunks", "text"),
    [
        (3, 10, "Processing chunk 3/10 (30% complete)"),
        (1, 1, "Processing chunk 1/1 (100% complete)"),
        (2, 3, "Processing chunk 2/3 (66% complete)"),
    ],
)
def test_the_progress_line(chunk: int, chunks: int, text: str) -> None:
    assert progress_text(chunk, chunks) == text


@pytest.mark.parametrize("chunk", [0, 11])
def test_progress_of_a_chunk_out_of_range_is_an_error(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk {chunk} of 10"):
        progress_text(chunk, 10)


def test_the_arithmetic_needs_the_standard_library_only() -> None:
    probe = "import engine.protocol.partition, sys; print({'mlx', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(st.integers(1, 4_096), shares)
def test_shares_add_up_to_the_batch_with_at_least_one_for_each_rank(total: int, parts: list[float]) -> None:
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
def test_invalid_shares_are_refused(parts: list[float]) -> None:
    with pytest.raises(ValueError, match="shares"):
        share_counts(8, parts)


def test_a_batch_smaller_than_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="too small for 3 ranks"):
        share_counts(2, [1.0, 1.0, 1.0])
