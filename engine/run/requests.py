"""Requests to a run's supervisor, one JSON file each, placed whole and taken once; and work that an abort request
cancels.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from engine.protocol.attempt import write_atomic
from engine.run.events import RequestReceived
from engine.store.layout import RunDir


def place_request(run_dir: RunDir, request: str, *, now: bool = False, by: str = "") -> Path:
    """Put a request where the supervisor finds it within a tenth of a second; the file's path."""
    run_dir.requests.mkdir(mode=0o700, exist_ok=True)
    at = datetime.now(UTC).isoformat()
    path = run_dir.requests / f"{at.replace(':', '')}-{uuid.uuid4().hex[:8]}.json"
    write_atomic(path, json.dumps({"request": request, "now": now, "by": by, "requested_at": at}))
    return path


def take_requests(run_dir: RunDir) -> Iterator[RequestReceived]:
    """All waiting requests, oldest first. Each one's file goes when the next is taken: a supervisor that is killed
    before it has recorded a request leaves it for the next. A file that is no request is dropped."""
    try:
        names = sorted(path.name for path in run_dir.requests.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return
    for name in names:
        path = run_dir.requests / name
        request = _read(path)
        if request is not None:
            yield request
        path.unlink(missing_ok=True)


def _read(path: Path) -> RequestReceived | None:
    try:
        raw = json.loads(path.read_bytes())
        return RequestReceived(
            request=str(raw["request"])[:100],
            now=raw.get("now") is True,
            by=str(raw.get("by", ""))[:100],
            requested_at=str(raw.get("requested_at", ""))[:100],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


TICK_S = 0.1

AbortSource = Callable[[], RequestReceived | None]
"""The requested abort, if any."""
T = TypeVar("T")


class Aborted(Exception):
    """An abort was requested while something was awaited; that has been cancelled."""


async def until_abort(work: Coroutine[Any, Any, T], abort: AbortSource) -> T:
    """The result of `work`. Raises Aborted when an abort is requested; `work` has then been cancelled."""
    task = asyncio.create_task(work)
    while not task.done():
        if abort() is not None:
            task.cancel()
            await asyncio.wait({task})
            raise Aborted
        await asyncio.wait({task}, timeout=TICK_S)
    return task.result()
