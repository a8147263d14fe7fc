"""The agent's requests: commands, and probes in forked children: these cost no session and no start of an interpreter,
and one that hangs holds up nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from engine.node import probes
from engine.node.daemon import GroupReaper
from engine.protocol import messages
from engine.protocol.exit_codes import ShellExit
from engine.protocol.messages import Message

_OUTPUT_LIMIT = 1 << 24
"""Limit for the output of one request that does not stream; the rest is dropped."""
_STDERR_LIMIT = 1 << 12
_BLOCK = 1 << 16
_MAX_DESCRIPTOR = 4096
_LEAVES_S = 1.5
"""For a probe that streams to end by itself once its stdin has ended."""
_REAP_INTERVAL_S = 0.01


class Child:
    """A request's process. Its pipes are closed at their end."""

    def __init__(self, request: int, pid: int, pipes: tuple[int, int, int], runs: probes.Probe | GroupReaper) -> None:
        """`pipes` are our ends of its stdin, stdout and stderr; a command has a reaper, which ends its group when the
        agent is killed, and no input (-1)."""
        self.request = request
        self.pid = pid
        self.kill_at = float("inf")
        self._probe = runs if isinstance(runs, probes.Probe) else None
        self.reaper = runs if isinstance(runs, GroupReaper) else None
        self._stdin, self._stdout, self._stderr = pipes
        self._input = bytearray()
        self._input_ends = False
        self._sent = 0
        self.complaint = b""
        """The end of its stderr."""
        if self._stdin >= 0:
            os.set_blocking(self._stdin, False)

    @property
    def readable(self) -> list[int]:
        return [pipe for pipe in (self._stdout, self._stderr) if pipe >= 0]

    @property
    def writable(self) -> int | None:
        """Its stdin, while there is more for it."""
        return self._stdin if self._stdin >= 0 and (self._input or self._input_ends) else None

    def feed(self, data: bytes, *, end: bool = False) -> None:
        """Queue stdin for it, and with `end` its end."""
        self._input += data
        self._input_ends = self._input_ends or end

    def write(self) -> None:
        try:
            del self._input[: os.write(self._stdin, self._input) if self._input else 0]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._input.clear()
        if not self._input and self._input_ends:
            self._stdin = _closed(self._stdin)

    def read(self, pipe: int) -> bytes:
        """The next part of its stdout; of stderr nothing, which is kept."""
        block = os.read(pipe, _BLOCK)
        if pipe == self._stderr:
            self.complaint = (self.complaint + block)[-_STDERR_LIMIT:]
            if not block:
                self._stderr = _closed(pipe)
            return b""
        if not block:
            self._stdout = _closed(pipe)
        if self._probe is not None and self._probe.streams:
            return block
        passed = block[: max(0, _OUTPUT_LIMIT - self._sent)]
        self._sent += len(passed)
        return passed

    def exit_code(self) -> int | None:
        """None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def cancel(self) -> None:
        """End it: a probe that streams by the end of its stdin, and by KILL when that takes long."""
        if self._probe is not None and self._probe.streams:
            self.feed(b"", end=True)
            self.kill_at = time.monotonic() + _LEAVES_S
        else:
            self.kill()

    def kill(self) -> None:
        """KILL, to a command's whole group; not to what only the end of its stdin may end."""
        self.kill_at = float("inf")
        if self._probe is not None and self._probe.outlives_agent:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if self._probe is None else os.kill)(self.pid, signal.SIGKILL)

    def close(self) -> None:
        for pipe in (self._stdin, *self.readable):
            if pipe >= 0:
                os.close(pipe)
        if self.reaper is not None:
            self.reaper.release()


