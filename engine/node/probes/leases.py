"""The `lease`, `stale` and `occupied` probes: what ends a check's processes when its head is gone, and what is left
running, or runs."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.node.processes import NONCE_VARIABLE, kill_with_nonce, with_any_nonce, with_nonce, with_variables
from engine.protocol.attempt import CHECK_PREFIX

_SWEEP_LIMIT_S = 3.0
_SWEEP_INTERVAL_S = 0.02
_QUIET_S = 0.1
_LATE_S = 1.5
"""For what a launcher that does not know of the end may still be starting."""


def sweep(nonce: str, quiet_s: float) -> list[str]:
    """Kill what carries the nonce until there has been nothing for `quiet_s`; the commands of what cannot be killed."""
    until = time.monotonic() + _SWEEP_LIMIT_S
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
        time.sleep(_SWEEP_INTERVAL_S)


def _await_end(seconds: float) -> bool:
    """True when the head has released the lease; False when it is gone."""
    received = b""
    while b"end" not in received:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], seconds)
        block = os.read(sys.stdin.fileno(), 4096) if ready else b""
        if not block:
            return False
        received = (received + block)[-8:]
    return True


_MARKED_CHILD = "engine.node.probes stale"
"""In the command of the child that is to be seen."""
WATCHED = ("engine.node.keeper", "mlx.launch", "engine.trainer.allreduce_check", _MARKED_CHILD)
_SEEN_WITHIN_S = 5.0
_LEASE = re.compile(r"engine\.node\.probes lease (\S+)")
_AGAIN_S = 0.3


def probe_stale() -> dict[str, Any]:
    """`stale`: for each nonce whose processes nobody watches any more, their `pids` and the first one's `command`;
    `marked_seen`: a child that was just started with a nonce is found by it."""
    marked_seen = _sees_marked_child()
    first = _unwatched()
    if not first:
        return {"stale": [], "marked_seen": marked_seen}
    # What is gone by then was about to leave, or to come.
    time.sleep(_AGAIN_S)
    groups = [processes for nonce, processes in _unwatched().items() if nonce in first]
    stale = [{"pids": sorted(group), "command": group[min(group)][:200]} for group in groups]
    return {"stale": stale, "marked_seen": marked_seen}


def probe_occupied() -> dict[str, Any]:
    """`nonces`: those of the attempts of runs (`<nonce of the run>.<attempt>`) of which there are processes here,
    whichever machine has started them."""
    return {"nonces": sorted(nonce for nonce in with_any_nonce() if "." in nonce)}


def _sees_marked_child() -> bool:
    nonce = f"check-{uuid.uuid4().hex}"
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "input()", _MARKED_CHILD],
        env={**os.environ, NONCE_VARIABLE: nonce},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + _SEEN_WITHIN_S
    try:
        while not (seen := any(process.pid == child.pid for process in with_nonce(nonce))) and time.monotonic() < until:
            time.sleep(_SWEEP_INTERVAL_S)
        return seen
    finally:
        child.kill()
        child.communicate()


def _unwatched() -> dict[str, dict[int, str]]:
    """Nonce → pid → command."""
    unwatched = {
        nonce: {process.pid: process.command for process in processes}
        for nonce, processes in with_any_nonce().items()
        if not any(name in process.command for process in processes for name in WATCHED)
    }
    # A lease does not carry its nonce: it would end itself.
    everybody = with_variables({}) if unwatched else ()
    leased = {match[1] for process in everybody if (match := _LEASE.search(process.command)) is not None}
    return {nonce: processes for nonce, processes in unwatched.items() if nonce not in leased}


def probe_lease(nonce: str, seconds: str, *folders: str) -> Iterator[dict[str, Any]]:
    """Hold the lease of a check's processes, `held`, until stdin brings "end", ends, or is silent for `seconds` (the
    head is gone). Then remove the folders, kill what carries the nonce, and report `left`: the commands of what
    outlived that."""
    # Nothing but its stdin ends it.
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    yield {"held": True}
    released = _await_end(float(seconds))
    # First: what has not been started by now then finds nothing to start.
    for folder in folders:
        if Path(folder).name.startswith(CHECK_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    yield {"left": sweep(nonce, _QUIET_S if released else _LATE_S)}
