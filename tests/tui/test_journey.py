"""A person's way by keyboard alone: the demo, another learning rate, the comparison, and the first run resumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from engine.models import RunRecord
from engine.snapshots import RunSnapshot
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, opened
from tests.tui.fake_engine import FakeEngine
from tui.screens.dialog import Welcome

FIRST, SECOND = fake_engine.running().record.id, "demo-0314-150000"
MOST_KEYS = 20


def named(snapshot: RunSnapshot, run: str, **changes: Any) -> RunSnapshot:
    return replace(snapshot, record=snapshot.record.model_copy(update={"id": run, **changes}))


class TwoRuns(FakeEngine):
    """Its repeated run is another one."""

    async def repeat(self, run: str, settings: Mapping[str, Any], *, accept_changed: bool = False) -> RunRecord:
        await super().repeat(run, settings)
        new = FakeEngine(self.home).add(named(fake_engine.running(), SECOND)).snapshots
        self.snapshots = {**new, **self.snapshots}
        return new[SECOND].record


@pytest.mark.parametrize("size", SIZE, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_person_tries_another_learning_rate_compares_and_resumes_in_twenty_keys(
    fake: FakeEngine, size: tuple[int, int]
) -> None:
    engine, keys = TwoRuns(fake.home), list[str]()
    async with opened(engine, config=None, size=size) as console:

        async def press(*pressed: str) -> None:
            keys.extend(pressed)
            await console.press(*pressed)

        def shows(run: str, state: str) -> bool:
            snapshot = console.app.state.snapshot
            return snapshot is not None and (snapshot.record.id, snapshot.record.state) == (run, state)

        await console.until(lambda: isinstance(console.app.screen, Welcome))
        await press("d")
        await console.until(lambda: shows(FIRST, "running"), "the demo")
        await press("ctrl+x", "right", "enter")
        await console.until(lambda: engine.aborted == [(FIRST, False)], "the abort")
        engine.put(named(fake_engine.aborted(), FIRST))
        await console.shows("no process of the run is left")
        await press("escape", "R", "c")
        await console.shows("learning_rate")
        await press(*"0.1", "enter", "enter")
        await console.until(lambda: shows(SECOND, "running"), "the second run")
        assert engine.repeated == [(FIRST, {"learning_rate": 0.1})]
        engine.put(named(fake_engine.succeeded(), SECOND))
        await console.until(lambda: shows(SECOND, "succeeded"), "its end")
        await console.until(lambda: len(console.app.state.runs or ()) == 2, "the list")
        await press("5", "g", "space", "space", "enter")
        await console.shows("compare · 2 runs")
        await press("escape", "R", "r")
        await console.until(lambda: engine.resumed == [FIRST], "the resumption")
    assert len(keys) <= MOST_KEYS, keys
