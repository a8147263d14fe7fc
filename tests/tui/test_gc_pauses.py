"""Full garbage collections take a small share of the time."""

from __future__ import annotations

import gc

import pytest

from tui import gc_pauses


def test_the_longer_a_full_collection_takes_the_rarer_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, full, cost_s = [0.0], list[float](), 0.005

    def collect() -> None:
        full.append(now[0])
        now[0] += cost_s

    monkeypatch.setattr(gc_pauses, "monotonic", lambda: now[0])
    monkeypatch.setattr(gc, "collect", collect)
    before = gc.get_threshold()
    scheduler = gc_pauses.GcScheduler()
    scheduler.tick()
    assert full == [], "the interpreter's own, before it starts"
    scheduler.start()
    try:
        for second in range(1, 13):
            now[0] = float(second)
            scheduler.tick()
        cost_s = 0.05
        for second in range(13, 50):
            now[0] = float(second)
            scheduler.tick()
    finally:
        scheduler.stop()
    assert full == [0.0, 6.0, 12.0, 18.0, 44.0], "every 5 s while it is cheap, 25 s after one that took 50 ms"
    assert gc.get_threshold() == before
