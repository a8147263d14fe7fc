"""Starts the process that has a queue's items started: one per home, of a session of its own. It leaves when nothing
is left to start, and each command starts it again where there is."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from engine.errors import StateError
from engine.node.processes import alive, boot_id, known_start, same_boot, start_session
from engine.protocol.attempt import read_regular, write_atomic
from engine.queue.queue_files import QueueFiles
from engine.run.events import SupervisorStarted
from engine.security.paths import check_private

_START_LIMIT_S = 15.0


def take_charge(files: QueueFiles) -> None:
    pid = os.getpid()
    who = SupervisorStarted(pid=pid, start=known_start(pid), boot_id=boot_id())
    write_atomic(files.runner, who.model_dump_json(include={"pid", "start", "boot_id"}))


def runner_alive(home: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        who = SupervisorStarted.model_validate_json(read_regular(QueueFiles(home).runner))
        return same_boot(who.boot_id, boot_id()) and alive(who.pid, who.start)
    return False


def start_runner(home: Path, *, wait: bool = True) -> bool:
    """Start it where items are left to start and none lives; whether one was started. Returns when it is in charge,
    unless it is not waited for. Raises StateError."""
    files = QueueFiles(home)
    if not any(item.open for item in files.read().items) or runner_alive(home):
        return False
    check_private(files.folder)
    argv = [sys.executable, "-P", "-m", "engine.api.queue_runner", str(home)]
    try:
        with files.runner_log.open("ab") as log:
            process = start_session(argv, files.folder, log, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise StateError("the queue is not started", where=str(files.folder), why=error) from error
    # Reaps it, should it end before the process that started it.
    threading.Thread(target=process.wait, name="reap queue", daemon=True).start()
    until = time.monotonic() + _START_LIMIT_S
    while wait and not runner_alive(home) and process.returncode is None and time.monotonic() < until:
        time.sleep(0.02)
    return True
