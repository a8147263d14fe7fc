"""This machine as a node (127.0.0.1): processes, without ssh."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from engine.cluster.transport.base import Channel, Completed, expanded
from engine.errors import NodeUnreachable
from engine.node.processes import kill_group
from engine.security.identifiers import LOCAL, SshTarget

_LEAVES_S = 1.0
"""For a channel's program to end by itself, once nobody writes to it any more."""
_REAP_LIMIT_S = 5.0
"""For a killed program to go: one that waits for a stalled disk may never."""
_EXIT_OUTPUT_BYTES = 4096
_PIPE_BYTES = 1 << 18
"""On Linux; a flood of log lines then wakes the head a fourth as often."""


class LocalTransport:
    target = SshTarget(LOCAL)

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        starting = asyncio.create_task(_start(argv, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would end the program itself and not what it has started by then.
            with contextlib.suppress(OSError):
                await _end(await starting)
            raise
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate()
        except TimeoutError:
            return Completed(None, b"", b"")
        finally:
            # Also after a good end: what it has left behind in its group goes too.
            await _end(process)
        return Completed(process.returncode, stdout, stderr)

    async def open(self, argv: Sequence[str]) -> Channel:
        stderr = tempfile.TemporaryFile()  # noqa: SIM115  (the channel closes it)
        try:
            process = await _start(argv, stdin=asyncio.subprocess.PIPE, stderr=stderr.fileno())
        except BaseException:
            stderr.close()
            raise
        return LocalChannel(process, stderr)

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
        stderr = self._stderr.fileno()
        size = os.fstat(stderr).st_size
        output = os.pread(stderr, _EXIT_OUTPUT_BYTES, max(0, size - _EXIT_OUTPUT_BYTES))
        return Completed(None, b"", output).exit_output


async def _start(argv: Sequence[str], *, stdin: int, stderr: int) -> asyncio.subprocess.Process:
    start = functools.partial(
        asyncio.create_subprocess_exec,
        *(expanded(argument, str(Path.home())) for argument in argv),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        cwd="/",
        start_new_session=True,
        limit=_PIPE_BYTES,
    )
    try:
        return await start(pipesize=_PIPE_BYTES)
    except PermissionError as error:
        if error.errno != errno.EPERM:
            raise
        # A user whose pipes hold much already may make none larger (pipe-user-pages-soft).
        return await start()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process's whole group, and wait until it has left, also when that is cancelled meanwhile: nobody else
    reaps it. Nobody in it runs on; that the children's zombies go is left to init."""
    kill_group(process.pid, signal.SIGKILL)
    cancelled: asyncio.CancelledError | None = None
    leaving, ends = asyncio.create_task(_left(process)), time.monotonic() + _REAP_LIMIT_S
    while not leaving.done() and (rest := ends - time.monotonic()) > 0:
        try:
            # Not wait_for: in Python 3.11 it drops a cancellation that comes just when the task is done.
            await asyncio.wait({leaving}, timeout=rest)
        except asyncio.CancelledError as error:
            cancelled = error
    leaving.cancel()
    await asyncio.wait({leaving})
    if cancelled is not None:
        raise cancelled


async def _left(process: asyncio.subprocess.Process) -> None:
    if process.stdout is not None:
        # asyncio has the end of a process wait for its pipes, and reads none that nobody empties.
        with contextlib.suppress(OSError, RuntimeError):
            while await process.stdout.read(1 << 20):
                pass
    await process.wait()
