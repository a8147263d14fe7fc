"""The user's own sync script: where it is, whether it may be run, and its run on this machine, heard line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config.models import FlightConfig
from engine.preflight.process import end_group
from engine.security.home import state_home
from engine.security.paths import validate_path
from engine.security.sanitise import plain

LAST_LINES = 20
_TAIL_BYTES = 64_000
_LOOK_S = 0.1


@dataclass(frozen=True)
class Ran:
    """How a program of this machine ended."""

    code: int | None
    """Exit code, negative for a signal; None when the time limit ended it."""
    lines: tuple[str, ...]
    """The last lines that it said, on both streams, sanitised."""


@dataclass(frozen=True)
class Script:
    """The sync script, and why it cannot be run, if so."""

    path: Path
    absent: bool = False
    fault: str | None = None
    permit: bool = False
    """Whether the fault is that it may not be read or executed."""


def find(config: FlightConfig) -> Script:
    """The script that the configuration names. Raises InputError for a path that is refused."""
    named = config.preflight.sync_script
    path = validate_path(named, "sync script", roots=allowed_roots(config))
    try:
        if not path.exists():
            return Script(path, absent=True, fault=f"there is no {path}")
        if not path.is_file():
            return Script(path, fault=f"{path} is no file")
    except PermissionError:
        return Script(path, fault=f"{path} cannot be reached: permission denied")
    if not os.access(path, os.R_OK | os.X_OK):
        why = "executed" if os.access(path, os.R_OK) else "read"
        return Script(path, fault=f"{path} may not be {why}", permit=True)
    return Script(path)


def allowed_roots(config: FlightConfig) -> list[Path]:
    """Of this machine: home, the state directory, and what the configuration names. Not the working directory: a
    supervisor's is another one than its user's, and what one may the other must."""
    named = [Path(root) for root in config.preflight.roots]
    if config.file is not None:
        named.append(config.file.parent)
    return [Path.home(), state_home(), *named, *(Path(node.workdir) for node in config.nodes if node.local)]


async def run(
    argv: Sequence[str],
    *,
    limit_s: float,
    directory: Path,
    heard: Callable[[str], None],
    environment: dict[str, str] | None = None,
) -> Ran:
    """Run a program to its end, at most `limit_s` seconds; `heard` is told each line, as it comes. When it is late, or
    this is cancelled, its whole process group is ended. Raises OSError when it cannot be started.

    What it says goes through an unnamed file: a child that stays behind and holds the stream keeps nobody waiting.
    """
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=directory,
            env=environment,
            start_new_session=True,
        )
        follower = _Follower(output.fileno(), heard)
        following = asyncio.create_task(follower.follow())
        code: int | None
        try:
            code = await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            code = None
        finally:
            if process.returncode is None:
                await asyncio.shield(end_group(process))
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        follower.read()
        return Ran(code, last_lines(output.fileno()))


class _Follower:
    """Reads on in a file as it grows."""

    def __init__(self, descriptor: int, heard: Callable[[str], None]) -> None:
        self._descriptor = descriptor
        self._heard = heard
        self._at = 0
        self._torn = b""

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.read()

    def read(self) -> None:
        """Tell what has come since, of a flood its end."""
        size = os.fstat(self._descriptor).st_size
        if size - self._at > _TAIL_BYTES:
            self._at, self._torn = size - _TAIL_BYTES, b""
        block = os.pread(self._descriptor, size - self._at, self._at)
        self._at += len(block)
        *whole, self._torn = (self._torn + block).split(b"\n")
        for line in whole:
            if words := plain(line.decode(errors="replace"), 300).strip():
                self._heard(words)


def last_lines(descriptor: int) -> tuple[str, ...]:
    """The last lines in a file, sanitised, without empty ones."""
    size = os.fstat(descriptor).st_size
    start = max(0, size - _TAIL_BYTES)
    text = os.pread(descriptor, size - start, start).decode(errors="replace")
    lines = [plain(line, 300) for line in text.splitlines() if line.strip()]
    return tuple(lines[-LAST_LINES:])
