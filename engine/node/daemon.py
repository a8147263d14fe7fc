"""Daemonizes the keeper (two forks and setsid, because macOS has no setsid command), and forks the reaper that kills
a process group when its keeper, or its agent, is itself killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from engine.node.processes import kill_all, kill_group, with_variables
from engine.protocol.exit_codes import KeeperExit

STARTED = 0
_AFTER_STDERR = 3
_MOST_DESCRIPTORS = 65_536
"""Closed at most, where the system has no limit."""


class StartupNotifier:
    """The detached side. `notify` ends the process in front, `front_pid`, which may still exist for a moment. Without
    arguments nothing was detached, and nobody is notified."""

    def __init__(self, pipe: int = -1, front_pid: int = 0) -> None:
        self._pipe = pipe
        self.front_pid = front_pid

    def notify(self, code: int) -> None:
        """The process in front exits with `code`. Only the first call counts."""
        if self._pipe < 0:
            return
        # The process in front may be gone: a broken connection must not end the rank that has just started.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, b"%d\n" % code)
        os.close(self._pipe)
        self._pipe = -1


def daemonize(log: Path) -> StartupNotifier:
    """Continue in a process with its own session; this returns only there.

    The calling process exits with the code that `StartupNotifier.notify` gets. The new one has /dev/null as stdin and
    stdout, appends stderr to `log`, and has nothing else open; its environment is the same."""
    front_pid = os.getpid()
    read_end, write_end = os.pipe()
    between = os.fork()
    if between:
        os.close(write_end)
        os.waitpid(between, 0)
        os._exit(_await_notification(read_end))
    os.setsid()
    if os.fork():
        os._exit(0)
    # Its copy of stderr is closed as well: it may be the pipe of an ssh session, which waits for all who hold it.
    _redirect(log)
    close_all_but(write_end)
    return StartupNotifier(write_end, front_pid)


def close_all_but(kept: int) -> None:
    """Close every inherited descriptor but `kept`, stdin, stdout and stderr."""
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(_AFTER_STDERR, kept)
    os.closerange(kept + 1, limit if 0 < limit < _MOST_DESCRIPTORS else _MOST_DESCRIPTORS)


def _await_notification(pipe: int) -> int:
    received = b""
    while chunk := os.read(pipe, 64):
        received += chunk
        if b"\n" in received:
            break
    try:
        return int(received)
    except ValueError:
        os.write(2, b"the keeper ended before it had started its rank\n")
        return KeeperExit.STARTUP_UNKNOWN


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        stderr = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        stderr = os.dup(nothing)
    for source, target in ((nothing, 0), (nothing, 1), (stderr, 2)):
        os.dup2(source, target)


class GroupReaper:
    """Held by the process whose group must not outlive it."""

    def __init__(self, marks: Mapping[str, str] | None = None, at_end: Callable[[], None] = lambda: None) -> None:
        """`marks`: variables of processes outside the group that must not outlive it either, such as torchrun's
        workers, each of which has a session of its own. `at_end` is called after the holder's end."""
        read_end, self._write_end = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(self._write_end)
            raise
        if self.pid == 0:
            # Readers of other pipes must not wait for the reaper.
            nothing = os.open(os.devnull, os.O_RDWR)
            for target in range(_AFTER_STDERR):
                os.dup2(nothing, target)
            close_all_but(read_end)
            _watch(read_end, dict(marks or {}), at_end)
        os.close(read_end)

    def set_group(self, pgid: int) -> None:
        """From now on, process group `pgid`, and no other, does not outlive this process; 0: none."""
        # Without its reaper the watched process goes on.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._write_end, b"%d\n" % pgid)

    def release(self) -> None:
        """The group has ended, or is to be left alone; the reaper leaves."""
        self.set_group(0)
        os.close(self._write_end)

    def has_left(self, *, wait: bool = False) -> bool:
        """True once."""
        return os.waitpid(self.pid, 0 if wait else os.WNOHANG)[0] == self.pid


def _watch(pipe: int, marks: dict[str, str], at_end: Callable[[], None]) -> None:
    """Read group ids until the pipe ends, then kill the last one, and what has the variables `marks`. Never returns."""
    try:
        os.setsid()
        for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        received = b"0 "
        while chunk := os.read(pipe, 64):
            received += chunk
        if pgid := int(received.split()[-1]):
            kill_group(pgid, signal.SIGKILL)
            kill_all(with_variables(marks) if marks else ())
        at_end()
    finally:
        os._exit(0)
