"""The journal of a run, whatever a kill or a full disk did to it; its recorder, and the order of a run's states."""

from __future__ import annotations

import errno
import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StateError
from engine.models import ENDED, Reason, RunRecord, RunState
from engine.run.events import (
    JOURNAL_VERSION,
    Figures,
    Note,
    RankExited,
    StateChanged,
    StopStage,
    StopStageReached,
    Verdict,
)
from engine.run.history import fold
from engine.run.journal import FOLLOWERS, Journal, JournalTail, RunRecorder, describe_damage, read_journal
from engine.run.run_plan import RunPlan
from engine.security.redact import Redactor
from tests.unit.run.run_maker import make_run_config

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def messages(path: Path) -> list[str]:
    return [event.message for event in read_journal(path) if isinstance(event, Note)]


def damaged(path: Path) -> list[int]:
    """The numbers of the lines that are no event."""
    tail = JournalTail(path)
    list(tail.events())
    return tail.damaged


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: START)
    journal.append(Note(message="zuerst · 1"))
    journal.append(StateChanged(state=RunState.RUNNING))
    journal.close()
    assert read_journal(tmp_path / "journal.jsonl") == (
        Note(at=START, message="zuerst · 1"),
        StateChanged(at=START, state=RunState.RUNNING),
    )


def test_no_journal_is_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "journal.jsonl") == ()


def test_it_is_the_owners_alone(tmp_path: Path) -> None:
    Journal(tmp_path / "journal.jsonl").append(Note(message="x"))
    assert (tmp_path / "journal.jsonl").stat().st_mode & 0o777 == 0o600


@given(cut=st.integers(0, 400))
def test_a_line_torn_anywhere_costs_that_line_alone(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    journal = Journal(path)
    for number in range(5):
        journal.append(Note(message=f"event {number}"))
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    kept = path.read_bytes().count(b"\n")
    assert len(read_journal(path)) == kept

    Journal(path).append(Note(message="after"))
    assert messages(path) == [f"event {number}" for number in range(kept)] + ["after"]


def test_a_long_torn_line_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(Note(message="first"))
    with path.open("ab") as file:
        file.write(b'{"event": "' + b"x" * 20_000)
    Journal(path).append(Note(message="second"))
    assert messages(path) == ["first", "second"]


def test_a_damaged_line_in_the_middle_is_reported_and_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(Note(message="first"))
    with path.open("ab") as file:
        file.write(b"\0" * 100 + b"\n[1]\n{}\n")
    Journal(path).append(Note(message="second"))
    assert messages(path) == ["first", "second"]
    assert damaged(path) == [2, 3, 4]
    assert describe_damage((2, 3, 4)) == "journal.jsonl: lines 2, 3, 4 are damaged and were skipped"
    assert describe_damage([7]) == "journal.jsonl: line 7 is damaged and was skipped"
    assert describe_damage(()) is None


@pytest.mark.parametrize("fields", [{}, {"event": "tomorrow"}, {"event": "state"}, {"event": "state", "state": "?"}])
def test_a_line_that_is_no_event_of_this_version_is_damaged(tmp_path: Path, fields: dict[str, str]) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(json.dumps(fields) + "\n")
    assert (read_journal(path), damaged(path)) == ((), [1])


def test_a_journal_of_a_newer_release_is_refused_as_often_as_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = {"event": "planned", "version": JOURNAL_VERSION + 1, "what": "nobody knows"}
    path.write_text(json.dumps(first) + "\n" + '{"event": "note", "message": "x"}\n')
    tail = JournalTail(path)
    for _ in range(2):
        with pytest.raises(StateError, match=r"newer release.*version 2.*reads up to version 1.*upgrade"):
            list(tail.events())


def test_a_text_that_is_no_unicode_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).append(Note(message="no such file: \udcff"))
    assert messages(path) == ["no such file: \udcff"]


def test_figures_of_nodes_that_are_named_as_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    fields = {"message": "x", "shares": {"left": 0.5, "cause": 1}, "error": [None, "y"]}
    assert Journal(tmp_path / "journal.jsonl")._shown(fields) == fields


def test_a_tail_reads_each_event_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert list(tail.events()) == []
    journal = Journal(path, clock=lambda: START)
    journal.append(Note(message="first"))
    with path.open("ab") as file:
        file.write(b'{"event": "note", "mess')
    assert list(tail.events()) == [Note(at=START, message="first")]
    with path.open("ab") as file:
        file.write(b'age": "second"}\n')
    (second,) = tail.events()
    assert isinstance(second, Note) and second.message == "second"
    assert tail.damaged == []


