"""The trackers of a run, TensorBoard's event files or W&B, and its notifier: a process each, no failure of which
touches the run.

`python -m engine.run.tracker <run directory> tensorboard|wandb` follows metrics.jsonl from the first row on, so whoever
follows a process that was killed writes everything anew; its standard input is open for as long as the run may report
more. The supervisor never waits for it while ranks train: a thread of its own starts each process, starts one that was
killed again, and reports once what cannot be mended. A process of an earlier supervisor, and what it has started, is
found by its environment and killed before another writes the same files."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from engine.config.models import Config, JobConfig
from engine.launch.rank_environment import trainer_job
from engine.models import RunState
from engine.node import processes
from engine.protocol.attempt import write_atomic
from engine.run.events import TrackerFailed
from engine.run.journal import read_history
from engine.run.json_lines import LineTail, parse_json_line
from engine.run.metrics import figures
from engine.run.notifications import NOTIFIER
from engine.run.run_plan import read_plan
from engine.security.sanitise import finite_or_none, last_line, plain
from engine.store.layout import RunDir

_POLL_S = 0.5
END_LIMIT_S = 90
"""A process that its supervisor has left ends by itself, when the service takes nothing."""
_ENVELOPE = frozenset({"kind", "attempt", "at", "iteration"})
_FAILED = frozenset({RunState.FAILED, RunState.ABORTED, RunState.LOST})


class Tracker(Protocol):
    def add(self, number: int, row: Mapping[str, Any], iteration: int) -> None:
        """Row `number` of the run, from 0. `iteration` goes back where an attempt goes on from an earlier state."""

    def close(self) -> None: ...


class TensorBoardFile:
    """An event file: TFRecords (length, its CRC, data, its CRC) of Event protocol buffers, as tensorflow/core/util/
    event.proto has them. TensorBoard drops what it has read at or after the step of a start of a session."""

    def __init__(self, run_dir: RunDir, _config: Config | None = None, folder: Path | None = None) -> None:
        """`folder`: in place of the run's own."""
        folder = folder or run_dir.tracker("tensorboard")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._attempt: object = None
        self._validated: set[int] = set()
        self._event(time.time(), 0, _text(3, b"brain.Event:2"))

    def add(self, number: int, row: Mapping[str, Any], iteration: int) -> None:
        at, validation = _seconds(row), row.get("kind") == "val"
        if row.get("attempt") != self._attempt:
            self._attempt = row.get("attempt")
            # An attempt may begin with a validation of what the one before had trained.
            begin = iteration + validation if number else 0
            self._validated = {validated for validated in self._validated if validated < begin}
            self._event(at, begin, _text(7, b"\x08\x01"))  # SessionLog.START
        if validation and iteration in self._validated:
            return
        self._validated |= {iteration} if validation else set()
        numbers = {tag.encode(): struct.pack("<f", value) for tag, value in _numbers(row).items()}
        values = [_text(1, _text(1, tag) + b"\x15" + value) for tag, value in numbers.items()]
        self._event(at, iteration, _text(5, b"".join(values)))

    def close(self) -> None:
        self._file.close()

    def _event(self, at: float, step: int, what: bytes) -> None:
        data = b"\x09" + struct.pack("<d", at) + b"\x10" + _varint(step) + what
        length = struct.pack("<Q", len(data))
        self._file.write(length + _masked_crc(length) + data + _masked_crc(data))
        self._file.flush()


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _text(field: int, data: bytes) -> bytes:
    """A field of a protocol buffer that is a string, bytes or a message."""
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _crc_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC32C = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC32C[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class WandbRun:
    """A run of W&B with the id of ours. Its step is the number of the row, which never goes back; the x-axis of every
    curve is the iteration, which may."""

    def __init__(self, run_dir: RunDir, config: Config) -> None:
        import wandb

        self._run_dir = run_dir
        earlier = list(run_dir.tracker("wandb").glob(f"offline-run-*-{run_dir.id}"))
        quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True}
        # This machine's own load and packages say nothing about the ranks.
        unwanted = {"x_disable_stats": True, "x_save_requirements": False}
        self._run = wandb.init(
            project=config.job.mlx_lm.get("project_name"),
            id=run_dir.id,
            name=run_dir.id,
            dir=str(run_dir.path),
            resume="allow",
            config=config.job.redactor().document({**(trainer_job(config) or {}), "world_size": len(config.nodes)}),
            settings=wandb.Settings(**quiet, **unwanted),
        )
        self._first = 0 if self._run.offline else self._run.starting_step
        """The row from which on the service lacks them."""
        if self._run.offline:
            for folder in earlier:
                shutil.rmtree(folder, ignore_errors=True)
        elif self._run.url:
            write_atomic(run_dir.wandb_url, self._run.url)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def add(self, number: int, row: Mapping[str, Any], iteration: int) -> None:
        if number >= self._first:
            self._run.log({**_numbers(row), "iteration": iteration, "_timestamp": _seconds(row)}, step=number)

    def close(self) -> None:
        self._run.finish(exit_code=int(read_history(self._run_dir).record.state in _FAILED))


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Those of a row of metrics.jsonl, under mlx-lm's names."""
    return {name: value for name, value in figures(row, _ENVELOPE).items() if value is not None}


