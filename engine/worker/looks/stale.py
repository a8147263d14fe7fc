"""Looks for what earlier attempts have left running: `python -m worker.looks.stale`.

Prints `stale`: for each nonce whose processes nobody watches any more, their `pids` and the first one's `command`. A
keeper watches its rank, and its lease ends both; mlx.launch and the ranks of a preflight have limits of their own. What
a calibration has started is watched by the lease that was taken for its nonce, and is stale without it.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

from ..processes import with_any_nonce, with_variables  # noqa: TID252  (on a node the package is `worker`)

WATCHED = ("worker.keeper", "mlx.launch", "worker.all_sum")
_LEASE = re.compile(r"worker\.looks\.lease (\S+)")
_AGAIN_S = 0.3


def stale() -> list[dict[str, Any]]:
    """One entry for each nonce. What is gone at a second look was about to leave, or to come."""
    first = _unwatched()
    if not first:
        return []
    time.sleep(_AGAIN_S)
    second = _unwatched()
    return [
        {"pids": sorted(processes), "command": processes[min(processes)][:200]}
        for nonce, processes in second.items()
        if nonce in first
    ]


def _unwatched() -> dict[str, dict[int, str]]:
    """Nonce → pid → command."""
    found = {
        nonce: {process.pid: process.command for process in processes}
        for nonce, processes in with_any_nonce().items()
        if not any(word in process.command for process in processes for word in WATCHED)
    }
    leased = _leased() if found else set()
    return {nonce: processes for nonce, processes in found.items() if nonce not in leased}


def _leased() -> set[str]:
    """The nonces that a lease is held for on this machine. It does not carry the nonce itself: it would end itself."""
    everybody = with_variables({})
    return {match[1] for process in everybody if (match := _LEASE.search(process.command)) is not None}


if __name__ == "__main__":
    print(json.dumps({"stale": stale()}))
