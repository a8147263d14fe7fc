"""The journal: whole lines only, in order, over kills and full disks; and the record that it replays to."""

from __future__ import annotations

import errno
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StateError
from engine.models import Reason, RunRecord, RunState
from engine.runs.journal import Journal, read_journal, replay

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = RunRecord(id="r", name="demo", state=RunState.PLANNED, created_at=START, world_size=2, backend="ring")


def planned() -> dict[str, Any]:
    return {"at": START.isoformat(), "event": "planned", "run": RUN.model_dump(mode="json"), "nonce": "n"}


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat()


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: START)
    journal.append("note", message="zuerst · 1")
    journal.append("state", state="running")
    journal.close()
    assert read_journal(tmp_path / "journal.jsonl") == [
        {"at": START.isoformat(), "event": "note", "message": "zuerst · 1"},
        {"at": START.isoformat(), "event": "state", "state": "running"},
    ]


def test_no_journal_is_no_entries(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "journal.jsonl") == []


def test_it_is_the_owners_alone(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl").append("note", message="x")
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o777 == 0o600


@given(cut=st.integers(0, 400))
def test_a_line_torn_anywhere_costs_that_line_alone(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    journal = Journal(path)
    for number in range(5):
        journal.append("note", message=f"entry {number}")
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    kept = path.read_bytes().count(b"\n")
    assert len(read_journal(path)) == kept

    Journal(path).append("note", message="after")
    messages = [entry["message"] for entry in read_journal(path)]
    assert messages == [f"entry {number}" for number in range(kept)] + ["after"]


def test_a_long_torn_line_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append("note", message="first")
    with path.open("ab") as file:
        file.write(b'{"event": "' + b"x" * 20_000)
    Journal(path).append("note", message="second")
    assert [entry["message"] for entry in read_journal(path)] == ["first", "second"]


def test_an_unreadable_line_in_the_middle_does_not_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append("note", message="first")
    with path.open("ab") as file:
        file.write(b"\0" * 100 + b"\n[1]\n{}\n")
    Journal(path).append("note", message="second")
    assert [entry["message"] for entry in read_journal(path)] == ["first", "second"]


def test_a_full_disk_keeps_the_entry_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append("note", message="before")
    real_write = os.write

    def half_a_line_fits(descriptor: int, data: bytes) -> int:
        real_write(descriptor, bytes(data[:7]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half_a_line_fits)
        journal.append("state", state="running")
    assert [entry["event"] for entry in read_journal(path)] == ["note"]
    assert journal.flush()
    assert [entry["event"] for entry in read_journal(path)] == ["note", "state"]


def test_the_record_before_anything_happens_is_the_planned_one() -> None:
    assert replay([planned()]) == RUN


def test_a_journal_without_a_plan_is_refused() -> None:
    with pytest.raises(StateError):
        replay([{"at": at(0), "event": "state", "state": "running"}])


def test_a_whole_flight_replays_to_its_end() -> None:
    record = replay(
        [
            planned(),
            {"at": at(1), "event": "state", "state": "launching"},
            {"at": at(2), "event": "attempt", "attempt": 1},
            {"at": at(3), "event": "rank_started", "rank": 1, "started_at": START.timestamp() + 2.75},
            {"at": at(3), "event": "rank_started", "rank": 0, "started_at": START.timestamp() + 2.5},
            {"at": at(4), "event": "state", "state": "running"},
            {"at": at(5), "event": "something newer"},
            {
                "at": at(9),
                "event": "state",
                "state": "failed",
                "reason": "rank_failed",
                "rank": 1,
                "host": "right",
                "cause": "ValueError: no",
                "exit_code": 3,
                "iteration": 20,
                "train_loss": 1.5,
            },
        ]
    )
    assert record.state is RunState.FAILED and record.reason is Reason.RANK_FAILED
    assert (record.rank, record.host, record.cause, record.exit_code) == (1, "right", "ValueError: no", 3)
    assert (record.attempts, record.iteration, record.train_loss) == (1, 20, 1.5)
    assert record.started_at == START + timedelta(seconds=2.5)
    assert record.ended_at == START + timedelta(seconds=9)


def test_the_backend_that_was_chosen_is_the_records() -> None:
    asked = planned()
    asked["run"]["backend"] = "auto"
    attempt = {"at": at(1), "event": "attempt", "attempt": 1, "wiring": {"backend": "jaccl-ring", "hosts": []}}
    assert replay([asked]).backend == "auto"
    assert replay([asked, attempt]).backend == "jaccl-ring"
