"""One supervisor per run, by a lock; requests to it are placed whole, taken once and in order."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.errors import InputError, StateError
from engine.run import supervisor_process
from engine.run.events import CleanupConfirmed, LogsMissing
from engine.run.journal import read_history
from engine.run.supervisor_process import adopt_orphans, orphans, read_requests, request_abort, resume_run
from engine.run.watch import supervisor_alive
from engine.store.layout import RunDir
from engine.store.store import Store
from tests.unit.run.run_maker import MadeRun

HOLDER = """
import sys
from pathlib import Path
from engine.store.layout import RunDir
from engine.run.supervisor_process import take_lock
assert take_lock(RunDir(Path(sys.argv[1]))) is not None
print("held", flush=True)
sys.stdin.read()
"""


def test_it_is_taken_once(tmp_path: Path) -> None:
    held = supervisor_process.take_lock(RunDir(tmp_path))
    assert held is not None
    assert supervisor_process.take_lock(RunDir(tmp_path)) is None
    os.close(held)
    again = supervisor_process.take_lock(RunDir(tmp_path))
    assert again is not None
    os.close(again)


def test_a_killed_holder_leaves_it_free(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert supervisor_process.take_lock(RunDir(tmp_path)) is None
        holder.kill()
        holder.wait()
    taken = supervisor_process.take_lock(RunDir(tmp_path))
    assert taken is not None
    os.close(taken)


def test_a_run_that_others_can_write_is_neither_adopted_nor_resumed(tmp_path: Path) -> None:
    run, notices = MadeRun(tmp_path), list[str]()
    run.directory.path.chmod(0o777)
    assert adopt_orphans(tmp_path, notices.append) == []
    assert [f"other users can write there: chmod go-w {run.directory.path}" in text for text in notices] == [True]
    with pytest.raises(StateError, match="chmod go-w"):
        supervisor_process.start_supervisor(run.directory, "--resume")
    assert not run.directory.lock.exists()


def test_each_is_taken_once_and_in_order(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    request_abort(run_dir, by="cli")
    request_abort(run_dir, now=True, by="console")
    requests = [request for _, request in read_requests(run_dir)]
    assert [(request.now, request.by) for request in requests] == [(False, "cli"), (True, "console")]


def test_one_whose_taker_dies_before_it_is_recorded_is_there_for_the_next(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    request_abort(run_dir, by="cli")
    for _ in range(2):
        [(path, request)] = read_requests(run_dir)
        assert request.by == "cli"
    path.unlink()
    assert list(read_requests(run_dir)) == []


def test_without_requests_nothing_is_taken(tmp_path: Path) -> None:
    assert list(read_requests(RunDir(tmp_path))) == []


def test_what_is_no_request_is_dropped_and_does_not_come_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.requests.mkdir()
    for name, content in {
        "a.json": "{",
        "b.json": "[]",
        "c.json": '{"now": true}',
        "e.json": '{"request": "dance"}',
        "d.json": "\xff",
    }.items():
        (run_dir.requests / name).write_text(content, encoding="latin-1")
    assert list(read_requests(run_dir)) == []
    assert list(run_dir.requests.iterdir()) == []


def test_a_half_written_one_is_left_alone(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.requests.mkdir()
    (run_dir.requests / ".x.json.123").write_text("{")
    assert list(read_requests(run_dir)) == []
    assert len(list(run_dir.requests.iterdir())) == 1


@pytest.mark.parametrize(
    ("state", "reason", "hours", "waits"),
    [
        ("completed", "completed", 0, True),
        ("completed", "completed", 24, True),
        ("completed", "completed", 24 * 31, False),
        ("failed", "node_lost", 0, True),
        ("failed", "node_lost", 24, False),
    ],
)
def test_how_long_the_nodes_of_a_run_that_has_ended_are_looked_for(
    tmp_path: Path, state: str, reason: str, hours: int, waits: bool
) -> None:
    run = MadeRun(tmp_path, created=datetime.now(UTC) - timedelta(hours=hours))
    run.state("preflight", "launching", "running", "finishing", state, reason=reason, unconfirmed=("node1",)).close()
    assert bool(orphans(tmp_path)) is waits


@pytest.mark.parametrize(
    ("files", "hours", "waits"),
    [({"rank0.log": 812}, 0, True), ({"rank0.log": None}, 0, True), ({}, 0, False), ({"rank0.log": 812}, 24, False)],
)
@pytest.mark.parametrize("before_end", [True, False])
def test_a_run_that_has_ended_without_the_rest_of_its_logs_gets_another_supervisor(
    tmp_path: Path, files: dict[str, int | None], hours: int, waits: bool, before_end: bool
) -> None:
    """Its own was killed while the head's disk was full, say."""
    run = MadeRun(tmp_path, created=datetime.now(UTC) - timedelta(hours=hours)).attempt()
    states, missing = ("preflight", "launching", "running", "finishing"), LogsMissing(attempt=1, files=files)
    run.state(*states).append(LogsMissing(attempt=1, files={"rank0.log": 900}))
    run.append(missing).state("succeeded") if before_end else run.state("succeeded").append(missing)
    run.close()
    record = read_history(run.directory).record
    assert record.logs_missing == list(files)
    Store(tmp_path).put_run(record)
    assert record.ended_at is not None
    os.utime(run.directory.journal, (record.ended_at.timestamp(), record.ended_at.timestamp()))
    assert bool(orphans(tmp_path)) is waits


