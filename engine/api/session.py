"""State shared by the Engine's parts: the state directory, its store, and the connections to the nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.config.models import Config
from engine.security.paths import check_private, state_home
from engine.store.store import Store

if TYPE_CHECKING:
    from engine.cluster.transport.fleet import Fleet

Item = TypeVar("Item")


class Session:
    def __init__(self, home: Path | None = None) -> None:
        """Raises StateError where another user could have written the state."""
        self.home = home or state_home()
        check_private(self.home)
        self.notices: list[str] = []
        """Damage found in the state and how it was handled, one line each, for people."""
        self._fleets: dict[tuple[str, ...], Fleet] = {}

    @property
    def store(self) -> Store:
        """Opened for each use: other processes write it too."""
        return Store(self.home)

    def report_damage(self, store: Store) -> None:
        """Keep the notices of a store that has been read."""
        for notice in store.notices:
            self.notify(notice)

    def notify(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def fleet(self, config: Config) -> Fleet:
        """The connections to the configuration's nodes, kept until `close`."""
        # It brings asyncssh, which whatever only reads runs does without.
        from engine.cluster.transport.fleet import Fleet

        hosts = tuple(node.ssh for node in config.nodes)
        if hosts not in self._fleets:
            self._fleets[hosts] = Fleet(config.nodes, self.home)
        return self._fleets[hosts]

    async def close(self) -> None:
        """Close all connections to nodes; runs go on."""
        while self._fleets:
            _, fleet = self._fleets.popitem()
            await fleet.close()


async def stream(work: Callable[[Callable[[Item], None]], Awaitable[None]], *, name: str) -> AsyncGenerator[Item, None]:
    """Yield what `work` reports while it runs, and raise what it raises; closing the generator cancels it."""
    items: asyncio.Queue[Item | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await work(items.put_nowait)
        finally:
            items.put_nowait(None)

    task = asyncio.create_task(run(), name=name)
    try:
        while (item := await items.get()) is not None:
            yield item
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
