"""What the plan says of padding and of a budget of tokens, from the lengths of some rows."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.measurements import MemoryProbe, NodeMeasure
from engine.plan.document import MemorySection, PaddingSection, TrainingPlan
from engine.plan.explain import summary
from engine.plan.padding import laid_out, shapes, suggested_budget
from engine.plan.planner import make_plan
from engine.protocol.job import scaled_rate
from tests.unit.plan.clusters import calibration, inputs, ultra_and_max

SHORT_WITH_A_TAIL = {40: 900, 60: 500, 90: 400, 700: 100, 2_000: 20}
COMPUTED = {"lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0}}


def plan(settings: dict[str, Any], lengths: Mapping[int, int] = SHORT_WITH_A_TAIL, **more: Any) -> TrainingPlan:
    return make_plan(inputs(ultra_and_max(), settings={**COMPUTED, **settings}, lengths=lengths, **more))


def padding(made: TrainingPlan) -> PaddingSection:
    assert made.batch_configuration.padding is not None
    return made.batch_configuration.padding


@given(
    st.dictionaries(st.integers(1, 5_000), st.integers(1, 50), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(1, 100_000)),
    st.integers(1, 10_000),
)
def test_rows_are_laid_out_in_the_proportions_of_those_measured(
    lengths: dict[int, int], examples: int | None, budget: int
) -> None:
    rows = laid_out(lengths, examples, 2_048)
    assert rows == sorted(rows, reverse=True) and set(rows) <= {min(tokens, 2_048) for tokens in lengths}
    if examples is None:
        assert len(rows) == sum(lengths.values())
    found = shapes(rows, 2_048, budget=budget)
    assert 0 <= found.real <= 1 and (found.largest[0] == 1 or found.largest[0] * found.largest[1] <= budget)


@given(st.lists(st.integers(1, 5_000), min_size=1, max_size=200), st.integers(1, 20))
def test_the_suggested_budget_has_as_many_updates(lengths: list[int], sequences: int) -> None:
    rows = sorted((min(tokens, 2_048) for tokens in lengths), reverse=True)
    budget, by_size = suggested_budget(rows, sequences, 2_048), math.ceil(len(rows) / sequences)
    assert len(rows) / shapes(rows, 2_048, budget=budget).rows <= by_size + 1e-9
    # With fewer inputs there are more.
    assert budget == 16 or len(rows) / shapes(rows, 2_048, budget=budget - 16).rows > by_size


def test_without_lengths_nothing_is_said() -> None:
    assert plan({}, lengths={}).batch_configuration.padding is None
    assert laid_out({}, 10, 100) == []


def test_a_batch_size_is_compared_with_the_budget_of_as_many_sequences() -> None:
    """With 64 sequences a batch, those of the tail are padded to the longest."""
    made = plan({"batch_size": 256})
    found = padding(made)
    assert found.largest_step == (256, 2_047) and found.batch_tokens is None
    assert found.suggested_real_share > found.real_share + 0.1
    text = dict(summary(made))["batch"]
    assert f"with batch_tokens = {found.suggested_batch_tokens} {found.suggested_real_share:.0%}" in text


def test_a_budget_is_said_as_what_it_comes_to() -> None:
    made = plan({"batch_tokens": 8_192, "epochs": 2, "learning_rate": "auto", "grad_accumulation_steps": 2})
    batch, found = made.batch_configuration, padding(made)
    rows, width = found.largest_step
    assert 0.9 < found.real_share <= 1 and rows * width <= 8_192
    assert batch.total_batch_size == 2 * round(found.sequences_per_batch)
    assert batch.updates == pytest.approx(10_000 / found.sequences_per_batch, rel=0.02)
    assert batch.learning_rate == batch.rule_learning_rate == scaled_rate(2 * found.sequences_per_batch, "sqrt")
    text = dict(summary(made))["batch"]
    assert text.startswith(f"about {batch.total_batch_size} per update")
    assert f"the largest step has {rows:,} × {width:,}" in text
    assert not made.refusals
    assert batch.suggested is not None
    written = tomllib.loads(batch.suggested.job_keys)
    assert "batch_size" not in written
    # The rate beside it is for the job's own total.
    assert written["batch_tokens"] * written["grad_accumulation_steps"] == pytest.approx(2 * 8_192, rel=0.1)


def test_iterations_and_the_rate_are_of_the_mean_batch_also_of_fewer_rows_than_ranks() -> None:
    keys = {"batch_tokens": 1_024, "epochs": 2, "learning_rate": "auto"}
    for length, rows in ((900, 1), (300, 3)):
        batch = plan(keys, {length: 9}, examples=9).batch_configuration
        assert (batch.updates, batch.epochs) == (2 * 9 / rows, 2)
        assert batch.learning_rate == batch.rule_learning_rate == scaled_rate(rows, "sqrt")


def test_a_budget_of_less_than_a_row_for_each_rank_is_launched_all_the_same() -> None:
    made = plan({"batch_tokens": 512}, lengths={})
    assert not made.refusals and made.batch_configuration.total_batch_size == 2


@pytest.mark.parametrize("strategy", ["data", "sharded", "pipeline"])
def test_memory_is_that_of_the_budget_whatever_the_mean_batch_is(strategy: str) -> None:
    by_size = needed(plan({"batch_size": 8, "max_seq_length": 1_024}, strategy=strategy))
    by_budget = needed(plan({"batch_tokens": 8_192, "max_seq_length": 1_024}, strategy=strategy))
    assert by_budget == pytest.approx(by_size, rel=0.05)
    # Of one long example, which is longer than the budget.
    least = needed(plan({"batch_tokens": 64, "max_seq_length": 1_024}, strategy=strategy))
    assert all(small < large for small, large in zip(least, by_budget, strict=True))


def test_any_rank_may_have_the_odd_row() -> None:
    one, other = needed(plan({"batch_tokens": 3 * 1_024, "max_seq_length": 1_024}))
    assert one == other == needed(plan({"batch_size": 4, "max_seq_length": 1_024}))[0]


def test_where_every_row_was_measured_no_longer_one_is_expected() -> None:
    settings = {"batch_tokens": 512, "max_seq_length": 8_192}
    short = {50: 900, 120: 100}
    whole, some = (needed(plan(settings, lengths=short, examples=examples)) for examples in (1_000, 10_000))
    assert all(one < other for one, other in zip(whole, some, strict=True))


def test_probe_steps_of_full_length_say_nothing_of_batches_of_shorter_rows() -> None:
    probes = tuple(MemoryProbe(batch=batch, peak_bytes=8 * 10**9 + batch * 10**10) for batch in (1, 2))
    nodes = tuple(NodeMeasure(node=name, host=name, examples_per_s=1.0, probes=probes) for name in ("ultra", "max"))
    keys, taken = {"batch_tokens": 8_192, "max_seq_length": 2_048}, calibration({}, nodes=nodes)
    for longest, source in ((2_048, "calibration"), (513, "estimate")):
        made = plan(keys, {longest: 1_000}, examples=1_000, calibration=taken)
        assert isinstance(made.memory, MemorySection)
        assert {rank.source for rank in made.memory.ranks} == {source}


def needed(made: TrainingPlan) -> list[int]:
    assert isinstance(made.memory, MemorySection)
    return [rank.needed_bytes for rank in made.memory.ranks]


def test_a_budget_that_does_not_fit_is_made_smaller_or_said_so() -> None:
    settings = {"batch_tokens": 4_000_000, "fine_tune_type": "full", "grad_checkpoint": True, "max_seq_length": 2_048}
    made = plan(settings, job={"fine_tune_type": "full"})
    assert isinstance(made.memory, MemorySection)
    assert any(way.change.startswith("batch_tokens = ") for way in made.memory.ways_out)
    found = padding(made)
    assert found.suggested_batch_tokens < 4_000_000
    assert f"batch_tokens = {found.suggested_batch_tokens} would fit" in dict(summary(made))["batch"]


def test_the_suggested_budget_fits_where_every_row_is_short() -> None:
    settings = {"batch_tokens": 4_000_000, "grad_checkpoint": True, "max_seq_length": 2_048}
    rows = {513: 9_000}
    suggested = padding(plan(settings, rows, examples=9_000)).suggested_batch_tokens
    made = plan({**settings, "batch_tokens": suggested}, rows, examples=9_000)
    assert isinstance(made.memory, MemorySection)
    assert suggested < 4_000_000 and all(rank.fits for rank in made.memory.ranks)
