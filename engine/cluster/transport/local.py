"""This machine as a node (127.0.0.1): processes, without ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from engine.cluster.transport.base import Channel, Completed, expanded
from engine.errors import NodeUnreachable
from engine.node.processes import kill_group
from engine.security.identifiers import LOCAL, SshTarget
from engine.security.sanitise import plain

_LEAVES_S = 1.0
"""For a channel's program to end by itself, once nobody writes to it any more."""
_REAP_LIMIT_S = 5.0
"""For a killed program to go: one that waits for a stalled disk may never."""
_EXIT_OUTPUT_BYTES = 4096
_OUTPUT_LIMIT = 1 << 20
_UNREAD_LIMIT = 64_000
"""Bytes: of a flood of output only the end is passed on."""
LINE_LIMIT = 300
_OUTPUT_POLL_S = 0.1
_TERM_GRACE_S = 0.5
_KILL_WAIT_S = 1.0
"""For killed processes to disappear. A zombie is in its group for as long as nobody reaps it, in some containers for
good: an abort must not wait long for one."""
_GROUP_POLL_S = 0.01


class LocalTransport:
    target = SshTarget(LOCAL)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        directory: Path = Path("/"),
        environment: Mapping[str, str] = {},
        on_line: Callable[[str], None] | None = None,
    ) -> Completed:
        """As every Transport's, with the last MiB of its output, also of a program whose time was over. `environment`
        is added to this process's own. With `on_line`, which gets each line as it comes, stderr goes to stdout.

        The output goes to unnamed files: a chatty program costs disk and not memory, and a child that stays behind and
        holds the stream keeps nobody waiting."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            files = {"stdout": stdout, "stderr": stderr if on_line is None else stdout}
            options = {"stdin": asyncio.subprocess.DEVNULL, "cwd": directory, "env": {**os.environ, **environment}}
            starting = asyncio.create_task(_start(argv, **files, **options))
            try:
                process = await asyncio.shield(starting)
            except asyncio.CancelledError:
                # asyncio would end the program itself and not what it has started by then.
                with contextlib.suppress(OSError):
                    await _end(await starting)
                raise
            code, ended, following = None, asyncio.Event(), None
            if on_line is not None:
                following = asyncio.create_task(_follow(stdout.fileno(), on_line, ended))
            try:
                # Not wait_for: in Python 3.11 it drops a cancellation that comes just at the program's end.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        code = await process.wait()
            finally:
                try:
                    if process.returncode is None:
                        await _end(process, _TERM_GRACE_S)
                finally:
                    ended.set()
                    if following is not None:
                        await following
            return Completed(code, _tail(stdout, _OUTPUT_LIMIT), _tail(stderr, _OUTPUT_LIMIT))

    async def open(self, argv: Sequence[str]) -> Channel:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  (the channel closes it)
        pipe = asyncio.subprocess.PIPE
        try:
            process = await _start(argv, stdin=pipe, stdout=pipe, stderr=stderr, cwd="/")
        except BaseException:
            stderr.close()
            raise
        return LocalChannel(process, stderr)

    @contextlib.asynccontextmanager
    async def forwarded(self, host: str, port: int) -> AsyncIterator[tuple[str, int]]:
        yield host, port

    exposed = forwarded

    async def close(self) -> None:
        return


class LocalChannel:
    def __init__(self, process: asyncio.subprocess.Process, stderr: IO[bytes]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._stderr = stderr
        self._exit_output: str | None = None

    async def write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            await self._stdin.drain()
        except (ConnectionError, RuntimeError) as gone:
            raise NodeUnreachable("the program has left", where=LOCAL, why=self.exit_output) from gone

    async def read(self, size: int) -> bytes:
        return await self._stdout.read(size)

    async def close(self) -> int | None:
        with contextlib.suppress(ConnectionError):
            self._stdin.close()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LEAVES_S):
                    await _left(self._process)
        finally:
            # Also when closing is given up: the program does not stay, and no file either.
            try:
                await _end(self._process)
            finally:
                if self._exit_output is None:
                    self._exit_output = self.exit_output
                    self._stderr.close()
        return self._process.returncode

    @property
    def exit_output(self) -> str:
        if self._exit_output is not None:
            return self._exit_output
        return Completed(None, b"", _tail(self._stderr, _EXIT_OUTPUT_BYTES)).exit_output


async def _start(argv: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
    command = (expanded(argument, str(Path.home())) for argument in argv)
    return await asyncio.create_subprocess_exec(*command, **options, start_new_session=True)


async def _end(process: asyncio.subprocess.Process, grace_s: float = 0.0) -> None:
    """KILL, and before it TERM where there is a grace, to the process's whole group. Waits until the process has left,
    also when that is cancelled meanwhile: nobody else reaps it. Nobody in the group runs on; that the children's
    zombies go is left to init."""
    ending, cancelled = asyncio.create_task(_end_group(process, grace_s)), None
    while not ending.done():
        try:
            await asyncio.wait({ending})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _end_group(process: asyncio.subprocess.Process, grace_s: float) -> None:
    signals = [(signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_WAIT_S)] if grace_s else [(signal.SIGKILL, 0.0)]
    for number, wait_s in signals:
        deadline, there = time.monotonic() + wait_s, kill_group(process.pid, number)
        while there and time.monotonic() < deadline:
            await asyncio.sleep(_GROUP_POLL_S)
            # Signal 0 only tests whether the group has members.
            there = kill_group(process.pid, 0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_REAP_LIMIT_S):
            await _left(process)


async def _left(process: asyncio.subprocess.Process) -> None:
    if process.stdout is not None:
        # asyncio has the end of a process wait for its pipes, and reads none that nobody empties.
        with contextlib.suppress(OSError, RuntimeError):
            while await process.stdout.read(1 << 20):
                pass
    await process.wait()


def _tail(file: IO[bytes], size: int) -> bytes:
    return os.pread(file.fileno(), size, max(0, os.fstat(file.fileno()).st_size - size))


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
            if text := plain(line.decode(errors="replace"), LINE_LIMIT).strip():
                on_line(text)
