"""What is predicted of all ranks follows from what each did alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.models import Config
from engine.measurements import Calibration, GroupMeasure, LinkMeasure, Shares, ThroughputPrediction
from engine.plan.prediction import (
    UpdateExchange,
    exchange_s,
    mean_updates,
    predict_iteration,
    predict_throughput,
    step_s,
)
from engine.plan.shares import divide_batch
from engine.protocol.exchange import BUCKETS, AveragingSchedule, averaging, exchange
from engine.protocol.job import Strategy
from engine.protocol.measurements import ALL_SUM_LARGE_BYTES
from engine.protocol.partition import share_counts
from tests.unit.plan.calibrations import calibration, config, measure

SPEEDS = st.lists(st.floats(0.1, 100), min_size=1, max_size=6)
LINK = LinkMeasure(nodes=("a", "b"), latency_s=0.001, bandwidth_bytes_per_s=ALL_SUM_LARGE_BYTES / 0.011)


def predicted(speeds: list[float], batch: int, exchanged_s: float = 0.0) -> ThroughputPrediction:
    names = [f"n{number}" for number in range(len(speeds))]
    counts = dict(zip(names, share_counts(batch, speeds), strict=True))
    measures = [measure(name, speed) for name, speed in zip(names, speeds, strict=True)]
    return predict_iteration(measures, counts, UpdateExchange(exchanged_s))


def test_two_equal_nodes_without_communication_are_twice_as_fast() -> None:
    found = predicted([2.0, 2.0], 8)
    assert (found.examples_per_s, found.speed_up, found.efficiency) == pytest.approx((4.0, 2.0, 1.0))
    assert found.tokens_per_s == pytest.approx(400)


def test_an_exchange_as_long_as_the_backward_pass_costs_its_last_bucket_alone() -> None:
    found = predicted([2.0, 2.0], 8, exchanged_s=4 / 3)
    assert found.communicate_s == pytest.approx(4 / 3 / BUCKETS)
    assert found.step_s == pytest.approx(2.0 + 4 / 3 / BUCKETS)


def test_adapters_travel_in_few_buckets_so_that_the_last_one_is_a_larger_part() -> None:
    deck, taken = config(["a", "b"]), calibration({"a": 1.0, "b": 1.0}, gradient_bytes=2**20 * 4)
    found = predict_throughput(deck, taken, divide_batch(deck, taken))
    assert found.exchange_s is not None and found.communicate_s == pytest.approx(found.exchange_s / 4)


def test_a_longer_exchange_is_waited_for() -> None:
    found = predicted([2.0, 2.0], 8, exchanged_s=4 / 3 + 2.0)
    assert (found.step_s, found.speed_up, found.efficiency) == pytest.approx((4.0, 1.0, 0.5))
    assert found.exchange_s == pytest.approx(4 / 3 + 2.0)


def test_what_a_step_costs_whatever_its_batch_is_paid_by_every_rank() -> None:
    one = measure("a", 1.0, batch=4, overhead_s=2.0)
    assert step_s(one, 4) == pytest.approx(4.0)
    assert step_s(one, 8) == pytest.approx(6.0)
    assert step_s(one, 2) == pytest.approx(3.0)


@given(SPEEDS, st.integers(0, 60), st.floats(0, 10))
def test_it_is_never_faster_than_the_sum_of_the_nodes_nor_than_the_slowest(
    speeds: list[float], more: int, exchanged_s: float
) -> None:
    found = predicted(speeds, len(speeds) + more, exchanged_s)
    assert found.efficiency is not None and found.speed_up is not None and found.examples_per_s is not None
    slowest = max(found.compute_s.values())
    assert found.step_s is not None and slowest <= found.step_s <= slowest + exchanged_s + 1e-9
    assert found.step_s >= exchanged_s
    assert 0 < found.efficiency <= 1 + 1e-9
    assert found.speed_up <= sum(speeds) / max(speeds) + 1e-9
    assert found.examples_per_s <= sum(speeds) * (1 + 1e-9)


@given(SPEEDS, st.integers(0, 60), st.floats(0, 5), st.floats(0.001, 5))
def test_more_communication_is_never_faster(speeds: list[float], more: int, some: float, added: float) -> None:
    less, slow = (predicted(speeds, len(speeds) + more, seconds) for seconds in (some, some + added))
    assert less.examples_per_s is not None and slow.examples_per_s is not None
    assert slow.examples_per_s < less.examples_per_s


def test_every_bucket_waits_for_the_links_latency_and_all_bytes_for_its_bandwidth() -> None:
    form, mebibytes = exchange("float32", 2, 4), ALL_SUM_LARGE_BYTES // 4
    assert exchange_s(LINK, 0, form) == pytest.approx(0.001)
    assert exchange_s(LINK, mebibytes, form) == pytest.approx(0.001 + 0.010 / 4)
    assert exchange_s(LINK, ALL_SUM_LARGE_BYTES, form) == pytest.approx(4 * 0.001 + 0.010)
    assert exchange_s(LINK, 400 * mebibytes, form) == pytest.approx(BUCKETS * 0.001 + 1.0)


@pytest.mark.parametrize(
    ("wire", "ranks", "element_bytes", "accumulation", "sent"),
    [
        ("auto", 2, 2, 1, 2),
        ("auto", 3, 2, 1, 4),
        ("auto", 4, 2, 1, 6),
        ("auto", 2, 2, 4, 4),
        ("auto", 2, 4, 1, 4),
        ("float32", 3, 2, 1, 8 * 2 / 3),
        ("int8", 2, 2, 1, 1 + 4 / 256),
        ("int8", 3, 2, 1, 2 * (1 + 4 / 256)),
    ],
)
def test_the_bytes_that_a_gradient_takes(
    wire: str, ranks: int, element_bytes: int, accumulation: int, sent: float
) -> None:
    assert exchange(wire, ranks, element_bytes, accumulation).sent == pytest.approx(sent)


def test_sixteen_bits_halve_the_exchange_of_two_ranks_and_int8_halves_it_again() -> None:
    size = 1000 * ALL_SUM_LARGE_BYTES
    whole, half, quarter = (exchange_s(LINK, size, exchange(wire, 2, 2)) for wire in ("float32", "auto", "int8"))
    assert whole and half and quarter
    assert whole / half == pytest.approx(2, rel=0.01) and half / quarter == pytest.approx(2, rel=0.03)


def test_ranks_are_exchanged_in_the_form_of_the_job() -> None:
    deck = config(["a", "b"])
    taken = calibration({"a": 1.0, "b": 1.0}, element_bytes=2, gradient_bytes=4_000_000_000)
    shares = divide_batch(deck, taken)
    float32 = deck.model_copy(
        update={"job": deck.job.model_copy(update={"mlx_lm": deck.job.mlx_lm | {"wire": "float32"}})}
    )
    whole, own = (predict_throughput(each, taken, shares).exchange_s for each in (float32, deck))
    assert whole and own and whole / own == pytest.approx(2, rel=0.05)


def test_the_shares_of_the_calibration_make_the_batch_of_the_job() -> None:
    deck, taken = config(["a", "b"], batch=8), calibration({"a": 3.0, "b": 1.0})
    found = predict_throughput(deck, taken, divide_batch(deck, taken))
    assert found.compute_s == pytest.approx({"a": 2.0, "b": 2.0})
    assert found.exchange_s == pytest.approx(3 * 0.001 + 4e6 * (1e-9 - 0.001 / ALL_SUM_LARGE_BYTES))
    assert found.speed_up == pytest.approx(4 / 3, rel=0.01)


def test_a_budget_of_tokens_is_predicted_as_its_sequences_of_full_length() -> None:
    deck, taken = config(["a", "b"], batch=8), calibration({"a": 3.0, "b": 1.0})
    by_tokens = {"max_seq_length": 100, "batch_tokens": 850}
    other = deck.model_copy(update={"job": deck.job.model_copy(update={"mlx_lm": by_tokens})})
    expected, found = (predict_throughput(each, taken, divide_batch(each, taken)) for each in (deck, other))
    assert expected.examples_per_s == found.examples_per_s


def test_an_accumulated_update_is_communicated_once() -> None:
    deck, taken = config(["a", "b"]), calibration({"a": 3.0, "b": 1.0})
    more = deck.model_copy(
        update={"job": deck.job.model_copy(update={"mlx_lm": {**deck.job.mlx_lm, "grad_accumulation_steps": 4}})}
    )
    once, fourth = (predict_throughput(each, taken, divide_batch(each, taken)).communicate_s for each in (deck, more))
    assert once is not None and fourth == pytest.approx(once / 4)


def local(deck: Config, **keys: Any) -> Config:
    own = {**deck.job.mlx_lm, **keys}
    return deck.model_copy(update={"job": deck.job.model_copy(update={"strategy": "local", "mlx_lm": own})})


@pytest.mark.parametrize(
    ("wire", "ranks", "element_bytes", "through"),
    [
        ("auto", 2, 4.5 / 8, 4.5 / 8),
        ("auto", 5, 4.5 / 8, 4 * 4.5 / 8),
        ("int8", 3, 1 + 4 / 256, 2 * (1 + 4 / 256)),
        ("float32", 2, 4, 4),
        ("auto", 1, 4.5 / 8, 0),
    ],
)
def test_the_bytes_that_a_change_of_a_weight_takes(wire: str, ranks: int, element_bytes: float, through: float) -> None:
    form = averaging(wire, ranks)
    assert (form.element_bytes, form.sent) == pytest.approx((element_bytes, 2 * through))


@given(st.integers(1, 10**10), st.integers(2, 16), st.floats(1e5, 1e10))
def test_an_averaging_of_float32_takes_as_long_as_rank_0_needs_for_all_messages(
    elements: int, ranks: int, bytes_per_s: float
) -> None:
    """In a ring each rank sends 2 (N - 1) / N times the result, so that the link is as fast as that says."""
    whole = LinkMeasure(nodes=("a", "b"), latency_s=0.0, bandwidth_bytes_per_s=bytes_per_s / (2 * (ranks - 1) / ranks))
    found = exchange_s(whole, 4 * elements, averaging("float32", ranks))
    assert found == pytest.approx(2 * (ranks - 1) * 4 * elements / bytes_per_s)
    small = exchange_s(whole, 4 * elements, averaging("auto", ranks))
    assert found is not None and small is not None and found / small == pytest.approx(32 / 4.5)


@given(SPEEDS.filter(lambda speeds: len(speeds) > 1), st.integers(1, 500), st.integers(1, 8), st.floats(1e6, 1e10))
def test_a_local_step_is_the_slowest_ranks_and_its_part_of_an_averaging(
    speeds: list[float], steps: int, accumulation: int, bandwidth: float
) -> None:
    names = [f"n{number}" for number in range(len(speeds))]
    link = LinkMeasure(nodes=tuple(names), latency_s=1e-3, bandwidth_bytes_per_s=bandwidth)
    taken = calibration(dict(zip(names, speeds, strict=True)), all_ranks=link)
    # No averaging is for a save or a validation alone.
    whole = {"iters": 16 * steps * accumulation, "save_every": steps * accumulation, "val_batches": 0}
    deck = local(config(names, batch=64), local_steps=steps, grad_accumulation_steps=accumulation, **whole)
    found = predict_throughput(deck, taken, divide_batch(deck, taken))
    assert found.exchange_s == exchange_s(link, taken.gradient_bytes, averaging("auto", len(names)))
    assert found.exchange_s is not None and found.step_s is not None
    update = accumulation * max(found.compute_s.values()) + found.exchange_s / steps + 1e-3
    assert found.step_s * accumulation == pytest.approx(update)
    rarer = predict_throughput(
        local(deck, local_steps=2 * steps, save_every=2 * steps * accumulation), taken, divide_batch(deck, taken)
    )
    assert rarer.step_s is not None and rarer.step_s < found.step_s


def test_saves_and_validations_make_averagings_more_frequent() -> None:
    rare = {"local_steps": 500, "save_every": 1000, "val_batches": 0}
    assert mean_updates(rare) == 500
    assert mean_updates({**rare, "save_every": 100}) == 100
    assert mean_updates({**rare, "epochs": 3.0}) == 500
    # Before the iterations 200, 400, 600, 800 and 1000, too.
    assert mean_updates({**rare, "val_batches": 25, "steps_per_eval": 200}) == pytest.approx(1000 / 7)
    assert mean_updates({**rare, "grad_accumulation_steps": 4, "save_every": 400, "local_steps": 100}) == 250 / 3


COUNTS = st.integers(1, 60)


@given(st.integers(1, 400), st.integers(1, 8), COUNTS, COUNTS, st.none() | COUNTS)
def test_an_averaging_precedes_each_save_and_validation_and_follows_local_steps_updates(
    iters: int, accumulation: int, local_steps: int, save_every: int, steps_per_eval: int | None
) -> None:
    schedule = AveragingSchedule(iters, accumulation, local_steps, save_every, steps_per_eval)
    ends = [*range(accumulation, iters, accumulation), iters]
    states = set(range(save_every, iters, save_every))
    if steps_per_eval is not None:
        states |= {done - 1 for done in (*range(steps_per_eval, iters, steps_per_eval), iters)}
    expected = {*ends[local_steps - 1 :: local_steps], iters, *(done // accumulation * accumulation for done in states)}
    found = {end for end in ends if schedule.averaging_due(end)}
    assert found == expected - {0}
    assert schedule.updates == len(ends) / len(found) <= local_steps


@given(st.integers(1, 50), st.integers(1, 8), COUNTS, st.integers(1, 5))
def test_there_are_no_more_averagings_where_saves_fall_together_with_them(
    averagings: int, accumulation: int, local_steps: int, saves: int
) -> None:
    period = accumulation * local_steps
    schedule = AveragingSchedule(averagings * period, accumulation, local_steps, saves * period, None)
    assert schedule.updates == local_steps


@pytest.mark.parametrize(("connected", "other"), [("data", "local"), ("local", "data")])
def test_a_link_says_nothing_of_a_strategy_that_connects_the_ranks_otherwise(
    connected: Strategy, other: Strategy
) -> None:
    deck = config(["a", "b"])
    taken = calibration({"a": 1.0, "b": 1.0}, backend="jaccl", connected_as=(connected,))
    shares, decks = divide_batch(deck, taken), {"data": deck, "local": local(deck)}
    assert predict_throughput(decks[connected], taken, shares).step_s is not None
    found = predict_throughput(decks[other], taken, shares)
    assert found.step_s is None and f"with jaccl, not as strategy {other} connects" in (found.why_not or "")
    alone = calibration({"a": 1.0}, all_ranks=None, connected_as=())
    assert predict_throughput(config(["a"]), alone, divide_batch(config(["a"]), alone)).step_s is not None


def test_an_unknown_prediction_has_a_reason() -> None:
    deck = config(["a", "b"])
    missing = calibration({"a": 1.0, "b": None})
    unlinked = calibration({"a": 1.0, "b": 1.0}, all_ranks=None)
    for taken, why in ((None, "not calibrated"), (missing, "not measured: b"), (unlinked, "the all_sum")):
        found = predict_throughput(deck, taken, divide_batch(deck, taken))
        assert found.examples_per_s is None and found.why_not is not None and why in found.why_not
    assert "the all_sum" in (
        predict_throughput(local(deck), unlinked, divide_batch(deck, unlinked)).why_not or "predicted"
    )
    small = config(["a", "b"], batch=1)
    assert "too small" in (predict_throughput(small, unlinked, divide_batch(small, unlinked)).why_not or "")


def test_a_node_alone_needs_no_link() -> None:
    deck, taken = config(["a"]), calibration({"a": 2.0}, all_ranks=None)
    assert predict_throughput(deck, taken, divide_batch(deck, taken)).speed_up == pytest.approx(1.0)


def test_a_partitioned_strategy_is_predicted_by_its_own_steps_or_not_at_all() -> None:
    """A node's step of the whole model says nothing of it: by that, a run was at twice of what was predicted."""
    group = GroupMeasure(strategy="sharded", batch=8, step_s=2.0, tokens_per_s=400.0, compute_s={"a": 1.5, "b": 1.0})
    deck = config(["a", "b"])
    deck = deck.model_copy(update={"job": deck.job.model_copy(update={"strategy": "sharded"})})
    speeds = {"a": 4.0, "b": 4.0}

    def predicted(taken: Calibration, names: tuple[str, ...] = ("a", "b")) -> ThroughputPrediction:
        parts = dict.fromkeys(names, 1 / len(names))
        return predict_throughput(deck, taken, Shares(parts=parts, source="equal", reason=""))

    found = predicted(calibration(speeds, group=group))
    assert (found.examples_per_s, found.tokens_per_s, found.communicate_s) == (4.0, 400.0, 0.5)
    assert (found.speed_up, found.efficiency) == (1.0, 0.5)
    alone = predicted(calibration({"a": None, "b": None}, group=group))
    assert (alone.examples_per_s, alone.speed_up) == (4.0, None), "the whole model fits none of them"
    other = group.model_copy(update={"strategy": "pipeline"})
    failed = GroupMeasure(strategy="sharded", batch=8, problem="rank 1 on b: Killed")
    for taken, why in ((None, "strategy sharded"), (other, "strategy sharded"), (failed, "rank 1 on b: Killed")):
        none = predicted(calibration(speeds, group=taken))
        assert none.examples_per_s is None and why in (none.why_not or "")
    assert "measured on a, b together" in (predicted(calibration(speeds, group=group), ("a",)).why_not or "")