class Requests:
    """All requests under way. `send` queues a message for the head."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._children: dict[int, Child] = {}
        self._leaving: list[GroupReaper] = []
        """Reapers of commands that have ended."""

    @property
    def due_at(self) -> float:
        """When `reap` has something to do without any pipe's showing it (monotonic seconds)."""
        if self._leaving or any(not child.readable for child in self._children.values()):
            return time.monotonic() + _REAP_INTERVAL_S
        return min((child.kill_at for child in self._children.values()), default=float("inf"))

    def readable(self) -> dict[int, Child]:
        return {pipe: child for child in self._children.values() for pipe in child.readable}

    def writable(self) -> dict[int, Child]:
        return {pipe: child for child in self._children.values() if (pipe := child.writable) is not None}

    def start_probe(self, message: messages.ProbeRequest) -> None:
        if message.probe not in probes.PROBES:
            self._send(messages.RequestEnded(message.request, 2, f"there is no probe {message.probe[:40]!r}"))
            return
        self._start(message.request, lambda: _fork_probe(message))

    def start_command(self, message: messages.CommandRequest) -> None:
        self._start(message.request, lambda: _start_command(message))

    def feed(self, message: messages.RequestInput) -> None:
        if message.request in self._children:
            self._children[message.request].feed(message.data)

    def cancel(self, message: messages.CancelRequest) -> None:
        if message.request in self._children:
            self._children[message.request].cancel()

    def read(self, pipe: int, child: Child) -> None:
        if output := child.read(pipe):
            self._send(messages.RequestOutput(child.request, output))

    def reap(self) -> None:
        """Report the children that have ended, and kill those that should have."""
        now = time.monotonic()
        self._leaving = [reaper for reaper in self._leaving if not reaper.has_left()]
        for child in list(self._children.values()):
            if now >= child.kill_at:
                child.kill()
            code = child.exit_code() if not child.readable else None
            if code is not None:
                del self._children[child.request]
                child.close()
                if child.reaper is not None:
                    self._leaving.append(child.reaper)
                self._send(messages.RequestEnded(child.request, code, child.complaint.decode(errors="replace")))

    def kill(self) -> None:
        for child in self._children.values():
            child.kill()

    def _start(self, request: int, start: Callable[[], Child]) -> None:
        try:
            self._children[request] = start()
        except OSError as error:
            code = ShellExit.NOT_FOUND if isinstance(error, FileNotFoundError) else ShellExit.CANNOT_RUN
            self._send(messages.RequestEnded(request, code, f"it cannot be started: {error.strerror or error}"))


def _closed(pipe: int) -> int:
    os.close(pipe)
    return -1


def _fork_probe(message: messages.ProbeRequest) -> Child:
    (its_in, stdin), (stdout, its_out), (stderr, its_err) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_child(message, (its_in, its_out, its_err))
    for pipe in (its_in, its_out, its_err):
        os.close(pipe)
    return Child(message.request, pid, (stdin, stdout, stderr), probes.PROBES[message.probe])


def _run_child(message: messages.ProbeRequest, pipes: tuple[int, int, int]) -> None:
    """The child: never returns."""
    code = 1
    try:
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
        # The ends of the other children's pipes too: their end is to be seen when the agent is gone.
        os.closerange(3, _MAX_DESCRIPTOR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # An agent that runs from memory has no files to start another interpreter with.
        probe = probes.PROBES[message.probe]
        if probe.own_process and os.path.exists(probes.__file__):  # noqa: PTH110
            if probe.outlives_agent:
                # Also what ends the agent's process group.
                os.setsid()
            argv = [sys.executable, "-m", probes.__name__, message.probe, *message.arguments]
            os.execv(sys.executable, argv)
        probes.run(message.probe, message.arguments)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _start_command(message: messages.CommandRequest) -> Child:
    reaper = GroupReaper()
    (stdout, its_out), (stderr, its_err) = os.pipe(), os.pipe()
    try:
        process = subprocess.Popen(
            message.argv,
            stdin=subprocess.DEVNULL,
            stdout=its_out,
            stderr=its_err,
            start_new_session=True,
            cwd=message.directory or os.path.expanduser("~"),  # noqa: PTH111
        )
    except BaseException:
        os.close(stdout)
        os.close(stderr)
        reaper.release()
        reaper.has_left(wait=True)
        raise
    finally:
        os.close(its_out)
        os.close(its_err)
    reaper.set_group(process.pid)
    # The child is waited for by its pid; Popen would warn that nobody does.
    process.returncode = 0
    return Child(message.request, process.pid, (-1, stdout, stderr), reaper)
