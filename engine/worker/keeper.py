"""The rank keeper: starts one rank's program, keeps its log, holds its lease, and ends it. No mlx.

How it is started (the contract with what writes start.sh), with the bundle's folder as the working directory, so that
`worker` is the staged one whatever else is on the node:

    cd <node root>/bundles/<sha> && exec <python> -m worker.keeper --spec <attempt dir>/spec.json \\
        </dev/null >/dev/null 2>>rank<k>.keeper.log

The rank is MLX_RANK, or `--rank`. The keeper opens `rank<k>.in` beside the spec itself, read and write, and makes the
FIFO if there is none: so a start never waits for a writer, and a writer's death is no end of file. Standard input is
not read. It writes the files that wire.py names: the log while the program runs, the identity when it has started, the
exit record as the very last thing, when nothing of the rank is left but the keeper. Its own exit code is the
program's, or 128 + signal.

Words on the FIFO: "beat" renews the lease (every word does). "stop" asks the trainer for a last checkpoint and, when it
has not left after `stop_grace_s` (`save_grace_s` while its events say that it saves), sends TERM to the group and after
`term_grace_s` KILL. "end" goes to TERM at once. "rescue" asks the trainer to write the state of its last finished
update and to leave, for a peer is lost. A user's own command knows no such requests: for it all three are "end".
HUP, TERM and INT to the keeper are "stop"; so is the lease's expiry, unless `on_lease_expiry` is "continue".

With `--detach` the keeper leaves the process that was started, and that one ends when the rank has started: with 0 when
the identity is written, with the keeper's own code when it ended before. So nothing of a launcher, of an ssh session or
of their pipes is the rank's concern any more.

When the python that start.sh names is missing there is no keeper and no exit record: the shell's complaint in
rank<k>.keeper.log and its exit code 127 are all there is.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from json import dumps
from pathlib import Path
from types import FrameType

from . import processes
from .detach import STARTED, Parting, detach
from .events import last_phase
from .guardian import Guardian
from .priority import stay_awake
from .program import Program
from .rank_log import Pump, RankLog
from .wire import (
    BEAT,
    END,
    NONCE_ENV,
    RESCUE,
    STOP,
    AttemptSpec,
    ExitRecord,
    Identity,
    NodeFiles,
    RankSpec,
    write_atomic,
)

_DRAIN_S = 2.0
_SAVING_POLL_S = 0.1
_RESERVE_BYTES = 4096
_CANNOT_START = 127
_SAVING = "saving"


class Keeper:
    """One rank's life, as one loop over its FIFO, the signals, and the clock."""

    def __init__(
        self, spec: AttemptSpec, rank: RankSpec, files: NodeFiles, guardian: Guardian, parting: Parting | None = None
    ) -> None:
        self._parting = parting
        self._spec = spec
        self._rank = rank
        self._files = files
        self._guardian = guardian
        self._log = RankLog(files.log(rank.rank))
        self._fifo = _open_fifo(files.control(rank.rank))
        self._heard = b""
        self._signals: list[int] = []
        self._wake = _catch_signals(self._signals)
        self._beat = time.monotonic()
        self._lease_over = False
        self._stopped_by: str | None = None
        self._stop_at = self._term_at = self._kill_at = float("inf")
        self._last_saving = float("-inf")

    def run(self) -> int:
        """Keep the rank until it has ended; returns the keeper's exit code."""
        if self._files.fenced.exists():
            _say("the attempt has been ended: not started")
            return _CANNOT_START
        reserve = _Reserve(self._files.exit(self._rank.rank))
        try:
            program = Program(self._spec, self._rank, self._files)
        except (OSError, ValueError) as error:
            self._log.append(b"")
            self._log.close()
            said = f"{type(error).__name__}: {error}"
            _say(f"cannot start: {said}")
            reserve.settle(self._record(_CANNOT_START, said))
            return _CANNOT_START
        self._guardian.guard(program.pid)
        pump = Pump(program.output, self._log)
        self._identify(program)
        if self._parting is not None:
            self._parting.tell(STARTED)
        _say(f"sleep prevented: {stay_awake(program.pid)}")
        code = self._wait(program)
        self._sweep(program)
        if not pump.finish(_DRAIN_S):
            _say("the log's disk did not take the last output in time")
        reserve.settle(self._record(code, None))
        return code if code >= 0 else 128 - code

    def _wait(self, program: Program) -> int:
        while (code := program.returncode()) is None:
            self._listen(self._next_deadline())
            self._obey(program)
        return code

    def _listen(self, deadline: float) -> None:
        """Wait for a word, a signal or `deadline` (monotonic seconds), and take in what came."""
        timeout = max(0.0, min(deadline - time.monotonic(), 3600.0))
        ready, _, _ = select.select([self._fifo, self._wake], [], [], timeout)
        if self._wake in ready:
            os.read(self._wake, 4096)
        if self._fifo in ready:
            self._heard += os.read(self._fifo, 65_536)

    def _obey(self, program: Program) -> None:
        # What the FIFO holds counts before the clock: a keeper that was itself suspended finds its beats there.
        *words, self._heard = self._heard.split(b"\n")
        for word in words:
            self._take(word + b"\n", program)
        while self._signals:
            self._stop(program, f"signal {signal.Signals(self._signals.pop(0)).name.removeprefix('SIG')}")
        now = time.monotonic()
        if now - self._beat > self._spec.lease_s and not self._lease_over:
            self._lease_over = True
            _say(f"no word from the head for {self._spec.lease_s:g} s: {self._spec.on_lease_expiry}")
            if self._spec.on_lease_expiry == "end":
                self._stop(program, "lease")
        if now >= self._term_at:
            self._escalate(program, now)
        if now >= self._kill_at:
            self._kill_at = float("inf")
            _say("KILL to the group")
            program.signal_group(signal.SIGKILL)

    def _take(self, word: bytes, program: Program) -> None:
        if word not in (BEAT, STOP, RESCUE, END):
            _say(f"unknown word {word[:80]!r}")
            return
        self._beat = time.monotonic()
        self._lease_over = False
        if word == STOP:
            self._stop(program, "stop")
        elif word == END or (word == RESCUE and not program.cooperative):
            self._end(program, word.decode().strip())
        elif word == RESCUE:
            _say("a peer is lost: the trainer is to write its state and leave")
            program.tell(RESCUE)

    def _stop(self, program: Program, reason: str) -> None:
        if self._stopped_by is not None:
            return
        if not program.cooperative:
            self._end(program, reason)
            return
        self._stopped_by = reason
        _say(f"stopping: {reason}")
        self._stop_at = time.monotonic()
        self._term_at = self._stop_at + self._spec.stop_grace_s
        program.tell(STOP)

    def _end(self, program: Program, reason: str) -> None:
        self._stopped_by = self._stopped_by or reason
        if self._kill_at == float("inf"):
            self._terminate(program, time.monotonic())

    def _escalate(self, program: Program, now: float) -> None:
        """The grace is over: TERM, unless the trainer is in the middle of saving and may still take its time."""
        if last_phase(self._files.events(self._rank.rank)) == _SAVING:
            self._last_saving = now
        patience = min(self._last_saving + self._spec.stop_grace_s, self._stop_at + self._spec.save_grace_s)
        if now < patience:
            self._term_at = now + _SAVING_POLL_S
            return
        self._terminate(program, now)

    def _terminate(self, program: Program, now: float) -> None:
        _say(f"TERM to the group: {self._stopped_by}")
        self._term_at = float("inf")
        self._kill_at = now + self._spec.term_grace_s
        program.signal_group(signal.SIGTERM)

    def _next_deadline(self) -> float:
        lease = float("inf") if self._lease_over else self._beat + self._spec.lease_s + 0.01
        return min(lease, self._term_at, self._kill_at)

    def _sweep(self, program: Program) -> None:
        """End what the program left behind: its group, and what had left the group but carries the rank's marks."""
        program.signal_group(signal.SIGKILL)
        try:
            left = processes.with_variables({NONCE_ENV: self._spec.nonce, "MLX_RANK": str(self._rank.rank)})
        except (OSError, subprocess.SubprocessError) as error:
            _say(f"what was left behind could not be listed: {error}")
            return
        # Who waited in front has the rank's marks too, for as long as it takes to leave.
        ours = {self._guardian.pid, os.getppid(), self._parting.front_pid if self._parting is not None else 0}
        for process in left:
            if process.pid in ours:
                continue
            _say(f"KILL to {process.pid}, left behind: {process.command[:200]}")
            try:
                os.kill(process.pid, signal.SIGKILL)
            except OSError as error:
                _say(f"{process.pid}: {error}")

    def _identify(self, program: Program) -> None:
        identity = Identity(
            rank=self._rank.rank,
            run_id=self._spec.run_id,
            attempt=self._spec.attempt,
            nonce=self._spec.nonce,
            boot_id=processes.boot_id(),
            keeper_pid=os.getpid(),
            keeper_start=processes.start_time(os.getpid()) or "",
            trainer_pid=program.pid,
            trainer_pgid=program.pid,
            trainer_start=processes.start_time(program.pid) or "",
            started_at=time.time(),
        )
        try:
            write_atomic(self._files.identity(self._rank.rank), dumps(asdict(identity)))
        except OSError as error:
            _say(f"identity not written: {error}")

    def _record(self, code: int, error: str | None) -> ExitRecord:
        return ExitRecord(
            rank=self._rank.rank,
            attempt=self._spec.attempt,
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            ended_at=time.time(),
            log_bytes=self._log.size(),
            dropped_bytes=self._log.dropped_bytes,
            stopped_by=self._stopped_by,
            error=error,
        )


