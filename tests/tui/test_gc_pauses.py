"""Full garbage collections run while nobody types."""

from __future__ import annotations

import gc

import pytest

from tui import gc_pauses


def test_full_collections_wait_until_nobody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    now, full = [0.0], list[float]()
    monkeypatch.setattr(gc_pauses, "monotonic", lambda: now[0])
    monkeypatch.setattr(gc, "collect", lambda: full.append(now[0]))
    before = gc.get_threshold()
    scheduler = gc_pauses.GcScheduler()
    scheduler.start()
    try:
        for second in range(1, 400):
            now[0] = float(second)
            if second < 350:
                scheduler.key_pressed()
            scheduler.tick()
    finally:
        scheduler.stop()
    assert full == [0.0, 301.0, 352.0, 383.0], "at the beginning, at the latest, and then in quiet moments"
    assert gc.get_threshold() == before
