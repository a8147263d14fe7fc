"""The runs of the state directory: what is asked of a few costs no more among thousands."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.api import Engine
from engine.errors import RunNotFound
from engine.models import RunRecord, RunState
from engine.run import supervisor_process
from engine.run.supervisor_process import orphans
from engine.store.store import Store
from tests.unit.run.run_maker import MadeRun
from tests.unit.store.records import record

MANY = 2000


@pytest.fixture
def many(home: Path) -> Path:
    """Thousands of runs that have ended, each with a folder."""
    ended = [record(number, ended_at=record(number + 1).created_at) for number in range(MANY)]
    Store(home).rebuild(ended)
    for run in ended:
        folder = home / "runs" / run.id
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (folder / "journal.jsonl").write_text("")
        assert run.ended_at is not None
        os.utime(folder / "journal.jsonl", (run.ended_at.timestamp(),) * 2)
    return home


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[object]:
    """One entry for each call of a function from now on."""
    calls: list[object] = []
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_of_thousands_of_runs_only_those_that_are_asked_for_are_checked(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Engine(home=many).runs
    checked = counted(monkeypatch, RunRecord, "model_validate")
    assert [run.id for run in runs.all(3)] == [f"run-{number:05d}" for number in range(MANY - 1, MANY - 4, -1)]
    assert runs.find("last").id == f"run-{MANY - 1:05d}"
    assert runs.find("run-00012").id == "run-00012"
    assert len(checked) == 3, "each once"
    with pytest.raises(RunNotFound, match="2000 ids begin with it"):
        runs.find("run-0")
    with pytest.raises(RunNotFound, match="no id, id prefix or name"):
        runs.find("else")


def test_a_run_is_found_by_its_name_and_by_the_beginning_of_its_id(home: Path) -> None:
    Store(home).rebuild([record(1, name="a"), record(2, name="b"), record(3, name="a")])
    runs = Engine(home=home).runs
    assert [runs.find(run).id for run in ("a", "b", "run-00001")] == ["run-00003", "run-00002", "run-00001"]
    Store(home).put_run(record(4, name="b"))
    assert runs.find("b").id == "run-00004", "the change is seen at once"


def test_a_run_without_a_record_is_found_by_its_folder(home: Path) -> None:
    run = MadeRun(home, name="lost").close()
    Store(home).rebuild([record(1, created_at=record(1).created_at - timedelta(days=900))])
    runs = Engine(home=home).runs
    assert runs.find("last").id == runs.find("lost").id == run.directory.id


def test_the_journal_of_an_ended_run_is_not_read_until_it_is_written_again(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = counted(monkeypatch, supervisor_process, "read_history")
    assert orphans(many) == []
    assert read == []
    plan = MadeRun(many, name="planned").directory.plan
    for number in (7, 9):
        shutil.copy(plan, many / "runs" / f"run-{number:05d}" / "plan.json")
    shutil.rmtree(plan.parent)
    # Taken up again by a supervisor that was killed before it could change the record.
    os.utime(many / "runs" / "run-00007" / "journal.jsonl")
    assert [run.id for run in orphans(many)] == ["run-00007"]
    Store(many).put_run(record(9, state=RunState.RUNNING))
    assert [run.id for run in orphans(many)] == ["run-00007", "run-00009"]
