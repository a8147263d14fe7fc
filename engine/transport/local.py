"""This machine as a node (127.0.0.1): processes and files, without ssh."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path, PurePath

from engine.transport.base import Completed
from engine.worker.processes import kill_group


class LocalTransport:
    """The Transport of nodes that are this machine."""

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), timeout_s)
        except TimeoutError:
            return Completed(None, b"", b"")
        finally:
            # Also after a good end: a child it has left would hold our pipes open.
            kill_group(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
        return Completed(process.returncode, stdout, stderr)

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        return await asyncio.to_thread(_read_from, Path(path), offset, size)

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        await asyncio.to_thread(_put, Path(path), content, mode)


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
