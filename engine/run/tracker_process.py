"""Keeps the trackers of one run: a process each (engine.run.tracker), which no failure of theirs lets touch the run.

The supervisor never waits for a tracker while ranks train: a thread of its own starts each process, starts one that was
killed again, and reports once what cannot be mended. A process of an earlier supervisor, and what it has started, is
found by its environment and killed before another writes the same files."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from engine.config.models import JobConfig
from engine.node import processes
from engine.run.events import TrackerFailed
from engine.security.sanitise import last_line, plain
from engine.store.layout import RunDir

VARIABLE = "FLIGHTDECK_TRACKER"
"""In the environment of a tracker and all its children: `mark`."""
_STARTS = 4
_POLL_S = 0.2
_END_LIMIT_S = 60.0
"""For a tracker to send what is left when the run has ended."""
_KILL_LIMIT_S = 5.0


def mark(run_dir: RunDir, name: str) -> str:
    """Without a space, which would end it in macOS's `ps -E`. Runs of two homes may have the same id."""
    return f"{run_dir.id}.{name}.{zlib.crc32(bytes(run_dir.path)):08x}"


class TrackerThread(threading.Thread):
    """One tracker from the run's first metric on."""

    def __init__(self, run_dir: RunDir, name: str, job: JobConfig, faults: SimpleQueue[TrackerFailed]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self._run_dir, self._tracker, self._faults = run_dir, name, faults
        self.ending = threading.Event()
        """The run reports nothing more."""
        own = {variable: value for variable, value in job.env.items() if variable.startswith("WANDB_")}
        # Reports to W&B's own developers are for the user to turn on.
        quiet = {"WANDB_ERROR_REPORTING": "false"}
        self._mark = {VARIABLE: mark(run_dir, name)}
        self._environment = quiet | os.environ | own | self._mark
        self._redactor = job.redactor()

    def run(self) -> None:
        while not self._has_rows() and not self.ending.wait(_POLL_S):
            pass
        try:
            why = self._write() if self._has_rows() else None
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        if why is not None:
            self._faults.put(TrackerFailed(tracker=self._tracker, why=plain(self._redactor(why), 300)))

    def _has_rows(self) -> bool:
        with contextlib.suppress(OSError):
            return self._run_dir.metrics.stat().st_size > 0
        return False

    def _write(self) -> str | None:
        """Run the process to its end; why it was given up, if it was. Raises OSError."""
        code = 0
        for _ in range(_STARTS):
            self._kill_all()
            log = self._run_dir.tracker_log(self._tracker)
            with log.open("wb") as output:
                code = self._run_process(output.fileno())
            self._kill_all()
            if code >= 0:
                return (last_line(log.read_text(errors="replace")) or f"exit code {code}") if code else None
            if self.ending.is_set() and code == -signal.SIGTERM:
                return f"it did not send what was left within {_END_LIMIT_S:.0f} s of the run's end"
        return f"it was ended by {signal.Signals(-code).name} {_STARTS} times"

    def _run_process(self, output: int) -> int:
        # -P keeps the run's directory, which has a folder "wandb", off the module path.
        argv = [sys.executable, "-P", "-m", "engine.run.tracker", str(self._run_dir.path), self._tracker]
        folder, environment = self._run_dir.path, self._environment
        with processes.start_session(argv, folder, output, stdin=subprocess.PIPE, env=environment) as process:
            while process.poll() is None and not self.ending.wait(_POLL_S):
                pass
            assert process.stdin is not None
            process.stdin.close()
            for limit_s, end in ((_END_LIMIT_S, process.terminate), (_KILL_LIMIT_S, process.kill)):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(limit_s)
                end()
            process.wait()
            return -signal.SIGTERM

    def _kill_all(self) -> None:
        """KILL what is left of this tracker, W&B's own service too."""
        for process in processes.with_variables(self._mark):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


class RunTrackers:
    """All trackers of one run. Starting and ending them again does nothing."""

    def __init__(self, run_dir: RunDir, job: JobConfig) -> None:
        self._faults: SimpleQueue[TrackerFailed] = SimpleQueue()
        self._threads = [TrackerThread(run_dir, name, job, self._faults) for name in job.trackers]

    def start(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def end(self) -> None:
        """The run reports nothing more. Returns at once."""
        for thread in self._threads:
            thread.ending.set()

    def close(self) -> None:
        """Returns when all processes are gone, after about a minute at the latest. Blocking."""
        self.end()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def faults(self) -> Iterator[TrackerFailed]:
        """Those that came since the last call."""
        with contextlib.suppress(Empty):
            while True:
                yield self._faults.get_nowait()