def _seconds(row: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(str(row.get("at"))).timestamp()
    except ValueError:
        return time.time()


TRACKERS: dict[str, Callable[[RunDir, Config], Tracker]] = {"tensorboard": TensorBoardFile, "wandb": WandbRun}


def follow(run_dir: RunDir, tracker: Tracker) -> None:
    """Write every row to `tracker`, until standard input has ended and no row is left."""
    tail, number, ended = LineTail(run_dir.metrics), 0, False
    while not ended:
        # Before reading: then nothing comes any more.
        ended = input_ended(_POLL_S)
        number = _add_rows(tail, tracker, number)
    signal.alarm(END_LIMIT_S)
    tracker.close()


def write_tensorboard(run_dir: RunDir, folder: Path) -> None:
    """The event file of what there is of a run by now. Raises OSError, StateError."""
    tracker = TensorBoardFile(run_dir, folder=folder)
    _add_rows(LineTail(run_dir.metrics), tracker, 0)
    tracker.close()


def _add_rows(tail: LineTail, tracker: Tracker, number: int) -> int:
    """Write the new rows, the first of which is `number`; that of the next one."""
    for line in tail.lines():
        row = parse_json_line(line)
        iteration = finite_or_none(row.get("iteration")) if row is not None else None
        if row is not None and iteration is not None and iteration >= 0:
            tracker.add(number, row, int(iteration))
        number += bool(line.strip())
    return number


def input_ended(wait_s: float) -> bool:
    readable, _, _ = select.select([0], [], [], wait_s)
    return bool(readable) and not os.read(0, 4096)


def main(arguments: list[str] | None = None) -> int:
    path, name = arguments or sys.argv[1:]
    run_dir = RunDir(Path(path))
    try:
        follow(run_dir, TRACKERS[name](run_dir, read_plan(run_dir.plan).config))
    except Exception as error:
        traceback.print_exc()
        # The last line is the reason that a person is shown.
        with contextlib.suppress(OSError):
            print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 1
    return 0


VARIABLE = "FLIGHTDECK_TRACKER"
"""In the environment of a tracker and all its children: `mark`."""
_STARTS = 4
_WATCH_S = 0.2
_SEND_LIMIT_S = 60.0
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
        self._module = "engine.run.notifier" if name == NOTIFIER else "engine.run.tracker"
        self.ending = threading.Event()
        """The run reports nothing more."""
        wandb = {variable: value for variable, value in job.env.items() if variable.startswith("WANDB_")}
        # Reports to W&B's own developers are for the user to turn on.
        quiet = {"WANDB_ERROR_REPORTING": "false"}
        self._mark = {VARIABLE: mark(run_dir, name)}
        self._environment = quiet | os.environ | wandb | self._mark
        self._redactor = job.redactor()

    def run(self) -> None:
        while not self._has_rows() and not self.ending.wait(_WATCH_S):
            pass
        try:
            why = self._write() if self._has_rows() else None
        except (OSError, subprocess.SubprocessError) as error:
            why = str(error)
        if why is not None:
            self._faults.put(TrackerFailed(tracker=self._tracker, why=plain(self._redactor(why), 300)))

    def _has_rows(self) -> bool:
        """A notifier waits for none."""
        with contextlib.suppress(OSError):
            return self._tracker == NOTIFIER or self._run_dir.metrics.stat().st_size > 0
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
                return f"it did not send what was left within {_SEND_LIMIT_S:.0f} s of the run's end"
        return f"it was ended by {signal.Signals(-code).name} {_STARTS} times"

    def _run_process(self, output: int) -> int:
        # -P keeps the run's directory, which has a folder "wandb", off the module path.
        argv = [sys.executable, "-P", "-m", self._module, str(self._run_dir.path), self._tracker]
        folder, environment = self._run_dir.path, self._environment
        with processes.start_session(argv, folder, output, stdin=subprocess.PIPE, env=environment) as process:
            while process.poll() is None and not self.ending.wait(_WATCH_S):
                pass
            assert process.stdin is not None
            process.stdin.close()
            for limit_s, end in ((_SEND_LIMIT_S, process.terminate), (_KILL_LIMIT_S, process.kill)):
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
    """All trackers of one run, and its notifier. Starting and ending them again does nothing."""

    def __init__(self, run_dir: RunDir, job: JobConfig, *, notifies: bool = False) -> None:
        self._faults: SimpleQueue[TrackerFailed] = SimpleQueue()
        names = [*job.trackers, *([NOTIFIER] if notifies else [])]
        self._threads = {name: TrackerThread(run_dir, name, job, self._faults) for name in names}

    def start(self, *, ended: bool = False) -> None:
        """`ended`: the run has, and only how it did may have to be told."""
        for name, thread in self._threads.items():
            if thread.ident is None and (name == NOTIFIER or not ended):
                thread.start()

    def end(self) -> None:
        """The run reports nothing more; how it has ended may be known only in its aftermath. Returns at once."""
        for name, thread in self._threads.items():
            if name != NOTIFIER:
                thread.ending.set()

    def close(self) -> None:
        """Returns when all processes are gone, after about a minute at the latest. Blocking."""
        for thread in self._threads.values():
            thread.ending.set()
        for thread in self._threads.values():
            if thread.ident is not None:
                thread.join()

    def faults(self) -> Iterator[TrackerFailed]:
        """Those that came since the last call."""
        while not self._faults.empty():
            yield self._faults.get_nowait()


if __name__ == "__main__":
    sys.exit(main())
