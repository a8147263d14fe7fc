"""Whether the system has been killing processes for want of memory: the only witness of an unexplained SIGKILL."""

from __future__ import annotations

import re
from pathlib import Path

_VMSTAT = Path("/proc/vmstat")
_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def memory_kills(vmstat: Path = _VMSTAT) -> int | None:
    """How many processes this system has killed for memory since it started; None where it does not tell (macOS)."""
    try:
        match = _OOM_KILLS.search(vmstat.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None
