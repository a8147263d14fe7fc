"""The rank keeper: starts one rank's program, keeps its log, holds its lease, and ends it. Without MLX.

Started by start.sh with the bundle's folder as the working directory, so that `engine` is the staged one:

    cd <node root>/bundles/<sha> && exec <python> -m engine.node.keeper --spec <attempt dir>/spec.json \\
        </dev/null >/dev/null 2>>rank<k>.keeper.log

The rank is MLX_RANK. The keeper opens the FIFO `rank<k>.in` beside the spec, read and write, and creates
it if missing: so a start never waits for a writer, and a writer's death is no end of file. It writes the files that
protocol.attempt names, the exit record last of all, when no process of the rank is left but the keeper. Its own exit
code is the program's, or 128 + signal.

Commands on the FIFO: "heartbeat", with the time at which it arrived on this node, renews the lease as of then: time
in which the machine slept, or this process was stopped, counts. "stop" asks the trainer for a last checkpoint and, when
it has not exited after `stop_grace_s` (`save_grace_s` while its events show that it is saving), sends TERM to the group
and after `term_grace_s` KILL. "end" sends TERM at once. "emergency_checkpoint" asks the trainer to save the state of
its last finished update and to exit, because a peer is lost. To a user's own command all three are "end", but that with
a lost peer an elastic job's torchrun starts its workers again. HUP, TERM and INT to the keeper are "stop"; so is the
lease's expiry, unless `on_lease_expiry` is "continue". These times go on in sleep, and after a lease they count from
its end, as for the head.

With `--detach` the process that was started exits when the rank has started: with 0 when the identity is written, with
the keeper's own code when it ended before. So the rank depends on no launcher, ssh session or pipe.

Where the others go on without a rank (its `restarts` above 0), the keeper starts a trainer that has
failed again, after 1, 2, 4 … 30 s: not before the rank's first step, until which the others need it, nor where
`_may_restart` says so. A trainer that has run for STEADY_S begins to count its restarts anew. Log and events go on in
the same files, the identity is the new program's, and the exit record is of the last one.

When the python that start.sh names is missing there is no keeper and no exit record: only the shell's message in
rank<k>.keeper.log and its exit code 127."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from json import dumps
from pathlib import Path
from types import FrameType

from engine.node import processes
from engine.node.daemon import STARTED, GroupReaper, StartupNotifier, daemonize
from engine.node.rank_activity import RankActivity
from engine.node.rank_process import TORCHRUN_ID_ENV, Pump, RankLog, RankProcess, reported_exception, torchrun_id
from engine.node.script_metrics import PrintedMetrics, TensorBoardMetrics
from engine.protocol import attempt
from engine.protocol.attempt import AttemptSpec, ExitRecord, Identity, NodeFiles, RankSpec, lease_clock, write_atomic
from engine.protocol.events import EventWriter, exit_output, has_stepped, last_phase
from engine.protocol.exit_codes import FINAL_EXITS, KeeperExit
from engine.protocol.job import JobError

_DRAIN_S = 2.0
_SAVING_POLL_S = 0.1
_RESERVE_BYTES = 4096
_LONGEST_BACKOFF_S = 30.0
_LONGEST_WAIT_S = 1.0
DISPLAY_OFF, DISPLAY_ON = ("/usr/bin/pmset", "displaysleepnow"), ("/usr/bin/caffeinate", "-u", "-t", "1")
STEADY_S = 600.0
"""A program that ran for so long has not failed because of the failure before it."""


class Lease:
    """For how long a rank goes on without a heartbeat, s. One that has run out stays so for a rank that ends by it,
    whoever is back: the head may have gone on without that rank."""

    def __init__(self, length_s: float, clock: Callable[[], float] = lease_clock) -> None:
        self._length_s = length_s
        self._clock = clock
        self._renewed_at = clock()
        self._over = False
        self.ended_at = float("inf")

    @property
    def left_s(self) -> float:
        """Infinite when it has run out."""
        return float("inf") if self._over else self._renewed_at + self._length_s - self._clock()

    def renew(self, at: float) -> bool:
        """A heartbeat came at `at`; True when the lease had run out before it."""
        at = min(at, self._clock())
        ran_out = self._ran_out_by(at)
        if at > self._renewed_at:
            self._renewed_at, self._over = at, False
        return ran_out

    def ran_out(self) -> bool:
        """True once."""
        return self._ran_out_by(self._clock())

    def _ran_out_by(self, now: float) -> bool:
        if self._over or now - self._renewed_at <= self._length_s:
            return False
        self._over, self.ended_at = True, self._renewed_at + self._length_s
        return True


class Keeper:
    """One rank, kept by one loop over its FIFO, the signals and the clock."""

    def __init__(
        self, spec: AttemptSpec, rank: RankSpec, files: NodeFiles, reaper: GroupReaper, notifier: StartupNotifier
    ) -> None:
        self._notifier = notifier
        self._spec = spec
        self._rank = rank
        self._files = files
        self._reaper = reaper
        self._log = RankLog(files.log(rank.rank))
        control = files.control(rank.rank)
        if not control.exists():
            os.mkfifo(control, 0o600)
        self._fifo = os.open(control, os.O_RDWR | os.O_NONBLOCK)
        self._received = b""
        self._signals: list[int] = []
        self._wake = _catch_signals(self._signals)
        self._lease = Lease(spec.lease_s)
        self._stopped_by: str | None = None
        self._asked_to_leave = False
        self._restarts = 0
        self._events_begin = 0
        """Size of the events file when the program was started."""
        # By the lease's clock.
        self._stop_limit = self._term_at = self._kill_at = self._restart_at = float("inf")
        self._last_saving = float("-inf")

    def run(self) -> int:
        """Keep the rank until it has ended for good; returns the exit code."""
        if self._files.fenced.exists():
            _log("the attempt is fenced: not started")
            return KeeperExit.CANNOT_START
        reserve = _Reserve(self._files.exit(self._rank.rank))
        again = True
        while again:
            self._events_begin = attempt.size_of(self._files.events(self._rank.rank)) or 0
            started = time.monotonic()
            printed, tracked = self._metrics()
            try:
                program = RankProcess(self._spec, self._rank, self._files)
            except (OSError, ValueError) as error:
                self._log.append(b"")
                self._log.close()
                message = f"{type(error).__name__}: {error}"
                _log(f"cannot start: {message}")
                reserve.write(self._record(KeeperExit.CANNOT_START, message))
                return KeeperExit.CANNOT_START
            if tracked is not None:
                tracked.start()
            code, stored = self._run_program(program, printed)
            if tracked is not None:
                tracked.finish(_DRAIN_S)
            if time.monotonic() - started >= STEADY_S:
                self._restarts = 0
            again = stored and self._may_restart(code) and self._await_restart(code)
        reserve.write(self._record(code, None))
        return code if code >= 0 else 128 - code

    def _run_program(self, program: RankProcess, printed: PrintedMetrics | None) -> tuple[int, bool]:
        """Keep the program until nothing of it is left: its return code, and True if all its output is in the log."""
        self._reaper.set_group(program.pid)
        pump = Pump(program.output, self._log, printed.feed if printed is not None else None)
        self._identify(program)
        self._notifier.notify(STARTED)
        _log(f"sleep prevented: {processes.stay_awake(program.pid, '-ims')}")
        if self._rank.display_sleep:
            _log(f"display off: {processes.start_on_mac(*DISPLAY_OFF)}")
        activity = self._activity(program)
        while (code := program.returncode()) is None:
            self._wait()
            self._handle_input(program)
            if activity is not None:
                activity.poll()
        self._sweep(program)
        if self._rank.display_sleep:
            _log(f"display on: {processes.start_on_mac(*DISPLAY_ON)}")
        program.close()
        stored = pump.finish(_DRAIN_S)
        if stored and printed is not None:
            printed.finish()
        # A PyTorch program cannot write events, but leaves its exception in a file.
        if code and not program.cooperative and (exception := reported_exception(self._files, self._rank.rank)):
            with contextlib.suppress(OSError):
                self._events().write("failure", **exception)
        if not stored:
            _log("the log's disk did not take the last output in time")
        return code, stored

    def _metrics(self) -> tuple[PrintedMetrics | None, TensorBoardMetrics | None]:
        """Readers of what a command prints, and of its tracker's files, which then have the metrics; none where no
        events can be written. Of an elastic job any node may have rank 0."""
        spec = self._spec
        if not self._rank.prints_metrics:
            return None, None
        try:
            events = self._events()
            printed = PrintedMetrics(
                events, elastic=bool(spec.torchrun), activity_only=spec.logging_dir is not None, pattern=spec.metrics
            )
        except (OSError, re.error) as error:
            _log(f"no metrics: {error}")
            return None, None
        if spec.logging_dir is None:
            return printed, None
        return printed, TensorBoardMetrics(events, Path(self._rank.workdir, Path(spec.logging_dir).expanduser()))

    def _activity(self, program: RankProcess) -> RankActivity | None:
        """None for a trainer, which reports what it does, and where no events can be written."""
        if program.cooperative:
            return None
        # torchrun gives an elastic job's workers a group of their own.
        grouped = self._spec.world_size > 1 and not self._spec.torchrun
        with contextlib.suppress(OSError):
            return RankActivity(self._events(), program.pid, program.environment, grouped=grouped)
        return None

    def _events(self) -> EventWriter:
        return EventWriter(self._files.events(self._rank.rank), self._rank.rank, self._spec.attempt)

    def _may_restart(self, code: int) -> bool:
        """The program failed by itself, and may not do so again."""
        if self._restarts >= self._rank.restarts:
            return False
        ended = code == 0 or code in FINAL_EXITS or self._asked_to_leave or self._stopped_by is not None
        if ended or not has_stepped(self._files.events(self._rank.rank)):
            return False
        failure = exit_output(self._files, self._rank.rank).failure
        return failure is None or failure.get("error_type") != JobError.__name__

    def _await_restart(self, code: int) -> bool:
        """Wait until the program is to start again; False when the rank was ended meanwhile."""
        # A group that has ended is left alone: its number may become another's.
        self._reaper.set_group(0)
        delay_s = min(2.0**self._restarts, _LONGEST_BACKOFF_S)
        self._restarts += 1
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        _log(f"the program ended ({how}): start {self._restarts} of {self._rank.restarts} in {delay_s:g} s")
        self._restart_at = lease_clock() + delay_s
        while self._stopped_by is None and lease_clock() < self._restart_at:
            self._wait()
            self._handle_input(None)
        self._restart_at = float("inf")
        if self._stopped_by is not None or self._files.fenced.exists():
            return False
        self._log.append(f"\n[flightdeck] the program ended ({how}) and is started again\n".encode())
        return True

    def _wait(self) -> None:
        """Wait for a command, a signal or the next deadline, and read the FIFO."""
        deadline = min(self._term_at, self._kill_at, self._restart_at)
        # select does not count time in sleep: what is due is looked at soon after it.
        timeout = max(0.0, min(deadline - lease_clock(), self._lease.left_s + 0.01, _LONGEST_WAIT_S))
        ready, _, _ = select.select([self._fifo, self._wake], [], [], timeout)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._fifo in ready:
            self._received += os.read(self._fifo, 65_536)

    def _handle_input(self, program: RankProcess | None) -> None:
        # The FIFO before the clock: a keeper that was itself stopped finds the heartbeats of that time there.
        *commands, self._received = self._received.split(b"\n")
        for command in commands:
            self._handle_command(command + b"\n", program)
        while self._signals:
            self._stop(program, f"signal {signal.Signals(self._signals.pop(0)).name.removeprefix('SIG')}")
        if self._lease.ran_out():
            self._end_lease(program)
        now = lease_clock()
        if program is not None and now >= self._term_at:
            self._escalate(program, now)
        if program is not None and now >= self._kill_at:
            self._kill_at = float("inf")
            _log("KILL to the group")
            processes.kill_group(program.pid, signal.SIGKILL)

    def _handle_command(self, command: bytes, program: RankProcess | None) -> None:
        if (renewed_at := attempt.heartbeat_time(command)) is not None:
            if self._lease.renew(renewed_at):
                self._end_lease(program)
        elif command == attempt.STOP:
            self._stop(program, "stop")
        elif command == attempt.EMERGENCY_CHECKPOINT and self._spec.torchrun:
            self._restart_workers()
        elif command == attempt.EMERGENCY_CHECKPOINT and program is not None and program.cooperative:
            _log("a peer is lost: asking the trainer to save its state and exit")
            self._asked_to_leave = True
            program.send(attempt.EMERGENCY_CHECKPOINT)
        elif command in (attempt.EMERGENCY_CHECKPOINT, attempt.END):
            self._end(program, command.decode().strip())
        else:
            _log(f"unknown command {command[:80]!r}")

    def _restart_workers(self) -> None:
        """End the workers of an elastic job's torchrun, which starts them again with the nodes that are left."""
        _log("a peer is lost: KILL to torchrun's workers")
        variables = {attempt.NONCE_ENV: self._spec.nonce, TORCHRUN_ID_ENV: torchrun_id(self._spec)}
        try:
            processes.kill_all(processes.with_variables(variables))
        except (OSError, subprocess.SubprocessError) as error:
            _log(f"the workers could not be listed: {error}")

    def _end_lease(self, program: RankProcess | None) -> None:
        _log(f"no heartbeat from the head for {self._spec.lease_s:g} s: {self._spec.on_lease_expiry}")
        if self._spec.on_lease_expiry == "end":
            self._stop(program, "lease", self._lease.ended_at)

    def _stop(self, program: RankProcess | None, reason: str, since: float = float("inf")) -> None:
        """`since`: when it was due, if before now."""
        if self._stopped_by is not None:
            return
        now = lease_clock()
        self._stop_limit = min(now, since)
        if program is None or not program.cooperative:
            self._end(program, reason)
            return
        self._stopped_by = reason
        _log(f"stopping: {reason}")
        self._stop_limit += max(self._spec.stop_grace_s, self._spec.save_grace_s)
        self._term_at = min(now + self._spec.stop_grace_s, self._stop_limit)
        program.send(attempt.STOP)

    def _end(self, program: RankProcess | None, reason: str) -> None:
        """`program` None: it is waiting to be started again."""
        self._stopped_by = self._stopped_by or reason
        if program is not None and self._kill_at == float("inf"):
            self._terminate(program, lease_clock())

    def _escalate(self, program: RankProcess, now: float) -> None:
        """The grace period is over: TERM, unless the trainer is saving and still has time for it."""
        if last_phase(self._files.events(self._rank.rank), self._events_begin) == "saving":
            self._last_saving = now
        if now < min(self._last_saving + self._spec.stop_grace_s, self._stop_limit):
            self._term_at = now + _SAVING_POLL_S
            return
        self._terminate(program, now)

    def _terminate(self, program: RankProcess, now: float) -> None:
        _log(f"TERM to the group: {self._stopped_by}")
        self._term_at = float("inf")
        self._kill_at = min(now, self._stop_limit) + self._spec.term_grace_s
        processes.kill_group(program.pid, signal.SIGTERM)

    def _sweep(self, program: RankProcess) -> None:
        """Kill what the program left behind: its group, its session, processes with the rank's environment variables,
        and their descendants."""
        processes.kill_group(program.pid, signal.SIGKILL)
        # The process in front has the rank's variables too, until it has exited.
        ours = {self._reaper.pid, os.getppid(), self._notifier.front_pid}
        try:
            marked = processes.with_variables({attempt.NONCE_ENV: self._spec.nonce, "MLX_RANK": str(self._rank.rank)})
            left = processes.with_family([process for process in marked if process.pid not in ours], {program.pid: ""})
        except (OSError, subprocess.SubprocessError) as error:
            _log(f"processes left behind could not be listed: {error}")
            return
        for process in left:
            _log(f"KILL to {process.pid}, left behind: {process.command[:200]}")
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError as error:
                _log(f"{process.pid}: {error}")

    def _identify(self, program: RankProcess) -> None:
        identity = Identity(
            rank=self._rank.rank,
            run_id=self._spec.run_id,
            attempt=self._spec.attempt,
            nonce=self._spec.nonce,
            boot_id=processes.boot_id(),
            keeper_pid=os.getpid(),
            keeper_start=processes.known_start(os.getpid()),
            trainer_pid=program.pid,
            trainer_pgid=program.pid,
            trainer_start=processes.known_start(program.pid),
            started_at=time.time(),
        )
        try:
            write_atomic(self._files.identity(self._rank.rank), dumps(asdict(identity)))
        except OSError as error:
            _log(f"identity not written: {error}")

    def _record(self, code: int, error: str | None) -> ExitRecord:
        return ExitRecord(
            rank=self._rank.rank,
            attempt=self._spec.attempt,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            ended_at=time.time(),
            log_bytes=attempt.size_of(self._files.log(self._rank.rank)) or 0,
            dropped_bytes=self._log.dropped_bytes,
            stopped_by=self._stopped_by,
            error=error,
            asked_to_leave=self._asked_to_leave,
        )


