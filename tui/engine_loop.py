"""The thread in which the engine talks to nodes: for 64 of them ssh's arithmetic would hold up the keys on the
app's own loop. All that touches a connection runs here, since a connection belongs to one loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

Answer = TypeVar("Answer")
Item = TypeVar("Item")

BATCH_S: Final = 0.25
"""Between two batches of what a stream has brought."""
CLOSING_S: Final = 3.0
"""What the end may take: a node that is gone must not keep the console open."""


class EngineLoop:
    """An event loop in a thread of its own, begun by the first call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
            self._thread.start()
        return self._loop

    def submit(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Future[Answer]:
        """Begin what `make` makes, in the thread; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(make(), self._running())

    async def call(self, make: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """The answer of what `make` makes, worked out in the thread. Cancelling the call cancels the work."""
        return await asyncio.wrap_future(self.submit(make))

    async def each(
        self, make: Callable[[], AsyncIterator[Item]], *, every_s: float = BATCH_S
    ) -> AsyncGenerator[Item, None]:
        """What an iterator brings; what comes faster than each `every_s` seconds comes together, so that it is drawn
        together. Closing this closes the iterator; what it raises is raised here, after what it has brought."""
        basket: _Basket[Item] = _Basket(asyncio.get_running_loop())
        pumping = self.submit(lambda: _pump(make, basket))
        try:
            while True:
                await basket.some.wait()
                items, ended = basket.take()
                for item in items:
                    yield item
                if ended:
                    await asyncio.wrap_future(pumping)
                    return
                await asyncio.sleep(every_s)
        finally:
            pumping.cancel()

    async def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End what runs there, then do `last`; returns within some seconds, whatever the nodes do."""
        ending = self.submit(lambda: _ending(last))
        # What a node has still to say at the end is of no use to anybody.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.wrap_future(ending), CLOSING_S)
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        assert loop is not None and thread is not None
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join, CLOSING_S)
        if not thread.is_alive():
            loop.close()


class _Basket(Generic[Item]):
    """Filled in one thread, taken from in another."""

    def __init__(self, reader: asyncio.AbstractEventLoop) -> None:
        self.some = asyncio.Event()
        self._reader = reader
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._ended = False

    def put(self, item: Item) -> None:
        with self._lock:
            self._items.append(item)
        self._tell()

    def end(self) -> None:
        with self._lock:
            self._ended = True
        self._tell()

    def take(self) -> tuple[list[Item], bool]:
        """What has come since, and whether nothing more will."""
        with self._lock:
            items, self._items = self._items, []
            self.some.clear()
            return items, self._ended

    def _tell(self) -> None:
        # A reader that has left is told nothing.
        with contextlib.suppress(RuntimeError):
            self._reader.call_soon_threadsafe(self.some.set)


async def _pump(make: Callable[[], AsyncIterator[Item]], basket: _Basket[Item]) -> None:
    try:
        source = make()
        try:
            async for item in source:
                basket.put(item)
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()
    finally:
        basket.end()


async def _ending(last: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    others = _others()
    for task in others:
        task.cancel()
    # Those also that have begun while others were ending: a channel's last look at its program.
    while others:
        await asyncio.gather(*others, return_exceptions=True)
        others = _others()
    if last is not None:
        await last()
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()


def _others() -> set[asyncio.Task[Any]]:
    return {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
