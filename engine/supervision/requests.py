"""What a face asks of a run's supervisor: one JSON file per request, placed whole, taken once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.runs.layout import RunDir
from engine.worker.wire import write_atomic

ABORT = "abort"


@dataclass(frozen=True)
class Request:
    """A wish of somebody's, by name."""

    request: str
    now: bool = False
    """Leave out the cooperative stop."""
    by: str = ""
    at: str = ""


def place_request(run_dir: RunDir, request: str, *, now: bool = False, by: str = "") -> Path:
    """Put a request where the supervisor finds it within a tenth of a second; the file's path."""
    run_dir.requests.mkdir(mode=0o700, exist_ok=True)
    at = datetime.now(UTC).isoformat()
    path = run_dir.requests / f"{at.replace(':', '')}-{uuid.uuid4().hex[:8]}.json"
    write_atomic(path, json.dumps({"request": request, "now": now, "by": by, "at": at}))
    return path


def take_requests(run_dir: RunDir) -> Iterator[Request]:
    """All requests that wait, oldest first. Each one's file goes when the next is asked for: whoever is killed before
    it has noted a request leaves it for the next. What is no request is dropped."""
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


def _read(path: Path) -> Request | None:
    try:
        raw = json.loads(path.read_bytes())
        return Request(
            request=str(raw["request"])[:100],
            now=raw.get("now") is True,
            by=str(raw.get("by", ""))[:100],
            at=str(raw.get("at", ""))[:100],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
