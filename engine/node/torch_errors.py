"""The exception of a PyTorch program, from the error file that torchelastic's `record` leaves
(torch/distributed/elastic/multiprocessing/errors)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.protocol.attempt import NodeFiles, open_regular

_MOST_BYTES = 1 << 20
_TEXT, _TRACEBACK = 2000, 20_000
"""Characters that are kept."""


def reported_exception(files: NodeFiles, rank: int) -> dict[str, Any] | None:
    """The fields of the `failure` event of a rank whose program left an error file; None without one that can be read.
    Of an elastic job's workers, the first failure of the last round."""
    rounds = files.workers(rank).glob("*/attempt_*")
    last = max(rounds, key=lambda folder: (len(folder.name), folder.name), default=None)
    found = [_read(path) for path in ([files.error(rank)] if last is None else last.glob("*/error.json"))]
    known = [each for each in found if each is not None]
    return min(known, key=lambda each: float(each["raised_at"]), default=None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with open_regular(path) as file:
            message = json.loads(file.read(_MOST_BYTES))["message"]
        # An exception, or the text of what a handler in C++ has left.
        text = message["message"] if isinstance(message, dict) else message
        extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
        kind, _, rest = str(text).partition(": ")
        named = kind.replace(".", "").isidentifier() and bool(rest)
        return {
            "error_type": kind.rpartition(".")[2] if named else "Error",
            "message": (rest if named else str(text))[:_TEXT],
            "traceback": str(extra.get("py_callstack", ""))[-_TRACEBACK:],
            "raised_at": float(extra.get("timestamp", 0)),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
