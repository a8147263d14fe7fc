"""Awaiting a condition of another process, with a limit that only a broken test meets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Return as soon as `condition` holds; AssertionError after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.01)


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """`wait_until` beside what else the event loop does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.005)