class _Reserve:
    """Disk space put aside at the start, so that a full disk cannot keep the exit record from being written."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f".{target.name}.reserve")
        try:
            self._path.write_bytes(b" " * _RESERVE_BYTES)
        except OSError as error:
            _say(f"no room to put aside: {error}")

    def settle(self, record: ExitRecord) -> None:
        text = dumps(asdict(record))
        try:
            write_atomic(self._target, text)
        except OSError as error:
            _say(f"exit record goes into the space put aside: {error}")
            with self._path.open("r+b") as file:
                file.write(text.encode()[:_RESERVE_BYTES])
                file.truncate()
                os.fsync(file.fileno())
            self._path.replace(self._target)
        else:
            self._path.unlink(missing_ok=True)


def _open_fifo(path: Path) -> int:
    if not path.exists():
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | os.O_NONBLOCK)


def _catch_signals(caught: list[int]) -> int:
    """Collect HUP, TERM and INT in `caught`; returns a descriptor that is readable after any of them or CHLD."""
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


def _say(message: str) -> None:
    """A line in the keeper's own log, unless its disk is full."""
    try:
        os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {message}\n".encode())
    except OSError:
        return


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.keeper", description="Keep one rank of an attempt.")
    parser.add_argument("--spec", type=Path, required=True, help="spec.json of the attempt")
    parser.add_argument("--detach", action="store_true", help="leave the process that was started")
    parser.add_argument("--rank", type=int, default=None, help="instead of MLX_RANK")
    options = parser.parse_args(arguments)
    number = options.rank if options.rank is not None else int(os.environ["MLX_RANK"])
    files = NodeFiles(options.spec.absolute().parent)
    try:
        spec = AttemptSpec.from_json(options.spec.read_text())
        rank = next(rank for rank in spec.ranks if rank.rank == number)
    except StopIteration:
        return _refuse(files, number, f"the spec has no rank {number}")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return _refuse(files, number, f"{options.spec}: {error}")
    if not options.detach:
        return _keep(spec, rank, files, None)
    parting = detach(files.keeper_log(number))
    code = _CANNOT_START
    try:
        code = _keep(spec, rank, files, parting)
    finally:
        parting.tell(code)
    return code


def _keep(spec: AttemptSpec, rank: RankSpec, files: NodeFiles, parting: Parting | None) -> int:
    guardian = Guardian()
    try:
        return Keeper(spec, rank, files, guardian, parting).run()
    finally:
        guardian.dismiss()


def _refuse(files: NodeFiles, rank: int, error: str) -> int:
    """Say in an exit record that the attempt cannot be understood: its number is then the folder's name."""
    _say(error)
    attempt = int(files.directory.name) if files.directory.name.isdigit() else 0
    record = ExitRecord(rank, attempt, _CANNOT_START, None, time.time(), log_bytes=0, error=error)
    write_atomic(files.exit(rank), dumps(asdict(record)))
    return _CANNOT_START


if __name__ == "__main__":
    sys.exit(main())
