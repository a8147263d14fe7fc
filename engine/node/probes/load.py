"""Other load on this node: `python -m engine.node.probes.load`.

Prints `processes`, the busiest of those that are older than the probes themselves: `pid`, `command`, `cores` (how many
it keeps busy), `rss_bytes`, `run` (it belongs to a Flight Deck run), `ours` (of the same user); and the system's
own output about the GPU and sleep: `nvidia`, `ioreg`, `assertions`, and whether there is a `caffeinate`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.node.processes import with_any_nonce

BUSY_CORES = 0.8
BUSY_MEMORY = 0.10
"""Fraction of all memory."""
_SAMPLE_S = 0.4
_OLDER_S = 30.0
"""Younger processes were started by the checks themselves, or end soon."""
_MOST = 8
_TOOL_TIMEOUT_S = 4.0
_TEXT_LIMIT = 16_384
_LINUX = sys.platform.startswith("linux")
_PROC = Path("/proc")


def probe_load() -> dict[str, Any]:
    """Everything of the above. Nothing here needs root."""
    processes = _linux_processes() if _LINUX else _ps_processes(_printed("ps", "-axww", "-o", PS_COLUMNS), os.getuid())
    memory = _memory_bytes()
    busy = [
        process
        for process in processes
        if process["cores"] >= BUSY_CORES or (memory and process["rss_bytes"] >= BUSY_MEMORY * memory)
    ]
    busy.sort(key=lambda process: (-process["cores"], -process["rss_bytes"], process["pid"]))
    runs = {process.pid for found in with_any_nonce().values() for process in found}
    report = {"processes": [{**process, "run": process["pid"] in runs} for process in busy[:_MOST]]}
    return report | {"memory_bytes": memory} | (_linux_output() if _LINUX else _mac_output())


PS_COLUMNS = "pid=,uid=,pcpu=,rss=,etime=,command="


def _ps_processes(text: str, user: int) -> list[dict[str, Any]]:
    """Processes in the output of `ps -o` with PS_COLUMNS; macOS's pcpu is a mean over the last minute."""
    found = []
    for line in text.splitlines():
        words = line.split(None, 5)
        if len(words) < 6 or not (words[0] + words[1] + words[3]).isdigit() or elapsed_s(words[4]) < _OLDER_S:
            continue
        pid, owner, share, rss, _, command = words
        found.append(
            {
                "pid": int(pid),
                "command": command[:200],
                # Decimal commas of the user's locale.
                "cores": float(share.replace(",", ".")) / 100,
                "rss_bytes": int(rss) * 1024,
                "ours": int(owner) == user,
            }
        )
    return found


def elapsed_s(etime: str) -> float:
    """`[[dd-]hh:]mm:ss` of ps as seconds."""
    days, _, clock = etime.rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return seconds + 86_400 * int(days or 0)


def _linux_processes() -> list[dict[str, Any]]:
    first, begun = _ticks(), time.monotonic()
    time.sleep(_SAMPLE_S)
    second, passed = _ticks(), time.monotonic() - begun
    hertz, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    uptime = float((_PROC / "uptime").read_text().split()[0])
    found = []
    for pid, (ticks, pages, started) in second.items():
        if pid not in first or first[pid][2] != started or uptime - started / hertz < _OLDER_S:
            continue
        try:
            command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            ours = (_PROC / str(pid)).stat().st_uid == os.getuid()
        except OSError:
            continue
        cores = (ticks - first[pid][0]) / hertz / passed
        found.append({"pid": pid, "command": command[:200], "cores": cores, "rss_bytes": pages * page, "ours": ours})
    return found


def _ticks() -> dict[int, tuple[int, int, int]]:
    """Pid → (ticks of all its threads, pages in memory, ticks from boot to its start)."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_bytes()
            except OSError:
                continue
            # The command's name may hold spaces and brackets: fields are counted from the last bracket.
            fields = stat[stat.rindex(b")") + 2 :].split()
            found[int(entry.name)] = (int(fields[11]) + int(fields[12]), int(fields[21]), int(fields[19]))
    return found


def _memory_bytes() -> int:
    if _LINUX:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    output = _printed("sysctl", "-n", "hw.memsize").strip()
    return int(output) if output.isdigit() else 0


def _linux_output() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"nvidia": ""}
    columns = "--query-compute-apps=pid,used_memory,process_name"
    return {"nvidia": _printed("nvidia-smi", columns, "--format=csv,noheader,nounits")}


def _mac_output() -> dict[str, Any]:
    statistics = _printed("/usr/sbin/ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
    return {
        "ioreg": "\n".join(line for line in statistics.splitlines() if "PerformanceStatistics" in line)[:_TEXT_LIMIT],
        "assertions": _printed("pmset", "-g", "assertions"),
        "caffeinate": os.access("/usr/bin/caffeinate", os.X_OK),
    }


def _printed(*argv: str) -> str:
    try:
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(argv, capture_output=True, timeout=_TOOL_TIMEOUT_S, env=environment, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")[: _TEXT_LIMIT * 16]
