"""The engine's thread ends what runs in it, and what that begins while it ends."""

from __future__ import annotations

import asyncio

from tui.engine_client import EngineLoop


async def test_what_begins_while_others_end_is_waited_for() -> None:
    loop, done = EngineLoop(), []

    async def last_look() -> None:
        await asyncio.sleep(0.2)
        done.append("looked")

    async def channel() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            # Cancelled once more while it is waited for, it goes on alone.
            looking = asyncio.create_task(last_look())
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.shield(looking)

    running = loop.submit(channel)
    await loop.call(lambda: asyncio.sleep(0))
    await loop.stop()
    assert done == ["looked"]
    assert running.cancelled()
