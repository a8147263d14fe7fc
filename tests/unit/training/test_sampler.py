"""Batches by a pure function of seed, epoch and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.partition import (
    ChunkPlan,
    chunk_plan,
    epoch_iterations,
    input_width,
    share_counts,
    share_slice,
    token_edges,
)
from engine.training.sampler import BudgetSampler, Sampler, fixed_batches

lengths = st.lists(st.integers(0, 5_000), min_size=1, max_size=200)
shares = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8)


def whole(sizes: list[int], batch_size: int, seed: int = 0) -> Sampler:
    return sampler_of(ChunkPlan.whole(len(sizes)), sizes, batch_size, seed)


def chunked(sizes: list[int], chunk_size: int, batch_size: int, seed: int = 0) -> Sampler:
    return sampler_of(streamed(len(sizes), chunk_size), sizes, batch_size, seed)


def sampler_of(plan: ChunkPlan, sizes: list[int], batch_size: int, seed: int) -> Sampler:
    every = np.asarray(sizes, dtype=np.int64)
    return Sampler(plan, lambda start, end: every[start:end], batch_size, seed)


def streamed(size: int, chunk_size: int) -> ChunkPlan:
    """Also of a dataset that is smaller than a chunk."""
    return replace(chunk_plan(size, chunk_size), enabled=True)


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 5))
def test_whole_epochs_are_as_many_iterations_as_the_sampler_has_batches(
    size: int, batch_size: int, epochs: int
) -> None:
    size += batch_size
    batches = whole([1] * size, batch_size).batches_per_epoch
    assert epoch_iterations(epochs, batches) == epochs * batches


def test_a_part_of_an_epoch_is_the_nearest_number_of_batches_and_at_least_one() -> None:
    assert [epoch_iterations(part, 10) for part in (0.01, 0.26, 1.1, 2.5)] == [1, 3, 11, 25]


@given(lengths, st.integers(1, 16), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_takes_each_example_at_most_once_and_leaves_less_than_a_batch(
    sizes: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    batch_size = min(batch_size, len(sizes))
    sampler = whole(sizes, batch_size, seed)
    first = epoch * sampler.batches_per_epoch
    taken = np.concatenate([sampler.batch(first + number) for number in range(sampler.batches_per_epoch)])
    assert len(set(taken.tolist())) == len(taken) > len(sizes) - batch_size
    assert set(taken.tolist()) <= set(range(len(sizes)))


@given(lengths, st.integers(1, 16), st.integers(0, 2**63), st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_a_batch_depends_on_its_position_alone(
    sizes: list[int], batch_size: int, seed: int, positions: list[int]
) -> None:
    batch_size = min(batch_size, len(sizes))
    wandering = whole(sizes, batch_size, seed)
    for position in positions:
        np.random.random()
        assert wandering.batch(position).tolist() == whole(sizes, batch_size, seed).batch(position).tolist()


def test_epochs_and_seeds_differ_and_in_time_every_example_is_seen() -> None:
    sizes = list(range(50))
    sampler = whole(sizes, 8, seed=1)
    epochs = [[sampler.batch(6 * epoch + number).tolist() for number in range(6)] for epoch in range(20)]
    assert epochs[0] != epochs[1]
    assert epochs[0] != [whole(sizes, 8, seed=2).batch(number).tolist() for number in range(6)]
    assert {example for epoch in epochs for batch in epoch for example in batch} == set(range(50))


def test_batches_hold_examples_of_like_length_and_save_padding() -> None:
    dice = np.random.default_rng(5)
    sizes = dice.integers(1, 1_000, 512)

    def padding(batches: list[np.ndarray]) -> float:
        padded = sum(int(sizes[batch].max()) * len(batch) for batch in batches)
        return 1 - float(sizes[np.concatenate(batches)].sum()) / padded

    sampler = whole(sizes.tolist(), 8, seed=0)
    by_length = padding([sampler.batch(number) for number in range(64)])
    at_random = padding(list(dice.permutation(512).reshape(64, 8)))
    assert by_length < 0.05
    assert at_random > 0.3


def test_the_order_is_the_same_in_every_release() -> None:
    """Written down once: a changed order would break the resumption of runs begun before."""
    sampler = whole([5, 3, 9, 1, 7, 7, 2, 8], 2, seed=42)
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
        whole([1, 2, 3], 4)
    with pytest.raises(ValueError, match="3 examples do not fill one batch of 4"):
        chunked([1, 2, 3], 2, 4)


@given(lengths, st.integers(1, 60), st.integers(1, 16), st.integers(0, 5), shares)
def test_a_chunked_epoch_takes_each_example_once_over_all_ranks(
    sizes: list[int], chunk_size: int, batch_size: int, epoch: int, parts: list[float]
) -> None:
    """But for less than a batch that is left out; chunks may be smaller than a batch, and larger than the data."""
    batch_size = min(batch_size, len(sizes))
    parts = parts[:batch_size]
    counts = share_counts(batch_size, parts)
    sampler = chunked(sizes, chunk_size, batch_size, seed=epoch)
    first = epoch * sampler.batches_per_epoch
    taken: list[int] = []
    for number in range(sampler.batches_per_epoch):
        batch = sampler.batch(first + number)
        shared = [batch[share_slice(batch_size, counts, rank)].tolist() for rank in range(len(counts))]
        assert [example for share in shared for example in share] == batch.tolist()
        taken += batch.tolist()
    assert len(set(taken)) == len(taken) == len(sizes) // batch_size * batch_size
    assert set(taken) <= set(range(len(sizes)))


@given(lengths, st.integers(1, 60), st.integers(1, 16), st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_a_chunked_batch_depends_on_its_position_alone(
    sizes: list[int], chunk_size: int, batch_size: int, positions: list[int]
) -> None:
    batch_size = min(batch_size, len(sizes))
    wandering = chunked(sizes, chunk_size, batch_size)
    for position in positions:
        resumed = chunked(sizes, chunk_size, batch_size)
        assert wandering.batch(position).tolist() == resumed.batch(position).tolist()
        assert wandering.chunk_end(position) == resumed.chunk_end(position)


@given(lengths, st.integers(1, 60), st.integers(1, 16), st.integers(0, 3))
def test_chunks_end_in_order_and_the_last_with_its_epoch(
    sizes: list[int], chunk_size: int, batch_size: int, epoch: int
) -> None:
    batch_size = min(batch_size, len(sizes))
    sampler = chunked(sizes, chunk_size, batch_size)
    plan = chunk_plan(len(sizes), chunk_size)
    first, num_chunks = epoch * sampler.batches_per_epoch, plan.num_chunks
    ends = [sampler.chunk_end(first + number) for number in range(sampler.batches_per_epoch)]
    output = [end[1] for end in ends if end is not None]
    assert output == sorted(set(output))
    assert ends[-1] == (epoch, num_chunks)
    if all(end - start >= batch_size for start, end in map(plan.bounds, range(plan.num_chunks))):
        assert output == list(range(1, num_chunks + 1))


def test_a_batch_is_of_one_chunk_but_for_what_the_one_before_has_left_over() -> None:
    sampler = chunked(list(range(1_000)), 100, 8)
    taken: list[set[int]] = [set()]
    for position in range(sampler.batches_per_epoch):
        batch = sampler.batch(position)
        taken[-1] |= set((batch // 100).tolist())
        if sampler.chunk_end(position):
            taken.append(set())
    assert [len(chunks) for chunks in taken] == [1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 0]
    assert set.union(*taken) == set(range(10))


def test_chunks_and_epochs_come_in_other_orders() -> None:
    sampler = chunked([1] * 1_000, 100, 10, seed=3)
    orders = [[int(sampler.batch(100 * epoch + 10 * chunk)[0]) // 100 for chunk in range(10)] for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in [*orders, list(range(10))]}) == 4


def test_chunked_batches_hold_examples_of_like_length() -> None:
    sizes = np.random.default_rng(5).integers(1, 1_000, 2_048)
    sampler = chunked(sizes.tolist(), 512, 8)
    batches = [sampler.batch(number) for number in range(256)]
    padded = sum(int(sizes[batch].max()) * 8 for batch in batches)
    assert 1 - float(sizes.sum()) / padded < 0.05


def test_the_chunked_order_is_the_same_in_every_release() -> None:
    sampler = chunked([5, 3, 9, 1, 7, 7, 2, 8], 3, 2, seed=42)
    assert [sampler.batch(position).tolist() for position in range(8)] == [
        [2, 1],
        [0, 6],
        [5, 7],
        [3, 4],
        [6, 7],
        [4, 5],
        [1, 3],
        [2, 0],
    ]


@given(st.integers(1, 200), st.integers(1, 60), st.integers(1, 16), st.integers(-1, 12), st.integers(0, 99))
def test_a_chunked_validation_takes_no_example_twice(
    count: int, chunk_size: int, batch_size: int, limit: int, seed: int
) -> None:
    plan = streamed(count, chunk_size)
    batches = [batch.tolist() for batch in fixed_batches(plan, batch_size, seed, limit)]
    taken = [example for batch in batches for example in batch]
    assert len(set(taken)) == len(taken) == (count if limit < 0 else min(count, limit * batch_size))
    assert set(taken) <= set(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert batches == [batch.tolist() for batch in fixed_batches(plan, batch_size, seed, limit)]


def test_a_short_chunked_validation_looks_at_all_of_the_data() -> None:
    batches = list(fixed_batches(chunk_plan(10_000, 100), 8, 0, 5))
    assert sorted((np.concatenate(batches) // 250).tolist()) == list(range(40))


@given(st.integers(0, 200), st.integers(1, 16), st.integers(0, 99))
def test_validation_takes_every_example_once_and_always_in_the_same_batches(
    count: int, batch_size: int, seed: int
) -> None:
    plan = ChunkPlan.whole(count)
    batches = list(fixed_batches(plan, batch_size, seed, -1))
    assert sorted(example for batch in batches for example in batch.tolist()) == list(range(count))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    limited = fixed_batches(plan, batch_size, seed, 3)
    assert [batch.tolist() for batch in limited] == [batch.tolist() for batch in batches[:3]]


MAX_LENGTH = 512
budgets = st.integers(1, 6_000)
plans = st.one_of(st.none(), st.integers(1, 60))
"""None: in memory; else examples of a chunk."""


def by_budget(sizes: list[int], budget: int, chunk_size: int | None, seed: int = 0) -> BudgetSampler:
    plan = ChunkPlan.whole(len(sizes)) if chunk_size is None else streamed(len(sizes), chunk_size)
    every = np.minimum(np.asarray(sizes, dtype=np.int64), MAX_LENGTH)
    return BudgetSampler(plan, lambda start, end: every[start:end], (budget, MAX_LENGTH), seed)


def epoch_of(sampler: BudgetSampler, epoch: int) -> list[list[int]]:
    first = epoch * sampler.batches_per_epoch
    return [sampler.batch(first + number).tolist() for number in range(sampler.batches_per_epoch)]


@given(lengths, budgets, plans, st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_by_budget_takes_each_example_once_and_keeps_to_the_budget(
    sizes: list[int], budget: int, chunk_size: int | None, seed: int, epoch: int
) -> None:
    batches = epoch_of(by_budget(sizes, budget, chunk_size, seed), epoch)
    assert sorted(example for batch in batches for example in batch) == list(range(len(sizes)))
    shapes: dict[int, set[int]] = {}
    for batch in batches:
        tokens = [min(sizes[example], MAX_LENGTH) for example in batch]
        assert tokens == sorted(tokens, reverse=True)
        width = input_width(tokens[0], MAX_LENGTH)
        assert len(batch) == 1 or len(batch) * width <= budget
        shapes.setdefault(width, set()).add(len(batch))
    if chunk_size is None:
        assert sum(len(rows) - 1 for rows in shapes.values()) <= 1, "a width has one number of rows, but for the rest"


@given(lengths, budgets, plans, st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_a_batch_by_budget_depends_on_its_position_alone(
    sizes: list[int], budget: int, chunk_size: int | None, positions: list[int]
) -> None:
    wandering = by_budget(sizes, budget, chunk_size)
    for position in positions:
        resumed = by_budget(sizes, budget, chunk_size)
        assert wandering.batch(position).tolist() == resumed.batch(position).tolist()
        assert wandering.chunk_end(position) == resumed.chunk_end(position)


@given(lengths, budgets, plans, st.integers(-1, 12))
def test_a_validation_by_budget_takes_no_example_twice_and_always_the_same(
    sizes: list[int], budget: int, chunk_size: int | None, limit: int
) -> None:
    sampler = by_budget(sizes, budget, chunk_size)
    batches = [batch.tolist() for batch in sampler.fixed(limit)]
    whole = epoch_of(sampler, 0)
    assert len(batches) == (len(whole) if limit < 0 else min(limit, len(whole)))
    assert all(batch in whole for batch in batches) and len({tuple(batch) for batch in batches}) == len(batches)
    assert batches == [batch.tolist() for batch in by_budget(sizes, budget, chunk_size).fixed(limit)]


def test_epochs_by_budget_come_in_other_orders_and_ties_in_other_batches() -> None:
    sampler = by_budget([40] * 60 + [80] * 20, 400, None)
    epochs = [epoch_of(sampler, epoch) for epoch in range(3)]
    assert len({str(epoch) for epoch in epochs}) == len({str(sorted(map(sorted, epoch))) for epoch in epochs}) == 3


def test_the_order_by_budget_is_the_same_in_every_release() -> None:
    sampler = by_budget([50, 30, 90, 10, 70, 70, 20, 80], 200, None, seed=42)
    assert [sampler.batch(position).tolist() for position in range(8)] == [
        [2, 7],
        [5, 4],
        [3],
        [0, 1, 6],
        [0, 1, 6],
        [3],
        [2, 7],
        [4, 5],
    ]
    sampler = by_budget([50, 30, 90, 10, 70, 70, 20, 80], 200, 5, seed=42)
    assert [sampler.batch(position).tolist() for position in range(10)] == [
        [0, 1, 3],
        [2, 4],
        [6],
        [7, 5],
        [6],
        [7, 5],
        [2, 4],
        [0, 1, 3],
        [2, 4],
        [0, 1, 3],
    ]


@given(
    st.lists(st.integers(1, 4_000), min_size=1, max_size=7), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=3)
)
def test_no_other_cut_of_a_batch_lets_its_slowest_rank_end_sooner(widths: list[int], parts: list[float]) -> None:
    widths.sort(reverse=True)

    def slowest(edges: Sequence[int]) -> float:
        return max(
            (end - start) * widths[start] / share if start < end else 0.0
            for (start, end), share in zip(pairwise(edges), parts, strict=True)
        )

    edges = token_edges(widths, parts)
    cuts = combinations_with_replacement(range(len(widths) + 1), len(parts) - 1)
    best = min(slowest([0, *cut, len(widths)]) for cut in cuts)
    assert len(edges) == len(parts) + 1 and slowest(edges) == pytest.approx(best)


def test_rows_of_one_width_are_divided_as_their_number() -> None:
    assert token_edges([64] * 12, [3.0, 1.0, 2.0]) == [0, 6, 8, 12]
    assert token_edges([2_000, 100, 100, 100], [1.0, 1.0]) == [0, 1, 4]
    assert token_edges([64], [1.0, 3.0]) == [0, 0, 1], "the faster rank has the only row"
    assert token_edges([64, 64], [1.0, 0.0, 1.0]) == [0, 1, 1, 2]