class _Reserve:
    """Disk space reserved at the start, so that the exit record can be written on a full disk."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name}.reserve")
        try:
            self._path.write_bytes(b" " * _RESERVE_BYTES)
        except OSError as error:
            _log(f"no space reserved for the exit record: {error}")

    def write(self, record: ExitRecord) -> None:
        text = dumps(asdict(record))
        try:
            write_atomic(self._target, text)
        except OSError as error:
            _log(f"exit record goes into the reserved space: {error}")
            with self._path.open("r+b") as file:
                file.write(text.encode()[:_RESERVE_BYTES])
                file.truncate()
                attempt.sync_file(file.fileno())
            self._path.replace(self._target)
        else:
            self._path.unlink(missing_ok=True)


def _catch_signals(caught: list[int]) -> int:
    """Collect HUP, TERM and INT in `caught`; returns a descriptor that is readable after each of them and CHLD."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def catch(number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            caught.append(number)

    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, catch)
    return read_end


def _log(message: str) -> None:
    """Write to the keeper's own log, unless its disk is full."""
    with contextlib.suppress(OSError):
        os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n".encode())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.node.keeper", description="Keep one rank of an attempt.")
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of the attempt")
    parser.add_argument("--detach", action="store_true", help="detach from the process that was started")
    options = parser.parse_args(arguments)
    number = int(os.environ["MLX_RANK"])
    files = NodeFiles(options.spec.absolute().parent)
    try:
        spec = AttemptSpec.from_json(options.spec.read_text())
        rank = spec.rank(number)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return _refuse(files, number, f"{options.spec}: {error}")
    processes.allow_open_files()
    notifier = daemonize(files.keeper_log(number)) if options.detach else StartupNotifier()
    code: int = KeeperExit.CANNOT_START
    try:
        code = _keep(spec, rank, files, notifier)
    finally:
        notifier.notify(code)
    return code


def _keep(spec: AttemptSpec, rank: RankSpec, files: NodeFiles, notifier: StartupNotifier) -> int:
    marks = {attempt.NONCE_ENV: spec.nonce, TORCHRUN_ID_ENV: torchrun_id(spec), "MLX_RANK": str(rank.rank)}
    reaper = GroupReaper(marks if spec.torchrun else None)
    try:
        return Keeper(spec, rank, files, reaper, notifier).run()
    finally:
        reaper.release()
        # It carries the nonce, and must not be found after its keeper.
        reaper.has_left(wait=True)


def _refuse(files: NodeFiles, rank: int, error: str) -> int:
    """Write an exit record for a specification that cannot be read; the attempt's number is the folder's name."""
    _log(error)
    number = int(files.directory.name) if files.directory.name.isdigit() else 0
    record = ExitRecord(rank, number, KeeperExit.CANNOT_START, None, time.time(), log_bytes=0, error=error)
    write_atomic(files.exit(rank), dumps(asdict(record)))
    return KeeperExit.CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