def test_a_full_disk_keeps_the_event_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(Note(message="before"))
    real_write = os.write

    def half_a_line_fits(descriptor: int, data: bytes) -> int:
        real_write(descriptor, bytes(data[:7]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", half_a_line_fits)
        journal.append(StateChanged(state=RunState.RUNNING))
    assert [type(event) for event in read_journal(path)] == [Note]
    assert journal.flush()
    assert [type(event) for event in read_journal(path)] == [Note, StateChanged]


PLAN = RunPlan(nonce="n", config=make_run_config(), run_id="r", created_at=START)
COMPLETED = Verdict(RunState.SUCCEEDED, Reason.COMPLETED)


def run_to_success(recorder: RunRecorder) -> None:
    for state in (RunState.PREFLIGHT, RunState.LAUNCHING, RunState.RUNNING, RunState.FINISHING):
        recorder.append(StateChanged(state=state))
    recorder.append(StateChanged(state=RunState.SUCCEEDED, verdict=COMPLETED, figures=Figures(iteration=7)))


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
    first.append(StateChanged(state=RunState.PREFLIGHT))
    first.close()
    second = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    assert second.history == first.history
    second.close()


def test_a_change_that_cannot_be_is_refused_and_not_written(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path / "journal.jsonl", PLAN, lambda _: None, lambda: START)
    run_to_success(recorder)
    with pytest.raises(ValueError, match="succeeded does not become running"):
        recorder.append(StateChanged(state=RunState.RUNNING))
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


@pytest.mark.parametrize("end", [RunState.SUCCEEDED, RunState.ABORTED])
def test_an_end_that_is_known_is_final(end: RunState) -> None:
    assert FOLLOWERS[end] == frozenset()


def test_an_end_that_was_not_known_of_every_rank_may_turn_out_to_be_another_but_the_run_does_not_go_on() -> None:
    for end in ENDED:
        assert FOLLOWERS[end] < ENDED
    assert FOLLOWERS[RunState.COMPLETED] == {RunState.SUCCEEDED, RunState.FAILED, RunState.LOST}


def test_success_is_decided_after_the_ranks_are_gone() -> None:
    before = {state for state in RunState if RunState.SUCCEEDED in FOLLOWERS[state]}
    assert before - ENDED == {RunState.FINISHING}


def test_every_state_leads_to_an_end() -> None:
    for state in RunState:
        reached = {state}
        while more := {follower for each in reached for follower in FOLLOWERS[each]} - reached:
            reached |= more
        assert reached & ENDED


def test_a_journal_without_its_first_line_is_that_of_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    recorder = RunRecorder(path, PLAN, lambda _record: None)
    recorder.append(StateChanged(state=RunState.PREFLIGHT))
    recorder.close()
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"x" * (len(first) - 1) + b"\n" + b"".join(rest))
    recorder = RunRecorder(path, PLAN, lambda _record: None)
    recorder.close()
    assert (recorder.history.record.state, recorder.history.nonce) == (RunState.PREFLIGHT, PLAN.nonce)
    assert messages(path) == ["journal.jsonl: line 1 is damaged and was skipped"]


def test_a_journal_that_is_gone_begins_anew_with_the_nonce_of_its_plan(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for _ in range(2):
        RunRecorder(path, PLAN, lambda _record: None).close()
        assert fold(read_journal(path)).nonce == PLAN.nonce
        path.unlink()


def test_words_have_no_secrets_and_an_end_and_what_a_run_is_adopted_by_stays(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, redactor=Redactor({"SETTING": "node0 value"}, {}))
    token = "hf_" + "aB3" * 11
    verdict = Verdict(RunState.FAILED, Reason.RANK_FAILED, cause=f"401 for {token}", fix="x" * 3_000_000)
    kept = journal.append(StateChanged(state=RunState.FAILED, verdict=verdict))
    journal.append(RankExited(rank=0, node="node0 value", error=f"no {token}" * 100_000))
    journal.append(StopStageReached(stage=StopStage.KILL, left=("node0 7 python --token abc", "node1 8 sleep")))
    journal.append(Note(message="it was node0 value"))
    journal.close()
    assert (token in path.read_text(), path.stat().st_size < 20_000) == (False, True)
    changed, ended, stopped, note = read_journal(path)
    assert isinstance(changed, StateChanged) and isinstance(ended, RankExited) and isinstance(note, Note)
    assert changed == kept and changed.verdict is not None and changed.verdict.cause == "401 for [redacted]"
    assert ended.node == "node0 value", "by that the run is adopted"
    assert isinstance(stopped, StopStageReached)
    assert stopped.left == ("node0 7 python --token [redacted]", "node1 8 sleep")
    assert note.message == "it was [redacted]"
