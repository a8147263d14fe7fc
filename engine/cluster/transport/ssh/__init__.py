"""Nodes over SSH; the only package that imports asyncssh, and only in its modules. `connection` opens connections,
`auth` checks host keys and chooses identities, `channel` is a program on a node, and `transport` combines them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

CONNECTS_AT_ONCE = 8
"""To one sshd: it drops some of 50 at once (MaxStartups 10:30:100), none of 8."""
CONNECTS_IN_ALL = 32


class ConnectionLimiter:
    """No more connections at once than an sshd takes in, nor than this process should make."""

    def __init__(self) -> None:
        self._all = asyncio.Semaphore(CONNECTS_IN_ALL)
        self._each: dict[tuple[str, int], asyncio.Semaphore] = {}

    @contextlib.asynccontextmanager
    async def at(self, host: str, port: int) -> AsyncIterator[None]:
        async with self._each.setdefault((host, port), asyncio.Semaphore(CONNECTS_AT_ONCE)), self._all:
            yield
