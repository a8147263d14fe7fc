"""This machine as a node (127.0.0.1): processes and files, without ssh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path, PurePath

from engine.transport.base import Completed
from engine.worker.processes import kill_group


class LocalTransport:
    """The Transport of nodes that are this machine."""

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        starting = asyncio.create_task(_start(argv))
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio would end the program itself and not what it has started by then.
            with contextlib.suppress(OSError):
                await _end(await starting)
            raise
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            return Completed(None, b"", b"")
        finally:
            # Also after a good end: what it has left behind in its group goes too.
            await asyncio.shield(_end(process))
        return Completed(process.returncode, stdout, stderr)

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        return await asyncio.to_thread(_read_from, Path(path), offset, size)

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        await asyncio.to_thread(_put, Path(path), content, mode)


async def _start(argv: Sequence[str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd="/",
        start_new_session=True,
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process's whole group. Nobody in it runs on; that the children's zombies go is left to init."""
    kill_group(process.pid, signal.SIGKILL)
    await process.wait()


def _read_from(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, offset)


def _put(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
