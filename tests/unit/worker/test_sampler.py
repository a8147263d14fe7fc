"""Batches by a pure function of seed, epoch and position; shares that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.sampler import Sampler, fixed_batches, share_counts, share_slice

lengths = st.lists(st.integers(0, 5_000), min_size=1, max_size=200)
shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


@given(lengths, st.integers(1, 16), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_takes_each_example_at_most_once_and_leaves_less_than_a_batch(
    sizes: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    batch_size = min(batch_size, len(sizes))
    sampler = Sampler(sizes, batch_size, seed)
    first = epoch * sampler.batches_per_epoch
    taken = np.concatenate([sampler.batch(first + number) for number in range(sampler.batches_per_epoch)])
    assert len(set(taken.tolist())) == len(taken) > len(sizes) - batch_size
    assert set(taken.tolist()) <= set(range(len(sizes)))


@given(lengths, st.integers(1, 16), st.integers(0, 2**63), st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_a_batch_depends_on_its_position_alone(
    sizes: list[int], batch_size: int, seed: int, positions: list[int]
) -> None:
    batch_size = min(batch_size, len(sizes))
    wandering = Sampler(sizes, batch_size, seed)
    for position in positions:
        np.random.random()
        assert wandering.batch(position).tolist() == Sampler(sizes, batch_size, seed).batch(position).tolist()


def test_epochs_and_seeds_differ_and_in_time_every_example_is_seen() -> None:
    sizes = list(range(50))
    sampler = Sampler(sizes, 8, seed=1)
    epochs = [[sampler.batch(6 * epoch + number).tolist() for number in range(6)] for epoch in range(20)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [Sampler(sizes, 8, seed=2).batch(number).tolist() for number in range(6)]
    assert {example for epoch in epochs for batch in epoch for example in batch} == set(range(50))


def test_batches_hold_examples_of_like_length_and_save_padding() -> None:
    dice = np.random.default_rng(5)
    sizes = dice.integers(1, 1_000, 512)

    def padding(batches: list[np.ndarray]) -> float:
        padded = sum(int(sizes[batch].max()) * len(batch) for batch in batches)
        return 1 - float(sizes[np.concatenate(batches)].sum()) / padded

    sampler = Sampler(sizes.tolist(), 8, seed=0)
    by_length = padding([sampler.batch(number) for number in range(64)])
    at_random = padding(list(dice.permutation(512).reshape(64, 8)))
    assert by_length < 0.05
    assert at_random > 0.3


def test_the_order_is_the_same_in_every_release() -> None:
    """Written down once: a changed order would break the resumption of runs begun before."""
    sampler = Sampler([5, 3, 9, 1, 7, 7, 2, 8], 2, seed=42)
    assert [sampler.batch(position).tolist() for position in range(8)] == [
        [6, 3],
        [0, 1],
        [2, 7],
        [4, 5],
        [5, 4],
        [2, 7],
        [3, 6],
        [1, 0],
    ]


def test_too_few_examples_for_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="3 examples do not fill one batch of 4"):
        Sampler([1, 2, 3], 4, 0)


@given(st.integers(0, 200), st.integers(1, 16), st.integers(0, 99))
def test_validation_takes_every_example_once_and_always_in_the_same_batches(
    count: int, batch_size: int, seed: int
) -> None:
    batches = fixed_batches(count, batch_size, seed, -1)
    assert sorted(example for batch in batches for example in batch.tolist()) == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    limited = fixed_batches(count, batch_size, seed, 3)
    assert [batch.tolist() for batch in limited] == [batch.tolist() for batch in batches[:3]]


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
