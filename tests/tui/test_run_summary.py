"""Alarms and verification lines, as the run pane and `flightdeck show` print them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.models import NodeTelemetry, RunState
from engine.run.verification import gpu_line
from engine.snapshots import Alarm, Quiet, ResultFile, RunResult, RunSnapshot, Verification
from tests.tui import fake_engine
from tests.tui.conftest import opened
from tests.tui.fake_engine import FakeEngine
from tui.formatting import resume_text
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.widgets.run_summary import SHOWN_ALARMS, alarms, left, outcome, rank_line, rank_table, verification

LINES = (
    Verification("backend", True, "ring, 2 ranks, on Device(gpu, 0)"),
    gpu_line({}),
    Verification("loss", False, "finite and not falling: 2.000 to 2.100"),
    Verification("replicas", False, "NOT equal at iteration 40"),
)
ALARM = Alarm("REPLICAS_DIFFER", "the parameters of rank 1 are corrupted", fake_engine.ago(12), 40, (1,))


def watched(*found: Alarm) -> RunSnapshot:
    return replace(fake_engine.running(), alarms=found or (ALARM,), verification=LINES)


def state(snapshot: RunSnapshot, **more: object) -> DeckState:
    return replace(DeckState(), snapshot=snapshot, now=fake_engine.NOW, **more)  # type: ignore[arg-type]


def text(lines: object) -> str:
    return "\n".join(line.plain for line in lines)  # type: ignore[attr-defined]


def test_every_line_has_its_mark_in_both_alphabets_and_what_is_grave_fails() -> None:
    snapshot = watched()
    shapes = [line.plain[0] for line in verification(state(snapshot), snapshot, 80, every=True)]
    assert shapes == ["✓", "?", "▲", "✗"]
    plain = state(snapshot, glyphs=Glyphs(ascii=True))
    assert [line.plain[0] for line in verification(plain, snapshot, 80, every=True)] == ["+", "?", "!", "x"]


def quiet(seconds: float, sign: str = "output", hang_s: float | None = 600.0, **ranks: Any) -> RunSnapshot:
    return replace(
        fake_engine.running(),
        ranks=fake_engine.ranks(**ranks),
        quiet=Quiet(sign, fake_engine.ago(seconds), hang_s),
        alarms=(),
    )


@pytest.mark.parametrize(
    ("snapshot", "says"),
    [
        (quiet(119), ""),
        (quiet(125), "no output from any rank for 2 min; it counts as a hang after 10 min at the earliest"),
        (quiet(29, "step", 60.0), ""),
        (quiet(31, "step", 60.0), "no step from any rank for 31 s; it counts as a hang after 1 min at the earliest"),
        (quiet(50, "step", 90.0), "no step from any rank for 50 s; it counts as a hang after 90 s at the earliest"),
        # Nobody judges whether it hangs.
        (quiet(119, "output", None), ""),
        (quiet(125, "output", None), "no output from any rank for 2 min"),
        # Long steps are no silence.
        (quiet(31, "step", 60.0, typical_s=11.0, exchange_s=1.0), ""),
    ],
    ids=range(8),
)
def test_that_no_rank_shows_a_sign_is_said_well_before_it_counts_as_a_hang(snapshot: RunSnapshot, says: str) -> None:
    lines = alarms(state(snapshot), snapshot, 120)
    assert text(lines).removeprefix("· quiet").strip() == says
    assert all("$warning" not in str(span.style) for line in lines for span in line.spans)


def test_a_ranks_last_output_or_step_is_shown_with_its_age() -> None:
    snapshot = quiet(0, stepped_at=fake_engine.ago(40))
    first, second = snapshot.ranks
    snapshot = replace(snapshot, ranks=(first, replace(second, printed_at=fake_engine.ago(12), step_s=None)))
    head, *rows = (line.plain for line in rank_table(state(snapshot), snapshot, 160, headed=True))
    assert "last" in head and "step 40 s" in rows[0] and "output 12 s" in rows[1]
    assert "output 12 s" in rank_line(state(snapshot), snapshot, 120).plain


def test_a_run_that_stopped_early_tells_how_far_it_came_and_why() -> None:
    ended = fake_engine.succeeded()
    assert text(outcome(state(ended), ended, 100)).splitlines()[0].endswith("60 iterations in 1:00")
    why = "stopped early at iteration 40: the validation loss has not improved for 3 validations"
    early = replace(ended, record=ended.record.model_copy(update={"iteration": 40, "cause": why}))
    first, second = text(outcome(state(early), early, 120)).splitlines()
    assert "40 of 60 iterations in" in first and why in second


def test_a_completed_run_tells_what_it_waits_for() -> None:
    ended = fake_engine.succeeded()
    how = {"state": RunState.COMPLETED, "cause": "not known yet is a record", "fix": "reach it", "unconfirmed": ["bea"]}
    waiting = replace(ended, record=ended.record.model_copy(update=how))
    first, *others = text(outcome(state(waiting), waiting, 120)).splitlines()
    assert first.split() == ["?", "completed"]
    assert [line.split()[0] for line in others] == ["cause", "fix", "unconfirmed"]


def test_where_there_is_little_room_only_what_is_wrong_is_told() -> None:
    snapshot = watched()
    shown = text(verification(state(snapshot), snapshot, 80, every=False))
    assert "NOT equal" in shown and "not falling" in shown and "ring, 2 ranks" not in shown


def test_gpu_use_comes_from_telemetry_while_somebody_looks() -> None:
    snapshot = watched()
    nodes = {rank.node for rank in snapshot.ranks}
    seen = {node: NodeTelemetry(node=node, at=fake_engine.NOW, gpu_use=0.93) for node in nodes}
    assert "93%" in text(verification(state(snapshot, telemetry=seen), snapshot, 80, every=True))
    assert "not measured" in text(verification(state(snapshot), snapshot, 80, every=True))
    loading = replace(snapshot, ranks=(snapshot.ranks[0], replace(snapshot.ranks[1], step_s=None)))
    idle = {node: each.model_copy(update={"gpu_use": 0.0}) for node, each in seen.items()}
    record = snapshot.record.model_copy(update={"state": RunState.RECOVERING})
    for waits in (loading, replace(snapshot, record=record)):
        assert "GPU" not in text(verification(state(waits, telemetry=idle), waits, 80, every=False))


def test_the_newest_alarms_are_shown_and_the_others_counted() -> None:
    many = tuple(replace(ALARM, iteration=at, message=f"the {at}th") for at in range(8))
    snapshot = watched(*many)
    shown = text(alarms(state(snapshot), snapshot, 80))
    assert "the 7th (iteration 7, 12 s)" in shown and "the 4th" not in shown
    assert f"and {8 - SHOWN_ALARMS} before" in shown


async def test_an_alarm_is_in_the_run_pane_and_the_lines_are_there_when_it_has_the_screen(fake: FakeEngine) -> None:
    snapshot = watched()
    fake.add(snapshot)
    async with opened(fake, size=(120, 40), follow=snapshot.record.id) as console:
        await console.shows("▲ alarm")
        await console.shows("the parameters of rank 1 are corrupted")
        await console.shows("✗ replicas")
        await console.press("4", "z")
        await console.shows("✓ backend")
        await console.shows("? GPU use")


@pytest.mark.parametrize("iteration", [35, 41])
def test_what_is_kept_of_a_run_is_what_its_resumption_begins_from(iteration: int) -> None:
    """The last attempt may have begun before the newest mark, which is an earlier one's."""
    file = f"step-{iteration}/weights"
    emergency = ResultFile("checkpoint", False, iteration, "local-0", f"/c/{file}", file, 9, "0" * 64)
    snapshot = replace(fake_engine.aborted(), result=RunResult((emergency,)))
    assert max(mark.iteration for mark in snapshot.series.marks) == 40
    shown = text(left(state(snapshot), snapshot, 80, tall=False))
    assert f"the checkpoint of iteration {iteration}: R resumes from it" in shown
    assert resume_text(snapshot) == f"from iteration {iteration} (checkpoint on local-0)"
