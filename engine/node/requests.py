"""The agent's requests: probes in forked children, and commands.

A probe in a child of its own costs no session and no start of an interpreter, and one that hangs holds up nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from engine.node import probes
from engine.protocol.messages import CommandRequest, Message, ProbeRequest, RequestEnded, RequestOutput

_OUTPUT_LIMIT = 1 << 24
"""Limit for the output of one request that does not stream; the rest is dropped."""
_STDERR_LIMIT = 1 << 12
_BLOCK = 1 << 16
_MAX_DESCRIPTOR = 4096


class Child:
    """A request's process. Its pipes are closed at their end."""

    def __init__(
        self, request: int, pid: int, pipes: tuple[int, int, int], *, probe: probes.Probe | None = None
    ) -> None:
        """`pipes` are our ends of its stdin, stdout and stderr; without `probe` it is a command."""
        self.request = request
        self.pid = pid
        self._probe = probe
        self._stdin, self._stdout, self._stderr = pipes
        self._input = bytearray()
        self._input_ends = False
        self._sent = 0
        self._complaint = b""
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
            self._complaint = (self._complaint + block)[-_STDERR_LIMIT:]
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

    @property
    def complaint(self) -> str:
        return self._complaint.decode(errors="replace")

    def end(self) -> None:
        """Close its stdin when that ends it, as a probe that streams; else kill it, a command with its group."""
        if self._probe is not None and self._probe.streams:
            self.feed(b"", end=True)
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._probe is None:
                os.killpg(self.pid, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        for pipe in (self._stdin, *self.readable):
            if pipe >= 0:
                os.close(pipe)


class Requests:
    """All requests under way. `send` queues a message for the head."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._children: dict[int, Child] = {}

    @property
    def ending(self) -> bool:
        """There is a child whose pipes are closed and that has not ended yet."""
        return any(not child.readable for child in self._children.values())

    def readable(self) -> dict[int, Child]:
        return {pipe: child for child in self._children.values() for pipe in child.readable}

    def writable(self) -> dict[int, Child]:
        return {pipe: child for child in self._children.values() if (pipe := child.writable) is not None}

    def start_probe(self, message: ProbeRequest) -> None:
        if message.probe not in probes.PROBES:
            self._send(RequestEnded(message.request, 2, f"there is no probe {message.probe[:40]!r}"))
            return
        self._start(message.request, lambda: _fork_probe(message))

    def start_command(self, message: CommandRequest) -> None:
        self._start(message.request, lambda: _start_command(message))

    def feed(self, request: int, data: bytes) -> None:
        if request in self._children:
            self._children[request].feed(data)

    def cancel(self, request: int) -> None:
        if request in self._children:
            self._children[request].end()

    def read(self, pipe: int, child: Child) -> None:
        output = child.read(pipe)
        if output:
            self._send(RequestOutput(child.request, output))

    def reap(self) -> None:
        """Report the children that have ended."""
        for child in [child for child in self._children.values() if not child.readable]:
            code = child.exit_code()
            if code is not None:
                del self._children[child.request]
                child.close()
                self._send(RequestEnded(child.request, code, child.complaint))

    def close(self) -> None:
        """End what still runs."""
        for child in self._children.values():
            child.end()
            child.close()

    def _start(self, request: int, start: Callable[[], Child]) -> None:
        try:
            self._children[request] = start()
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._send(RequestEnded(request, code, f"it cannot be started: {error.strerror or error}"))


def _closed(pipe: int) -> int:
    os.close(pipe)
    return -1


def _fork_probe(message: ProbeRequest) -> Child:
    (its_in, stdin), (stdout, its_out), (stderr, its_err) = os.pipe(), os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_child(message, (its_in, its_out, its_err))
    for pipe in (its_in, its_out, its_err):
        os.close(pipe)
    return Child(message.request, pid, (stdin, stdout, stderr), probe=probes.PROBES[message.probe])


def _run_child(message: ProbeRequest, pipes: tuple[int, int, int]) -> None:
    """The child: never returns."""
    code = 1
    try:
        for target, pipe in enumerate(pipes):
            os.dup2(pipe, target)
        # The ends of the other children's pipes too: their end is to be seen when the agent is gone.
        os.closerange(3, _MAX_DESCRIPTOR)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # An agent that runs from memory has no files to start another interpreter with.
        if probes.PROBES[message.probe].own_process and os.path.exists(probes.__file__):  # noqa: PTH110
            if message.probe == "lease":
                # It must outlive what ends the agent's process group.
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


def _start_command(message: CommandRequest) -> Child:
    process = subprocess.Popen(
        message.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=os.path.expanduser("~"),  # noqa: PTH111
    )
    pipes = (process.stdin, process.stdout, process.stderr)
    stdin, stdout, stderr = (os.dup(pipe.fileno()) for pipe in pipes if pipe is not None)
    for pipe in pipes:
        if pipe is not None:
            pipe.close()
    # The child is waited for by its pid; Popen would warn that nobody does.
    process.returncode = 0
    child = Child(message.request, process.pid, (stdin, stdout, stderr))
    child.feed(message.data, end=True)
    return child
