"""The journal first, then the store; a store that refuses or hangs does not hold up the run."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.errors import StateError
from engine.models import Reason, RunRecord, RunState
from engine.runs.journal import read_journal, replay
from engine.supervision.logbook import Logbook

START = datetime(2026, 1, 2, tzinfo=UTC)
RUN = RunRecord(id="r", name="demo", state=RunState.PLANNED, created_at=START, world_size=2, backend="ring")


def fly(logbook: Logbook) -> None:
    logbook.plan(RUN, "nonce")
    for state in (RunState.PREFLIGHT, RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHING):
        logbook.change(state)
    logbook.change(RunState.SUCCEEDED, reason=Reason.COMPLETED.value, iteration=7)


def test_the_store_ends_with_what_the_journal_replays_to(tmp_path: Path) -> None:
    put: list[RunRecord] = []
    logbook = Logbook(tmp_path / "journal.jsonl", put.append, lambda: START)
    fly(logbook)
    logbook.close()
    assert put[-1] == logbook.record == replay(read_journal(tmp_path / "journal.jsonl"))
    assert (put[-1].state, put[-1].iteration, put[-1].ended_at) == (RunState.SUCCEEDED, 7, START)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]


def test_a_successor_goes_on_from_the_same_record(tmp_path: Path) -> None:
    first = Logbook(tmp_path / "journal.jsonl", lambda _: None, lambda: START)
    first.plan(RUN, "nonce")
    first.change(RunState.PREFLIGHT)
    first.close()
    second = Logbook(tmp_path / "journal.jsonl", lambda _: None, lambda: START)
    assert second.record == first.record
    assert [entry["event"] for entry in second.entries] == ["planned", "state"]
    second.close()


def test_a_change_that_cannot_be_is_refused_and_not_written(tmp_path: Path) -> None:
    logbook = Logbook(tmp_path / "journal.jsonl", lambda _: None, lambda: START)
    fly(logbook)
    with pytest.raises(ValueError, match="succeeded does not become running"):
        logbook.change(RunState.RUNNING)
    logbook.close()
    assert read_journal(tmp_path / "journal.jsonl")[-1]["state"] == "succeeded"


def test_a_store_that_refuses_is_noted(tmp_path: Path) -> None:
    def refuse(_: RunRecord) -> None:
        raise StateError("the state is of a newer release")

    logbook = Logbook(tmp_path / "journal.jsonl", refuse, lambda: START)
    fly(logbook)
    logbook.close()
    entries = read_journal(tmp_path / "journal.jsonl")
    assert replay(entries).state is RunState.SUCCEEDED
    assert any("newer release" in entry.get("message", "") for entry in entries if entry["event"] == "note")


def test_a_store_that_is_held_by_another_holds_up_nothing_but_the_end(tmp_path: Path) -> None:
    free = threading.Event()
    put: list[RunRecord] = []

    def wait(record: RunRecord) -> None:
        assert free.wait(20)
        put.append(record)

    logbook = Logbook(tmp_path / "journal.jsonl", wait, lambda: START)
    fly(logbook)
    assert put == []
    free.set()
    logbook.close()
    assert put[-1].state is RunState.SUCCEEDED
    assert len(put) < 6, "records that a newer one had overtaken were put all the same"
