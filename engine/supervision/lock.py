"""The one supervisor of a run: a lock on a file of the run's directory, held by the supervisor for life.

The kernel drops it with the process, however that ends, so it can neither go stale nor be held twice.
"""

from __future__ import annotations

import fcntl
import os

from engine.runs.layout import RunDir

_NAME = "supervisor.lock"


def take(run_dir: RunDir) -> int | None:
    """Take the lock; its open descriptor, or None when another supervisor lives. A child has it only when given."""
    descriptor = os.open(run_dir.path / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