@pytest.mark.parametrize(("state", "stay"), [("failed", False), ("running", True), ("completed", True)])
def test_the_secrets_that_a_killed_supervisor_has_left_go_once_its_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, stay: bool
) -> None:
    run = MadeRun(tmp_path, created=datetime.now(UTC))
    run.state("preflight", "launching", "running", *([state] if state != "running" else [])).close()
    run.directory.secrets.write_text("{}")
    monkeypatch.setattr(supervisor_process, "start_supervisor", lambda *_: 1)
    held = supervisor_process.take_lock(run.directory)
    assert held is not None
    adopt_orphans(tmp_path)
    assert run.directory.secrets.exists(), "a supervisor takes it up again"
    os.close(held)
    adopt_orphans(tmp_path)
    assert run.directory.secrets.exists() is stay


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), StateError("it cannot be read")], ids=["read", "open"]
)
def test_a_run_whose_journal_cannot_be_read_keeps_its_secrets_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    run = MadeRun(tmp_path, created=datetime.now(UTC)).state("preflight", "failed").close()
    run.directory.secrets.write_text("{}")
    monkeypatch.setattr(supervisor_process, "read_history", Mock(side_effect=error))
    assert adopt_orphans(tmp_path) == []
    assert run.directory.secrets.exists()


@pytest.mark.parametrize("unknown", ["start", "boot_id"])
def test_a_supervisor_that_its_file_does_not_tell_from_another_process_lives_by_its_lock(
    tmp_path: Path, unknown: str
) -> None:
    """This very process has its pid by now."""
    run = MadeRun(tmp_path).state("running").supervised_by().close()
    who = json.loads(run.directory.supervisor.read_bytes())
    run.directory.supervisor.write_text(json.dumps({**who, unknown: ""}))
    held = supervisor_process.take_lock(run.directory)
    assert held is not None and supervisor_alive(run.directory)
    os.close(held)
    assert not supervisor_alive(run.directory)
    assert orphans(tmp_path)


def test_a_completed_run_is_looked_after_until_its_records_are_read(tmp_path: Path) -> None:
    run = MadeRun(tmp_path, created=datetime.now(UTC))
    run.state("finishing", "completed", reason="completed", unconfirmed=("node1",), cause="of rank 1", fix="reach it")
    run.append(CleanupConfirmed(node="node1"))
    assert orphans(tmp_path), "its supervisor died before it read them"
    with pytest.raises(InputError, match=r"has completed: of rank 1 \(reach it\)"):
        resume_run(run.directory)
    run.state("succeeded", reason="completed").close()
    assert not orphans(tmp_path)
