"""What a check says of a node's memory is what it judges."""

from __future__ import annotations

from engine.planning.document import RankMemory
from engine.preflight.need import need_of

GB = 10**9


def test_the_reserve_is_part_of_what_is_told_and_of_what_is_judged() -> None:
    rank = RankMemory(
        node="a",
        peak_bytes=89 * GB,
        reserve_bytes=2 * GB,
        needed_bytes=91 * GB,
        source="estimate",
        limit_bytes=100 * GB,
        limit_from="Metal",
        fits=True,
    )
    found = need_of(rank)
    assert found.share == 0.91
    assert found.told() == "needs 91.0 of 100.0 GB (by estimate, 2.0 GB of it in reserve, limit by Metal)"


def test_what_is_not_known_is_not_compared() -> None:
    assert need_of(RankMemory(node="a", limit_bytes=GB)).told() == "memory not compared: what it needs is not known"
    assert "not compared" in need_of(RankMemory(node="a", needed_bytes=GB)).told()
