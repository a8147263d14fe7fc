"""mlx.launch for a check: with a stdin that it can live with, in a process group of its own, ended with the check.

What needs no such stdin is run by a transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.worker.processes import kill_group

_OUTPUT_LIMIT = 1 << 20
_TERM_GRACE_S = 0.5
_KILL_WAIT_S = 1.0
"""For the killed to be gone. A zombie is in its group for as long as nobody reaps it, in some containers for good: an
abort must not wait long for one."""
_LOOK_S = 0.01


@dataclass(frozen=True)
class Finished:
    """How a program ended."""

    code: int | None
    """Exit code, negative for a signal; None when the time limit ended it."""
    stdout: str
    """The last MiB, decoded with replacement."""
    stderr: str


async def run(
    argv: Sequence[str],
    *,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
    cwd: str = "/",
    newline_every_s: float | None = None,
) -> Finished:
    """Run `argv` to its end, at most `time_limit_s` seconds. Cancelling ends its whole process group first.

    Output goes to unnamed files, so a chatty program costs disk and not memory. Its stdin stays open: mlx.launch
    crashes on a closed one, and at a newline it drops pipes that its ranks have left, instead of burning a core.
    Raises OSError when the program cannot be started.
    """
    quiet_stdin, held_open = os.pipe()
    os.set_blocking(held_open, False)
    newlines = asyncio.create_task(_newlines(held_open, newline_every_s)) if newline_every_s else None
    try:
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=quiet_stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
            code: int | None
            try:
                code = await asyncio.wait_for(process.wait(), time_limit_s)
            except TimeoutError:
                code = None
            finally:
                if process.returncode is None:
                    await asyncio.shield(end_group(process))
            return Finished(code, _tail(stdout.fileno()), _tail(stderr.fileno()))
    finally:
        if newlines is not None:
            newlines.cancel()
        os.close(quiet_stdin)
        os.close(held_open)


async def _newlines(descriptor: int, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b"\n")


async def end_group(process: asyncio.subprocess.Process) -> None:
    """TERM, then KILL, for everyone in the group of `process`; returns when the group is empty, or killed."""
    for number, grace_s in ((signal.SIGTERM, _TERM_GRACE_S), (signal.SIGKILL, _KILL_WAIT_S)):
        if not kill_group(process.pid, number):
            break
        deadline = time.monotonic() + grace_s
        # Signal 0 asks whether anybody is left.
        while kill_group(process.pid, 0) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
    await process.wait()


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    start = max(0, size - _OUTPUT_LIMIT)
    return os.pread(descriptor, size - start, start).decode(errors="replace")
