"""Chunks of a dataset, the ranks' shares of a batch, and the stages of a pipeline with the order of their work."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.protocol.partition import (
    COORDINATOR_CHUNK_SIZE,
    bubble_fraction,
    check_split,
    chunk_plan,
    format_split,
    layer_split,
    loss_tokens,
    micro_batches,
    padded_width,
    parse_split,
    progress_text,
    schedule,
    share_counts,
    share_counts_among,
    share_slice,
    split_by_bytes,
)


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


memories = st.lists(st.sampled_from([16, 24, 32, 64, 96, 128, 192, 256, 512]), min_size=1, max_size=8)


def test_36_layers_over_128_and_512_gb() -> None:
    assert format_split(layer_split(36, [128, 512])) == "0-8,8-36"
    assert format_split(layer_split(36, [512, 128])) == "0-28,28-36"


@given(st.integers(1, 200), memories)
def test_every_layer_is_on_one_rank_and_the_weaker_never_has_more(layers: int, memory: list[int]) -> None:
    assume(layers >= len(memory))
    split = layer_split(layers, memory)
    assert [layer for start, end in split for layer in range(start, end)] == list(range(layers))
    counts = [end - start for start, end in split]
    assert all(counts)
    assert all(
        counts[weak] <= counts[strong]
        for weak in range(len(memory))
        for strong in range(len(memory))
        if memory[weak] < memory[strong]
    )


@given(st.integers(1, 80), memories, st.data())
def test_limits_hold_or_the_split_is_refused(layers: int, memory: list[int], data: st.DataObject) -> None:
    most = data.draw(st.lists(st.sampled_from([None, 8]), min_size=len(memory), max_size=len(memory)))
    assume(layers >= len(memory))
    try:
        split = layer_split(layers, memory, most)
    except ValueError as refused:
        assert "layers are left over" in str(refused) or "fewer layers than a weaker" in str(refused)
        assert any(limit is not None for limit in most)
        return
    assert sum(end - start for start, end in split) == layers
    assert all(limit is None or end - start <= limit for (start, end), limit in zip(split, most, strict=True))


def test_limits_that_leave_layers_over_are_refused_with_who_takes_what() -> None:
    with pytest.raises(ValueError, match=r"20 of 36 layers are left over: rank 0 takes 8 \(at most 8\)"):
        layer_split(36, [128, 128], [8, 8])


@pytest.mark.parametrize(("layers", "memory"), [(1, [128, 128]), (36, [0, 128]), (36, [])])
def test_an_impossible_split_is_refused(layers: int, memory: list[int]) -> None:
    with pytest.raises(ValueError, match=r"too few|must be above 0|per rank"):
        layer_split(layers, memory)


@pytest.mark.parametrize(("stages", "micro_batches", "part"), [(2, 1, 0.5), (2, 4, 0.2), (1, 1, 0.0)])
def test_the_bubble_fraction(stages: int, micro_batches: int, part: float) -> None:
    assert bubble_fraction(stages, micro_batches) == pytest.approx(part)


def test_there_is_no_bubble_without_stages() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        bubble_fraction(0, 1)


def test_ranges_are_read_as_they_are_written() -> None:
    assert parse_split("0-8,8-36") == ((0, 8), (8, 36))
    assert parse_split(" 0-1, 1-2 ,2-4") == ((0, 1), (1, 2), (2, 4))


@pytest.mark.parametrize(
    "text", ["", "0-8", "0-8;8-36", "1-8,8-36", "0-8,9-36", "0-8,7-36", "0-0,0-4", "0-8,8-8", "8-0"]
)
def test_an_invalid_split_is_refused(text: str) -> None:
    if text == "0-8":
        with pytest.raises(ValueError, match="1 ranges for 2 ranks"):
            check_split(parse_split(text), 8, 2)
        return
    with pytest.raises(ValueError, match=r"range of layers|does not continue"):
        parse_split(text)


def test_a_division_of_another_model_is_refused() -> None:
    check_split(parse_split("0-8,8-36"), 36, 2)
    with pytest.raises(ValueError, match="ends at layer 36, and the model has 32"):
        check_split(parse_split("0-8,8-36"), 32, 2)


def test_a_batch_goes_into_two_micro_batches_for_each_stage() -> None:
    assert [micro_batches(rows, 2) for rows in (1, 3, 4, 64)] == [1, 3, 4, 4]


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(1, 12), st.integers(0, 8))
def test_no_stage_waits_for_ever_and_each_holds_few_micro_batches(stages: int, micro: int, untrained: int) -> None:
    """Sends and receives that block until the other side does its part: the worst that a backend may do."""
    first_trained = min(untrained, stages)
    left = [schedule(stage, stages, micro, first_trained) for stage in range(stages)]
    forward: list[list[int]] = [[] for _ in left]
    backward: list[list[int]] = [[] for _ in left]
    while any(left):
        moved = False
        for stage, steps in enumerate(left):
            if not steps:
                continue
            step = steps[0]
            if step.act in ("forward", "backward"):
                (forward if step.act == "forward" else backward)[stage].append(step.micro)
                if stage >= first_trained:
                    assert len(forward[stage]) - len(backward[stage]) <= stages - stage
                steps.pop(0)
                moved = True
            elif step.act.startswith("send"):
                peer = stage + (1 if step.act == "send_forward" else -1)
                waiting = left[peer][:1]
                if waiting and waiting[0].act == step.act.replace("send", "receive"):
                    # In the order in which they were sent: nothing else tells messages apart.
                    assert waiting[0].micro == step.micro
                    steps.pop(0)
                    left[peer].pop(0)
                    moved = True
        assert moved, [steps[:1] for steps in left]
    for stage in range(stages):
        assert forward[stage] == list(range(micro))
        assert backward[stage] == (list(range(micro)) if stage >= first_trained else [])


@given(st.integers(1, 2**20))
def test_a_width_adds_little(length: int) -> None:
    width = padded_width(length)
    assert length <= width <= max(length + 3, 1.0625 * length)
    assert padded_width(width) == width
    assert padded_width(length + 1) >= width


def test_widths_are_few() -> None:
    widths = sorted({padded_width(length) for length in range(1, 32_769)})
    assert len(widths) == 160
    assert widths[:3] == [4, 8, 12] and widths[31:34] == [128, 136, 144] and widths[-2:] == [31_744, 32_768]


@given(st.integers(1, 2**17), st.integers(1, 2**19))
def test_the_logits_of_a_chunk_are_limited(tokens: int, vocabulary: int) -> None:
    size = loss_tokens(tokens, vocabulary)
    assert 1 <= size <= tokens
    assert size in (tokens, min(tokens, 64)) or size % 64 == 0
    assert size <= 64 or 4 * size * vocabulary <= 128 * 2**20
    chunks = -(-tokens // size)
    assert chunks == 1 or tokens - (chunks - 1) * size > 0


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "size"),
    [(4096, 384, 4096), (1024, 32_000, 1024), (4096, 32_000, 1024), (4096, 150_000, 192), (8192, 1_000_000, 64)],
)
def test_a_small_vocabulary_is_one_chunk_and_a_large_one_many(tokens: int, vocabulary: int, size: int) -> None:
    assert loss_tokens(tokens, vocabulary) == size


@given(st.lists(st.tuples(st.floats(0.1, 10), st.booleans()), min_size=1, max_size=8), st.integers(8, 100))
def test_only_those_that_take_part_get_a_share(ranks: list[tuple[float, bool]], total: int) -> None:
    shares, parts = [share for share, _ in ranks], [part for _, part in ranks]
    parts[0] = True
    counts = share_counts_among(total, shares, parts)
    assert sum(counts) == total and all((count > 0) == part for count, part in zip(counts, parts, strict=True))
    assert share_counts_among(total, shares, None) == share_counts(total, shares)


@pytest.mark.parametrize(
    ("layers", "ends", "memory", "split"),
    [
        ([10] * 8, (0, 0), [1, 1, 1, 1], "0-2,2-4,4-6,6-8"),
        ([10] * 10, (0, 0), [1, 1, 1, 1], "0-2,2-4,4-7,7-10"),
        ([10] * 8, (20, 20), [1, 1, 1], "0-2,2-6,6-8"),
        ([10] * 8, (0, 0), [1, 3], "0-2,2-8"),
        ([10, 10, 10, 70], (5, 5), [1, 1], "0-3,3-4"),
        ([10] * 2, (500, 0), [1, 1], "0-1,1-2"),
    ],
)
def test_a_model_is_divided_by_the_bytes_of_its_layers(
    layers: list[int], ends: tuple[int, int], memory: list[float], split: str
) -> None:
    assert format_split(split_by_bytes(layers, ends, memory)) == split


def test_a_model_of_few_layers_is_not_divided_further() -> None:
    with pytest.raises(ValueError, match="2 layers are too few for 3 stages"):
        split_by_bytes([1, 1], (0, 0), [1.0] * 3)
