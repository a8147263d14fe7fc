"""The `load` probe: other load on this node.

It reports `processes`, the busiest of those that are older than the probes themselves: `pid`, `command`, `cores` (how
many it keeps busy), `rss_bytes`, `run` (it belongs to a Flight Deck run); and the system's own output about the GPU and
sleep: `nvidia`, `ioreg`, `assertions`, `energy`, and whether there is a `caffeinate`. Nothing of it needs root."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.node.probes import mac_gpu_statistics
from engine.node.processes import command_of, linux_stats, own_list, pids_of_runs, ps_time_s, run_tool, tool_output

BUSY_CORES = 0.8
BUSY_MEMORY = 0.10
"""Fraction of all memory."""
_SAMPLE_S = 0.4
_OLDER_S = 30.0
"""Younger processes were started by the checks themselves, or end soon."""
UPDATES = "/Library/Preferences/com.apple.SoftwareUpdate"
ENERGY = (("defaults", "read", UPDATES), ("pmset", "-g", "custom"), ("pmset", "-g", "sched"))
_MOST = 8
_TEXT_LIMIT = 16_384
_LINUX = sys.platform.startswith("linux")


def probe_load() -> dict[str, Any]:
    """Raises OSError, ValueError, subprocess.SubprocessError where the processes or the memory are not known."""
    processes = _linux_processes() if _LINUX else _ps_processes(own_list("ps", "-axww", "-o", PS_COLUMNS))
    memory = _memory_bytes()
    busy = [one for one in processes if one["cores"] >= BUSY_CORES or one["rss_bytes"] >= BUSY_MEMORY * memory]
    busy.sort(key=lambda process: (-process["cores"], -process["rss_bytes"], process["pid"]))
    runs = pids_of_runs()
    report = {"processes": [{**process, "run": process["pid"] in runs} for process in busy[:_MOST]]}
    return report | {"memory_bytes": memory} | (_linux_output() if _LINUX else _mac_output())


PS_COLUMNS = "pid=,pcpu=,rss=,etime=,command="
_ROW = re.compile(r"\s*(\d{1,10})\s+(\d{1,6}(?:\.\d+)?)\s+(\d{1,12})\s+([\d:.-]+)(?:\s+(\S.*)?)?", re.ASCII)
"""A program may have cleared its own command."""


def _ps_processes(rows: list[str]) -> list[dict[str, Any]]:
    """From `ps -o` with PS_COLUMNS; macOS's pcpu is a mean over the last minute. Raises ValueError."""
    busy = []
    for row in rows:
        if (match := _ROW.fullmatch(row)) is None:
            raise ValueError(f"ps printed {row[:80]!r}")
        pid, share, rss, elapsed, command = match.groups("?")
        if ps_time_s(elapsed) >= _OLDER_S:
            busy.append(
                {"pid": int(pid), "command": command[:200], "cores": float(share) / 100, "rss_bytes": int(rss) * 1024}
            )
    return busy


def _linux_processes() -> list[dict[str, Any]]:
    first, begun = _ticks(), time.monotonic()
    time.sleep(_SAMPLE_S)
    second, passed = _ticks(), time.monotonic() - begun
    hertz, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    busy = []
    for pid, (ticks, pages, started) in second.items():
        if pid not in first or first[pid][2] != started or uptime - started / hertz < _OLDER_S:
            continue
        command = command_of(pid)
        if command is not None:
            cores = (ticks - first[pid][0]) / hertz / passed
            busy.append({"pid": pid, "command": command[:200], "cores": cores, "rss_bytes": pages * page})
    return busy


def _ticks() -> dict[int, tuple[int, int, int]]:
    """Pid → (ticks of all its threads, pages in memory, ticks from boot to its start)."""
    return {pid: (int(stat[11]) + int(stat[12]), int(stat[21]), int(stat[19])) for pid, stat in linux_stats().items()}


def _memory_bytes() -> int:
    if _LINUX:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    output = tool_output("sysctl", "-n", "hw.memsize")
    if not re.fullmatch(r"[1-9]\d{8,17}\n", output, re.ASCII):
        raise ValueError(f"sysctl printed {output[:80]!r} for hw.memsize")
    return int(output)


def _limits() -> dict[str, Any]:
    """`shm_bytes`, the size of the shared memory, and `memlock_bytes`, what a process may lock for InfiniBand: left out
    where there is no limit, or nothing that it limits."""
    limits: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        shared = os.statvfs("/dev/shm")
        limits["shm_bytes"] = shared.f_blocks * shared.f_frsize
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if _LINUX else resource.RLIM_INFINITY
    if locked != resource.RLIM_INFINITY and Path("/dev/infiniband").is_dir():
        limits["memlock_bytes"] = locked
    return limits


def _linux_output() -> dict[str, Any]:
    code, output = 0, ""
    if shutil.which("nvidia-smi") is not None:
        columns = "--query-compute-apps=pid,used_memory,process_name"
        try:
            code, output = run_tool("nvidia-smi", columns, "--format=csv,noheader,nounits", limit_s=5.0)
        except (OSError, subprocess.SubprocessError):
            code = 1
    return _limits() | {"nvidia": output if code == 0 else None}


def _mac_output() -> dict[str, Any]:
    return {
        "ioreg": mac_gpu_statistics(_TEXT_LIMIT),
        "assertions": tool_output("pmset", "-g", "assertions"),
        "energy": "".join(tool_output(*command) for command in ENERGY)[:_TEXT_LIMIT],
        "caffeinate": os.access("/usr/bin/caffeinate", os.X_OK),
    }
