"""Which layers each stage of a pipeline gets."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.protocol.partition import bubble_fraction, format_split, layer_split

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
