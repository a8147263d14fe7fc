"""Starts a run's supervisor: a process of its own session that nothing of ours outlives or takes down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from engine.errors import LaunchError
from engine.runs.layout import RunDir
from engine.runs.watch import supervisor_alive
from engine.supervision import lock

_START_LIMIT_S = 30.0
_LOCK_LIMIT_S = 2.0
_LOOK_EVERY_S = 0.01


def start(run_dir: RunDir, *, adopt: bool = False, resume: bool = False) -> int:
    """Start the supervisor of `run_dir` and return its pid once it has taken over (supervisor.json is its own).

    `adopt`: go on with what an earlier supervisor has left; `resume`: take up a run that has ended. Raises
    LaunchError, with the supervisor's own last line, or when another supervisor of this run lives.
    """
    held = _lock(run_dir)
    if held is None:
        raise LaunchError("a supervisor of this run is already there", where=run_dir.id)
    try:
        words = [*(["--adopt"] if adopt else []), *(["--resume"] if resume else [])]
        process = _spawn(run_dir, held, words)
    finally:
        # The lock belongs to the open file, which the child shares: it stays taken.
        os.close(held)
    _await(run_dir, process)
    return process.pid


def _lock(run_dir: RunDir) -> int | None:
    """The run's lock. A supervisor that has just been killed may hold it for some milliseconds yet: its main thread is
    dead when the others are still on their way."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while (held := lock.take(run_dir)) is None:
        if supervisor_alive(run_dir) or time.monotonic() > deadline:
            return None
        time.sleep(_LOOK_EVERY_S)
    return held


def _spawn(run_dir: RunDir, held: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    # -P keeps the run's directory, the working directory, off the module path.
    argv = [sys.executable, "-P", "-m", "engine.supervision.supervisor", str(run_dir.path), "--lock", str(held)]
    try:
        with run_dir.supervisor_log.open("ab") as log:
            process = subprocess.Popen(
                [*argv, *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=run_dir.path,
                pass_fds=(held,),
                start_new_session=True,
            )
    except OSError as error:
        raise LaunchError("the supervisor could not be started", where=run_dir.id, why=str(error)) from error
    # Reaps it, should it end before the process that started it.
    threading.Thread(target=process.wait, name="reap supervisor", daemon=True).start()
    return process


def _await(run_dir: RunDir, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while not _is_its_own(run_dir, process.pid):
        if process.returncode is not None and not _is_its_own(run_dir, process.pid):
            raise LaunchError("the supervisor ended at once", where=run_dir.id, why=_last_line(run_dir))
        if time.monotonic() > deadline:
            process.kill()
            raise LaunchError(
                "the supervisor did not take over", where=run_dir.id, why=f"nothing after {_START_LIMIT_S:.0f} s"
            )
        time.sleep(_LOOK_EVERY_S)


def _is_its_own(run_dir: RunDir, pid: int) -> bool:
    try:
        return bool(json.loads(run_dir.supervisor.read_bytes())["pid"] == pid)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _last_line(run_dir: RunDir) -> str:
    try:
        lines = run_dir.supervisor_log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else "it said nothing"
