"""A program that a check runs: in a process group of its own, with a time limit, ended with the check."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OUTPUT_LIMIT = 1 << 20
_TERM_GRACE_S = 0.5


@dataclass(frozen=True)
class Finished:
    """How a program ended."""

    code: int | None
    """Exit code, negative for a signal; None when the time limit ended it."""
    stdout: str
    """The last MiB, decoded with replacement."""
    stderr: str

    @property
    def last_line(self) -> str:
        """The last line it said, on stderr first: usually why it failed."""
        lines = [line.strip() for text in (self.stdout, self.stderr) for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else ""


async def run(
    argv: Sequence[str],
    *,
    time_limit_s: float,
    environment: Mapping[str, str] | None = None,
    cwd: str = "/",
) -> Finished:
    """Run `argv` to its end, at most `time_limit_s` seconds. Cancelling ends its whole process group first.

    Output goes to unnamed files, so a chatty program costs disk and not memory. Its stdin stays open and silent:
    mlx.launch crashes on a closed one. Raises OSError when the program cannot be started.
    """
    quiet_stdin, held_open = os.pipe()
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
                    await asyncio.shield(_end_group(process))
            return Finished(code, _tail(stdout.fileno()), _tail(stderr.fileno()))
    finally:
        os.close(quiet_stdin)
        os.close(held_open)


async def _end_group(process: asyncio.subprocess.Process) -> None:
    """TERM, then KILL, for everyone in the group of `process`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):
            break
        if number is signal.SIGTERM:
            await asyncio.wait([asyncio.ensure_future(process.wait())], timeout=_TERM_GRACE_S)
    await process.wait()


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    start = max(0, size - _OUTPUT_LIMIT)
    return os.pread(descriptor, size - start, start).decode(errors="replace")
