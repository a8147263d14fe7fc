"""The recorder of a run's state, and the order of its states."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.errors import StateError
from engine.models import ENDED, Reason, RunRecord, RunState
from engine.run.events import Figures, Note, StateChanged, Verdict
from engine.run.history import fold
from engine.run.journal import FOLLOWERS, RunRecorder, read_journal
from engine.run.run_plan import RunPlan
from tests.unit.run.run_maker import make_run_config

START = datetime(2026, 1, 2, tzinfo=UTC)
PLAN = RunPlan(config=make_run_config(), run_id="r", created_at=START)
COMPLETED = Verdict(RunState.SUCCEEDED, Reason.COMPLETED)


def run_to_success(recorder: RunRecorder) -> None:
    for state in (RunState.PREFLIGHT, RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHING):
        recorder.change(state)
    recorder.change(RunState.SUCCEEDED, COMPLETED, Figures(iteration=7))


def test_the_store_ends_with_what_the_journal_folds_to(tmp_path: Path) -> None:
    put: list[RunRecord] = []
    recorder = RunRecorder(tmp_path / "journal.jsonl", PLAN, put.append, lambda: START)
    run_to_success(recorder)
    recorder.close()
    assert put[-1] == recorder.history.record == fold(read_journal(tmp_path / "journal.jsonl")).record
    assert (put[-1].state, put[-1].iteration, put[-1].ended_at) == (RunState.SUCCEEDED, 7, START)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_successor_goes_on_from_the_same_record(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    first.change(RunState.PREFLIGHT)
    first.close()
    second = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    assert second.history == first.history
    second.close()


def test_a_change_that_cannot_be_is_refused_and_not_written(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    run_to_success(recorder)
    with pytest.raises(ValueError, match="succeeded does not become running"):
        recorder.change(RunState.RUNNING)
    recorder.close()
    last = read_journal(tmp_path / "journal.jsonl")[-1]
    assert isinstance(last, StateChanged) and last.state is RunState.SUCCEEDED


def test_a_store_that_refuses_is_noted(tmp_path: Path) -> None:
    def refuse(_: RunRecord) -> None:
        raise StateError("the state is of a newer release")

    recorder = RunRecorder(tmp_path / "journal.jsonl", PLAN, refuse, lambda: START)
    run_to_success(recorder)
    recorder.close()
    events = read_journal(tmp_path / "journal.jsonl")
    assert fold(events).record.state is RunState.SUCCEEDED
    assert any("newer release" in event.message for event in events if isinstance(event, Note))


def test_a_damaged_line_is_noted_by_the_next_supervisor(tmp_path: Path) -> None:
    first = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    run_to_success(first)
    first.close()
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write("\0\0\n")
    RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START).close()
    last = read_journal(tmp_path / "journal.jsonl")[-1]
    assert isinstance(last, Note) and last.message == "journal.jsonl: line 7 is damaged and was skipped"


def test_a_store_that_is_held_by_another_holds_up_nothing_but_the_end(tmp_path: Path) -> None:
    free = threading.Event()
    put: list[RunRecord] = []

    def wait(record: RunRecord) -> None:
        assert free.wait(20)
        put.append(record)

    recorder = RunRecorder(tmp_path / "journal.jsonl", PLAN, wait, lambda: START)
    run_to_success(recorder)
    assert put == []
    free.set()
    recorder.close()
    assert put[-1].state is RunState.SUCCEEDED
    assert len(put) < 6, "records that a newer one had overtaken were put all the same"


def test_every_state_has_its_followers() -> None:
    assert set(FOLLOWERS) == set(RunState)


def test_a_whole_life() -> None:
    life = [RunState.PLANNED, RunState.PREFLIGHT, RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHING]
    for state, following in zip(life, [*life[1:], RunState.SUCCEEDED], strict=True):
        assert following in FOLLOWERS[state]


@pytest.mark.parametrize("end", sorted(ENDED))
def test_an_end_is_final(end: RunState) -> None:
    assert FOLLOWERS[end] == frozenset()


def test_success_is_decided_after_the_ranks_are_gone() -> None:
    assert [state for state in RunState if RunState.SUCCEEDED in FOLLOWERS[state]] == [RunState.FINISHING]


def test_every_state_leads_to_an_end() -> None:
    for state in RunState:
        reached = {state}
        while more := {follower for each in reached for follower in FOLLOWERS[each]} - reached:
            reached |= more
        assert reached & ENDED
