"""The rule of worker consistency, over whatever workers may hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.preflight.agreement import Agreement, Decision, agreement, decide

HASHES = st.sampled_from(["a", "b", "c", None])
HELD = st.fixed_dictionaries({"script": HASHES, "model": HASHES})
WORKERS = st.lists(HELD, min_size=1, max_size=24).map(
    lambda held: {f"w{number}": hashes for number, hashes in enumerate(held)}
)
HEADS: st.SearchStrategy[dict[str, str | None]] = st.one_of(
    st.just({}), st.fixed_dictionaries({"script": HASHES}), HELD
)


def of(*scripts: str, head: str | None = None) -> Agreement:
    workers = {f"w{number}": {"script": script} for number, script in enumerate(scripts)}
    return agreement(workers, {} if head is None else {"script": head})


@given(WORKERS, HEADS)
def test_every_worker_is_on_one_side_and_the_agreeing_hold_the_reference(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None]
) -> None:
    found = agreement(workers, head)
    assert sorted((*found.agreeing, *found.divergent)) == sorted(workers)
    assert found.ratio == len(found.agreeing) / len(workers)
    if found.reference is None:
        assert found.agreeing == ()
        return
    for name, held in workers.items():
        assert (held == found.reference) == (name in found.agreeing)
    assert {item: found.reference[item] for item in head} == head


@given(WORKERS)
def test_without_a_head_the_reference_is_what_most_hold_and_never_one_of_two_halves(
    workers: dict[str, dict[str, str | None]],
) -> None:
    found = agreement(workers, {})
    counts = Counter((held["script"], held["model"]) for held in workers.values()).most_common()
    if len(counts) > 1 and counts[0][1] == counts[1][1]:
        assert found.reference is None
    else:
        assert found.reference is not None
        assert tuple(found.reference[item] for item in ("script", "model")) == counts[0][0]
        assert len(found.agreeing) == counts[0][1]


@given(WORKERS, HEADS, st.floats(0.01, 1.0), st.booleans())
def test_more_than_half_divergent_always_blocks(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None], threshold: float, exclude: bool
) -> None:
    found = agreement(workers, head)
    decision = decide(found, threshold, exclude_divergent=exclude)
    if not found.divergent:
        assert decision is Decision.AGREE
    elif len(found.divergent) > len(workers) / 2 or found.reference is None:
        assert decision is Decision.BLOCK
    elif exclude:
        assert decision is Decision.EXCLUDE
    else:
        assert decision is (Decision.TOLERATE if found.ratio >= threshold else Decision.BLOCK)


@given(WORKERS, HEADS, st.randoms())
def test_the_order_of_the_workers_changes_nothing(
    workers: dict[str, dict[str, str | None]], head: dict[str, str | None], shuffled: object
) -> None:
    names = list(workers)
    shuffled.shuffle(names)  # type: ignore[attr-defined]
    one, other = agreement(workers, head), agreement({name: workers[name] for name in names}, head)
    assert (one.reference, set(one.agreeing)) == (other.reference, set(other.agreeing))


@pytest.mark.parametrize(
    ("workers", "decision"), [(20, Decision.TOLERATE), (19, Decision.BLOCK), (40, Decision.TOLERATE)]
)
def test_the_threshold_is_inclusive(workers: int, decision: Decision) -> None:
    found = of("b", *["a"] * (workers - 1), head="a")
    assert decide(found, 0.95, exclude_divergent=False) is decision


def test_the_head_is_right_also_against_the_majority() -> None:
    found = of("b", "b", "a", head="a")
    assert (found.source, found.agreeing) == ("head", ("w2",))
    assert decide(found, 0.3, exclude_divergent=True) is Decision.BLOCK


def test_of_two_workers_the_one_that_differs_from_the_head_may_be_left_out() -> None:
    assert decide(of("a", "b", head="a"), 0.95, exclude_divergent=True) is Decision.EXCLUDE
    assert decide(of("a", "b"), 0.95, exclude_divergent=True) is Decision.BLOCK


def test_no_workers_are_an_error() -> None:
    with pytest.raises(ValueError, match="no workers"):
        agreement({}, {"script": "a"})
