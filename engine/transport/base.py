"""What can be done on a node, whichever way it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol


@dataclass(frozen=True)
class Completed:
    """How a command ended on a node."""

    code: int | None
    """Exit code, negative for a signal; None when the time limit ended it."""
    stdout: bytes
    stderr: bytes

    @property
    def last_words(self) -> str:
        """The last line it said, on stderr first: usually why it failed."""
        for stream in (self.stderr, self.stdout):
            lines = [line.strip() for line in stream.decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1]
        return ""


class Transport(Protocol):
    """One way to one node. Paths are the node's own."""

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        """Run a command, never through a shell, at most `timeout_s` seconds; then, or when the call is cancelled, its
        whole process group is ended. Raises OSError when it cannot be started, NodeUnreachable."""
        ...

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        """At most `size` bytes from `offset`; b"" at the end. Raises FileNotFoundError and OSError, NodeUnreachable."""
        ...

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        """Write a file so that a reader sees all of it or nothing. Raises OSError, NodeUnreachable."""
        ...
