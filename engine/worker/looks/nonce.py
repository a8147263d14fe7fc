"""Ends what carries a nonce: `python -m worker.looks.nonce NONCE SECONDS`.

Kills for at most SECONDS until nothing is left; prints `left`, the commands of what is.
"""

from __future__ import annotations

import json
import sys
import time

from ..processes import kill_with_nonce, with_nonce  # noqa: TID252  (on a node the package is `worker`)


def sweep(nonce: str, seconds: float) -> list[str]:
    """The commands of what outlived every KILL."""
    until = time.monotonic() + seconds
    while left := with_nonce(nonce):
        kill_with_nonce(nonce)
        if time.monotonic() > until:
            return [process.command for process in left]
        time.sleep(0.02)
    return []


if __name__ == "__main__":
    print(json.dumps({"left": sweep(sys.argv[1], float(sys.argv[2]))}))
