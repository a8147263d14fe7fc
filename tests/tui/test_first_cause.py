"""A failure's cause and its fix in the run pane: whole, at every size, and the fix is what `y` copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.failures.explanation import explain
from engine.failures.signatures import BY_ID
from tests.tui import fake_engine
from tests.tui.conftest import SIZE, opened
from tests.tui.fake_engine import FakeEngine
from tui.widgets.run_pane import RunPane

RUN = "20260314-134500-demo-b71c"
LONGEST = max(BY_ID.values(), key=lambda signature: len(signature.cause) + len(signature.fix)).id


@pytest.mark.parametrize("size", SIZE, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("known", [LONGEST, "ring.connect", "jaccl.pd", "launch.python_missing", "import.mlx"])
async def test_the_cause_and_the_fix_are_there_whole_and_the_fix_is_copied(
    fake: FakeEngine, known: str, size: tuple[int, int]
) -> None:
    found = explain([BY_ID[known].example])
    bad = fake_engine.failed()
    assert found is not None and found.fix is not None and bad.diagnosis is not None
    fake.add(replace(bad, diagnosis=replace(bad.diagnosis, cause=found.cause, fix=found.fix, signature=known)))
    async with opened(fake, follow=RUN, size=size) as console:
        await console.shows("first cause")
        await console.press("4")
        pane = console.app.screen.query_one(RunPane).region
        lines = [
            line[pane.x + 2 : pane.right - 2] for line in console.screen.splitlines()[pane.y + 1 : pane.bottom - 1]
        ]
        output = " ".join(" ".join(lines).split())
        assert f"first cause {found.cause} fix {found.fix} " in output
        assert "enter the line that proves it" in console.screen
        await console.press("y")
        assert console.app.clipboard == found.fix
