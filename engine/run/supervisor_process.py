"""Starts a run's supervisor as a process of its own session: for a launch, for a run that is resumed, and for one
whose supervisor is gone; and places requests for it, one JSON file each, which it takes once.

One supervisor per run: it holds a lock on a file in the run's directory for life, which the kernel drops with the
process. A run that has ended counts as orphaned, too, while there are nodes on which its end is not proved, or that
have the rest of its logs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from engine.errors import InputError, LaunchError, StateError
from engine.models import ENDED, RunState
from engine.node.processes import start_session
from engine.protocol.attempt import read_regular, write_atomic
from engine.run.events import RequestReceived
from engine.run.journal import read_history
from engine.run.run_plan import copy_of
from engine.run.watch import newest_supervisor, supervisor_alive
from engine.security.paths import check_private
from engine.security.sanitise import last_line
from engine.store.layout import RunDir, run_names
from engine.store.storage import try_lock
from engine.store.store import Store


def take_lock(run_dir: RunDir) -> int | None:
    """The lock of a run, as `try_lock`; None when another supervisor lives."""
    return try_lock(run_dir.lock)


_START_LIMIT_S = 30.0
_LOCK_LIMIT_S = 2.0
_POLL_S = 0.01


def start_supervisor(run_dir: RunDir, *options: str) -> int:
    """Start the supervisor of `run_dir` and return its pid once it is in charge (supervisor.json is its own).

    `options` are engine.run.supervisor's. Raises LaunchError, with the supervisor's own last line, or when another
    supervisor of this run lives; StateError where another user could have written the run's plan."""
    check_private(run_dir.path)
    held = _acquire_lock(run_dir)
    if held is None:
        raise LaunchError("this run already has a supervisor", where=run_dir.id)
    try:
        process = _spawn(run_dir, held, options)
    finally:
        # The lock belongs to the open file, which the child shares: it stays taken.
        os.close(held)
    _await(run_dir, process)
    return process.pid


def _acquire_lock(run_dir: RunDir) -> int | None:
    """The run's lock. A supervisor that has just been killed may hold it for some milliseconds more, until the last of
    its threads has ended."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while (held := take_lock(run_dir)) is None:
        if supervisor_alive(run_dir) or time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)
    return held


def _spawn(run_dir: RunDir, held: int, options: Sequence[str]) -> subprocess.Popen[bytes]:
    # -P keeps the run's directory, the working directory, off the module path.
    argv = [sys.executable, "-P", "-m", "engine.run.supervisor", str(run_dir.path), "--lock", str(held), *options]
    try:
        with run_dir.supervisor_log.open("ab") as log:
            process = start_session(argv, run_dir.path, log, stdin=subprocess.DEVNULL, pass_fds=(held,))
    except OSError as error:
        raise LaunchError("the supervisor could not be started", where=run_dir.id, why=str(error)) from error
    # Reaps it, should it end before the process that started it.
    threading.Thread(target=process.wait, name="reap supervisor", daemon=True).start()
    return process


def _await(run_dir: RunDir, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not _is_its_own(run_dir, process.pid):
        if process.returncode is not None and not _is_its_own(run_dir, process.pid):
            why = last_line(run_dir.supervisor_log.read_text(errors="replace")) or "it printed nothing"
            raise LaunchError("the supervisor ended at once", where=run_dir.id, why=why)
        if time.monotonic() > deadline:
            process.kill()
            raise LaunchError(
                "the supervisor did not start", where=run_dir.id, why=f"nothing in {_START_LIMIT_S:.0f} s"
            )
        time.sleep(_POLL_S)


def _is_its_own(run_dir: RunDir, pid: int) -> bool:
    who = newest_supervisor(run_dir)
    return who is not None and who.pid == pid


def resume_run(run_dir: RunDir, **wishes: bool) -> None:
    """Start a supervisor that takes the run up again: preflight first, then the next attempt, with the `wishes` that
    RunReopened has. Returns when it is in charge. Raises InputError for a run that has not ended, has completed or has
    succeeded, LaunchError, StateError."""
    record = read_history(run_dir).record
    if not record.state.ended:
        raise InputError(f"{record.id} has not ended", why=f"it is {record.state}", todo="nothing: it goes on")
    if record.state is RunState.COMPLETED:
        raise InputError(f"{record.id} has completed", why=record.cause or "", todo=record.fix or "")
    if record.state is RunState.SUCCEEDED:
        raise InputError(f"{record.id} has succeeded", why="there is nothing left to train", todo="launch a new run")
    if supervisor_alive(run_dir):
        nodes = ", ".join(record.unconfirmed)
        why = f"the stop is not proved yet on {nodes}" if nodes else "it is about to leave"
        raise LaunchError(
            "its supervisor is still running", where=record.id, why=why, todo="try again when it has left"
        )
    start_supervisor(run_dir, "--resume", *(name for name, wished in wishes.items() if wished))


_DONE = ENDED - {RunState.COMPLETED}
"""A completed run may still be waited for."""
_BEING_LAUNCHED_S = 20.0
"""The launch of a younger plan may be under way."""
AFTERMATH_S = 3600.0
"""How long after the run's end a node on which the stop could not be proved, or with the rest of a log, is waited
for."""
_AWAITED_S = 30 * 86_400.0
"""The same for the exit records of a run that has completed, which each command looks for again."""
_SAME_MOMENT_S = 2.0
"""Between the time of a run's end and that of the write of its journal."""


