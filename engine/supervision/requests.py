"""What a face asks of a run's supervisor: one JSON file per request, placed whole, taken once."""

from __future__ import annotations

import json
import uuid
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


def take_requests(run_dir: RunDir) -> list[Request]:
    """All requests that wait, oldest first; their files are gone afterwards. What is no request is dropped."""
    try:
        names = sorted(path.name for path in run_dir.requests.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    taken = []
    for name in names:
        path = run_dir.requests / name
        try:
            raw = json.loads(path.read_bytes())
            taken.append(
                Request(
                    request=str(raw["request"])[:100],
                    now=raw.get("now") is True,
                    by=str(raw.get("by", ""))[:100],
                    at=str(raw.get("at", ""))[:100],
                )
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass
        path.unlink(missing_ok=True)
    return taken
