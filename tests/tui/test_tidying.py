"""When the console's full garbage collections come."""

from __future__ import annotations

import gc

import pytest

from tui import tidying


def test_full_collections_wait_until_nobody_types(monkeypatch: pytest.MonkeyPatch) -> None:
    now, full = [0.0], list[float]()
    monkeypatch.setattr(tidying, "monotonic", lambda: now[0])
    monkeypatch.setattr(gc, "collect", lambda: full.append(now[0]))
    before = gc.get_threshold()
    tidy = tidying.Tidying()
    tidy.begin()
    try:
        for second in range(1, 400):
            now[0] = float(second)
            if second < 350:
                tidy.typed()
            tidy.tick()
    finally:
        tidy.end()
    assert full == [0.0, 301.0, 352.0, 383.0], "at the beginning, at the latest, and then in quiet moments"
    assert gc.get_threshold() == before
