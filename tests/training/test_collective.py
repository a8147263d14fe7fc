"""Broadcasts between ranks, as threads of this process."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.trainer import collective as collective_module
from engine.trainer.collective import all_gather_object, broadcast_arrays
from tests.training.together import together


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([mx.float32, mx.bfloat16, mx.float16, mx.uint8, mx.uint64, mx.int16]),
            st.lists(st.integers(0, 5), max_size=3),
            st.integers(0, 2**32 - 1),
        ),
        max_size=6,
    ),
    st.integers(0, 2),
    st.sampled_from([2, 10, 2**18]),
)
def test_arrays_are_broadcast_bit_for_bit(
    shapes: list[tuple[mx.Dtype, list[int], int]], owner: int, bucket: int
) -> None:
    """Any bits: what is no number, -0.0, and arrays without elements."""
    groups: dict[str, dict[str, mx.array]] = {"a": {}, "b": {}}
    for number, (dtype, shape, seed) in enumerate(shapes):
        count = int(np.prod(shape)) * dtype.size
        raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
        groups["ab"[number % 2]][f"x{number}"] = mx.array(raw).view(dtype).reshape(shape)
    mx.eval(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_module, "_BUCKET_WORDS", bucket)
        found = together(3, lambda each: broadcast_arrays(each, groups if each.rank == owner else None, owner))
    for one in found:
        assert {(group, name) for group in one for name in one[group]} == {(g, n) for g in groups for n in groups[g]}
        for group, arrays in groups.items():
            for name, value in arrays.items():
                theirs = one[group][name]
                assert (theirs.dtype, theirs.shape) == (value.dtype, value.shape)
                ours, others = (np.asarray(each.reshape(-1).view(mx.uint8)) for each in (value, theirs))
                assert np.array_equal(ours, others)


def test_objects_of_different_lengths_are_gathered_on_all_ranks() -> None:
    facts = [[], {"text": "ä" * 50}, 3]
    assert together(3, lambda each: all_gather_object(each, facts[each.rank])) == [facts] * 3
