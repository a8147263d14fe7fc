"""Programs that a check runs on this machine: mlx.launch, rsync and the user's sync script.

Each runs in a process group of its own, which is ended when its time limit is reached or the check is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.cluster.transport.base import Completed
from engine.node.processes import kill_group
from engine.security.sanitise import plain

LAST_LINES = 20
_OUTPUT_LIMIT = 1 << 20
_UNREAD_LIMIT = 64_000
"""Bytes: of a flood of output only the end is passed on."""
_LINE_LIMIT = 300
_OUTPUT_POLL_S = 0.1
_NEWLINE_S = 0.25
_TERM_GRACE_S = 0.5
_KILL_WAIT_S = 1.0
"""For killed processes to disappear. A zombie is in its group for as long as nobody reaps it, in some containers for
good: an abort must not wait long for one."""
_GROUP_POLL_S = 0.01


@dataclass(frozen=True)
class LocalProgram:
    """A program of this machine.

    Its output goes to unnamed files: a chatty program costs disk and not memory, and a child that stays behind and
    holds the stream keeps nobody waiting."""

    argv: Sequence[str]
    directory: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's own."""
    newlines: bool = False
    """Keep its stdin open and send newlines: mlx.launch crashes on a closed one, and at a newline it drops pipes that
    its ranks have left, instead of burning a core."""

    async def run(self, time_limit_s: float, on_line: Callable[[str], None] | None = None) -> Completed:
        """Run it to its end, and keep the last MiB of its output. With `on_line`, which gets each line as it comes,
        stderr goes to stdout. Cancelling ends its whole process group first. Raises OSError where it cannot start."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            async with self._stdin() as stdin:
                process = await asyncio.create_subprocess_exec(
                    *self.argv,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr if on_line is None else stdout,
                    cwd=self.directory,
                    env={**os.environ, **self.environment},
                    start_new_session=True,
                )
                ended, following = asyncio.Event(), None
                if on_line is not None:
                    following = asyncio.create_task(_follow(stdout.fileno(), on_line, ended))
                code: int | None
                try:
                    # Not wait_for: in Python 3.11 it drops a cancellation that comes just at the program's end.
                    async with asyncio.timeout(time_limit_s):
                        code = await process.wait()
                except TimeoutError:
                    code = None
                finally:
                    if process.returncode is None:
                        await asyncio.shield(_end_group(process))
                    ended.set()
                    if following is not None:
                        await following
            return Completed(code, _tail(stdout.fileno()), _tail(stderr.fileno()))

    @contextlib.asynccontextmanager
    async def _stdin(self) -> AsyncIterator[int]:
        if not self.newlines:
            yield asyncio.subprocess.DEVNULL
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        sending = asyncio.create_task(_send_newlines(writing))
        try:
            yield reading
        finally:
            sending.cancel()
            os.close(reading)
            os.close(writing)


async def _send_newlines(descriptor: int) -> None:
    while True:
        await asyncio.sleep(_NEWLINE_S)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b"\n")


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """TERM, then KILL, for everyone in the group of `process`; returns when the group is empty, or killed."""
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
        if not kill_group(process.pid, number):
            break
        deadline = time.monotonic() + grace_s
        # Signal 0 only tests whether the group has members.
        while kill_group(process.pid, 0) and time.monotonic() < deadline:
            await asyncio.sleep(_GROUP_POLL_S)
    await process.wait()


def _tail(descriptor: int) -> bytes:
    return os.pread(descriptor, _OUTPUT_LIMIT, max(0, os.fstat(descriptor).st_size - _OUTPUT_LIMIT))


async def _follow(descriptor: int, on_line: Callable[[str], None], ended: asyncio.Event) -> None:
    """Pass on the lines of a file as it grows, until nobody writes to it any more."""
    offset, partial, more = 0, b"", True
    while more:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_POLL_S):
                await ended.wait()
        more = not ended.is_set()
        size = os.fstat(descriptor).st_size
        if size - offset > _UNREAD_LIMIT:
            offset, partial = size - _UNREAD_LIMIT, b""
        block = os.pread(descriptor, size - offset, offset)
        offset += len(block)
        *lines, partial = (partial + block).split(b"\n")
        for line in lines:
            if text := plain(line.decode(errors="replace"), _LINE_LIMIT).strip():
                on_line(text)


def last_lines(ended: Completed) -> tuple[str, ...]:
    """The last lines of stdout, sanitised, without empty ones."""
    lines = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.strip()]
    return tuple(plain(line, _LINE_LIMIT) for line in lines[-LAST_LINES:])
