"""Holds the lease of a check's processes on this machine: `python -m worker.looks.lease NONCE SECONDS FOLDER…`.

Prints `{"held": true}`, and from then on hears any byte as a sign that the check goes on. At the word `end` it removes
the folders, kills everything that carries NONCE, prints `left`, the commands of what outlived that, and ends. It does
the same by itself when its stdin ends or says nothing for SECONDS: then the head is gone, or cannot be heard.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from ..processes import kill_with_nonce, with_nonce  # noqa: TID252  (on a node the package is `worker`)
from ..wire import CHECK_PREFIX  # noqa: TID252

_SWEEP_S = 3.0
_LOOK_S = 0.02
_QUIET_S = 0.1
_LATE_S = 1.5
"""For what a launcher that is not told of the end may still be starting."""


def sweep(nonce: str, quiet_s: float) -> list[str]:
    """Kill what carries the nonce until there has been nothing for `quiet_s`; the commands of what cannot be killed."""
    until = time.monotonic() + _SWEEP_S
    quiet_since: float | None = None
    while True:
        left = with_nonce(nonce)
        now = time.monotonic()
        if left:
            quiet_since = None
            if now > until:
                return [process.command[:200] for process in left]
            kill_with_nonce(nonce)
        elif quiet_since is None:
            quiet_since = now
        elif now - quiet_since >= quiet_s:
            return []
        time.sleep(_LOOK_S)


def hold(nonce: str, seconds: float, folders: list[Path]) -> None:
    """Until the word, the end of stdin, or silence."""
    told = _told(seconds)
    # First: what has not been started by now then finds nothing to start.
    for folder in folders:
        if folder.name.startswith(CHECK_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    left = sweep(nonce, _QUIET_S if told else _LATE_S)
    with contextlib.suppress(OSError):
        print(json.dumps({"left": left}), flush=True)


def _told(seconds: float) -> bool:
    """Whether the end has come as it should."""
    heard = b""
    while b"end" not in heard:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
        block = os.read(sys.stdin.fileno(), 4096) if ready else b""
        if not block:
            return False
        heard = (heard + block)[-8:]
    return True


if __name__ == "__main__":
    # Only its own end of the bargain ends it.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print(json.dumps({"held": True}), flush=True)
    hold(sys.argv[1], float(sys.argv[2]), [Path(folder) for folder in sys.argv[3:]])
