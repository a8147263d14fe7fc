"""Asks who holds the ports that ranks are to listen on: `python -m worker.looks.ports IP:PORT…`.

Prints `ports`, in the order of the question: null when it is free, else `holder` in words, its `pid` and whether it is
an `orphan`: a process with a run's nonce.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..processes import NONCE_VARIABLE  # noqa: TID252  (on a node the package is `worker`)

_LISTEN = "0A"
_TOOL_TIMEOUT_S = 5.0
_LINUX = sys.platform.startswith("linux")


def look(ip: str, port: int) -> dict[str, Any] | None:
    """Who holds the port; None when a rank could listen on it."""
    if bindable(ip, port):
        return None
    pid = _linux_holder(port) if _LINUX else lsof_pid(_said("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-F", "p"))
    if pid is None:
        return {"holder": "a process that cannot be seen", "pid": None, "orphan": False}
    return {"holder": f"pid {pid} ({_command(pid)[:120] or '?'})", "pid": pid, "orphan": _has_nonce(pid)}


def bindable(ip: str, port: int) -> bool:
    """Whether a rank could listen there, the way MLX's ring does: with SO_REUSEADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
            # On Linux two sockets may be bound with SO_REUSEADDR; only one may listen.
            probe.listen(1)
        except OSError:
            return False
    return True


def listening_inodes(table: str, port: int) -> set[str]:
    """Socket inodes that listen on `port` in the text of a /proc/net/tcp table."""
    found = set()
    for row in table.splitlines()[1:]:
        fields = row.split()
        if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def lsof_pid(output: str) -> int | None:
    """The first pid in what `lsof -F p` printed."""
    match = re.search(r"^p(\d+)$", output, re.MULTILINE)
    return int(match[1]) if match else None


def _linux_holder(port: int) -> int | None:
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            inodes |= listening_inodes((Path("/proc/net") / name).read_text(), port)
        except OSError:
            continue
    targets = {f"socket:[{inode}]" for inode in inodes}
    for entry in Path("/proc").iterdir() if targets else ():
        if not entry.name.isdigit():
            continue
        try:
            # Path.readlink would take the target for a path; it is a name like "socket:[123]".
            if any(os.readlink(link) in targets for link in (entry / "fd").iterdir()):  # noqa: PTH115
                return int(entry.name)
        except OSError:
            continue
    return None


def _command(pid: int) -> str:
    if not _LINUX:
        return _said("ps", "-ww", "-o", "command=", "-p", str(pid)).strip()
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _has_nonce(pid: int) -> bool:
    if _LINUX:
        try:
            return f"{NONCE_VARIABLE}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
    return re.search(rf" {NONCE_VARIABLE}=", _said("ps", "-Eww", "-o", "command=", "-p", str(pid))) is not None


def _said(*argv: str) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _document(endpoints: list[str]) -> dict[str, Any]:
    return {"ports": [look(ip, int(port)) for ip, port in (endpoint.rsplit(":", 1) for endpoint in endpoints)]}


if __name__ == "__main__":
    print(json.dumps(_document(sys.argv[1:])))
