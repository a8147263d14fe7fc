"""Work that an abort ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from engine.supervision.requests import Request

TICK_S = 0.1

Asked = Callable[[], Request | None]
"""The abort that has been asked for, if any."""
T = TypeVar("T")


class Aborted(Exception):
    """An abort was asked for while something was waited for; that has been ended."""


async def until_abort(work: Coroutine[Any, Any, T], asked: Asked) -> T:
    """The outcome of `work`. Raises Aborted when an abort is asked for; `work` has then been ended."""
    task = asyncio.create_task(work)
    while not task.done():
        if asked() is not None:
            task.cancel()
            await asyncio.wait({task})
            raise Aborted
        await asyncio.wait({task}, timeout=TICK_S)
    return task.result()