def orphans(home: Path) -> list[RunDir]:
    """The runs below `home` that are not ended and have no supervisor. Of those whose end the store knows, only the
    time of the journal's last write is read."""
    ended_at, runs = _ended(home), home / "runs"
    names = (name for name in run_names(home) if not _unchanged(f"{runs}/{name}/journal.jsonl", ended_at.get(name)))
    with contextlib.suppress(FileNotFoundError):
        return [run_dir for name in names if _is_orphan(run_dir := RunDir(runs / name))]
    return []


def _ended(home: Path) -> dict[str, float]:
    """When the runs have ended after which nothing is left to do, by the store: seconds since the epoch by id."""
    ended = {}
    with contextlib.suppress(StateError):
        for run, fields in Store(home).run_fields().items():
            if fields.get("state") in _DONE and not (fields.get("unconfirmed") or fields.get("logs_missing")):
                with contextlib.suppress(TypeError, ValueError):
                    ended[run] = datetime.fromisoformat(fields["ended_at"]).timestamp()
    return ended


def _unchanged(journal: str, ended_at: float | None) -> bool:
    """Nothing has been written since, as it is when a run is taken up again."""
    with contextlib.suppress(OSError):
        return ended_at is not None and os.stat(journal).st_mtime < ended_at + _SAME_MOMENT_S
    return False


def adopt_orphans(home: Path, notify: Callable[[str], object] = lambda _: None) -> list[str]:
    """Start a supervisor for every orphan; the ids of the runs that got one. A run that cannot be adopted does not
    hold up the others; the next console or command tries again, and `notify` gets why where its files are at fault.
    Secrets that a supervisor could not remove after its run's end are removed, once that end was told."""
    untold = list[RunDir]()
    for secrets in filter(os.path.exists, (f"{home}/runs/{name}/secrets.json" for name in run_names(home))):
        run_dir = RunDir(Path(secrets).parent)
        with contextlib.suppress(OSError, StateError):
            # With the lock: a supervisor that takes the run up again may have written them just now.
            if (held := take_lock(run_dir)) is not None:
                with os.fdopen(held):
                    if run_dir.end_untold.exists():
                        untold += [run_dir] * read_history(run_dir).record.state.ended
                    elif _is_done(run_dir):
                        run_dir.secrets.unlink()
    adopted = []
    for run_dir in {run_dir.id: run_dir for run_dir in (*untold, *orphans(home))}.values():
        try:
            start_supervisor(run_dir, "--adopt")
        except LaunchError:
            # Another process was faster, or its supervisor.log has the reason.
            continue
        except StateError as error:
            notify(str(error))
        else:
            adopted.append(run_dir.id)
    return adopted


def _is_orphan(run_dir: RunDir) -> bool:
    written = [path.stat().st_mtime for path in (run_dir.plan, copy_of(run_dir.plan)) if path.exists()]
    nothing_yet = not run_dir.journal.exists() and run_dir.newest_attempt() == 0
    if not written or (nothing_yet and time.time() - max(written) < _BEING_LAUNCHED_S):
        return False
    with contextlib.suppress(OSError, StateError):
        return not supervisor_alive(run_dir) and not _is_done(run_dir)
    # That it cannot be read is said where the run is shown.
    return False


def _is_done(run_dir: RunDir) -> bool:
    """The run has ended, and nothing is left to do after that. Raises StateError when it cannot be read."""
    history = read_history(run_dir)
    record, age_s = history.record, (datetime.now(UTC) - history.state_since).total_seconds()
    completed = record.state is RunState.COMPLETED
    awaited = completed or record.unconfirmed or record.logs_missing
    return record.state.ended and not (awaited and age_s < (_AWAITED_S if completed else AFTERMATH_S))


def request_abort(run_dir: RunDir, *, now: bool = False, by: str = "") -> None:
    """Put the request where the supervisor finds it within a tenth of a second."""
    run_dir.requests.mkdir(mode=0o700, exist_ok=True)
    name = f"{datetime.now(UTC):%Y-%m-%dT%H%M%S.%f}-{uuid.uuid4().hex[:8]}.json"
    request = RequestReceived(request="abort", now=now, by=by)
    write_atomic(run_dir.requests / name, request.model_dump_json(exclude={"at"}))


def read_requests(run_dir: RunDir) -> Iterator[tuple[Path, RequestReceived]]:
    """All waiting requests, oldest first, each with its file, which goes when it is recorded. A file that is no request
    is dropped; one that cannot be read now is left."""
    for path in sorted(run_dir.requests.glob("[!.]*")):
        with contextlib.suppress(OSError):
            try:
                request = RequestReceived.model_validate_json(read_regular(path))
            except ValidationError:
                path.unlink(missing_ok=True)
                continue
            yield path, request
