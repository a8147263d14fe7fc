"""State shared by the Engine's parts: the state directory, its store, and the connections to the nodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.errors import InputError
from engine.security.paths import check_private, state_home
from engine.store.store import Store

if TYPE_CHECKING:
    from engine.cluster.transport.fleet import Fleet
    from engine.config.models import Config, NodeConfig

Item = TypeVar("Item")


def named_nodes(config: Config, names: Collection[str] = ()) -> list[NodeConfig]:
    """The nodes of these names, or all. Raises InputError."""
    there = [node.name for node in config.nodes]
    if unknown := sorted(set(names) - set(there)):
        raise InputError(f"no node {unknown[0]!r}", todo=f"nodes: {', '.join(there)}")
    return [node for node in config.nodes if not names or node.name in names]


class Session:
    def __init__(self, home: Path | None = None) -> None:
        """Raises StateError where another user could have written the state."""
        self.home = home or state_home()
        check_private(self.home)
        self.notices: list[str] = []
        """Damage found in the state and how it was handled, one line each, for people."""

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

    @cached_property
    def fleet(self) -> Fleet:
        """The connections to nodes, kept until `close`."""
        # Whatever only reads runs does without.
        from engine.cluster.transport.fleet import Fleet

        return Fleet(self.home)

    async def close(self) -> None:
        """Close all connections to nodes; runs go on."""
        if "fleet" in self.__dict__:
            await self.fleet.close()


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
