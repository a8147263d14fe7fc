"""When a dataset is chunked, and that its chunks cover it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.chunks import COORDINATOR_CHUNK_SIZE, chunk_plan, progress_text


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
def test_a_size_that_is_none_is_a_clear_error(size: object) -> None:
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
    covered = [example for start, end in plan.boundaries for example in range(start, end)]
    assert covered == list(range(size))


@pytest.mark.parametrize("chunk", [-1, 3])
def test_there_is_no_other_chunk(chunk: int) -> None:
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
def test_the_progress_is_read_out(chunk: int, chunks: int, text: str) -> None:
    assert progress_text(chunk, chunks) == text


@pytest.mark.parametrize("chunk", [0, 11])
def test_no_progress_is_made_up(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk {chunk} of 10"):
        progress_text(chunk, 10)


def test_the_arithmetic_needs_the_standard_library_only() -> None:
    probe = "import engine.worker.chunks, sys; print({'mlx', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
