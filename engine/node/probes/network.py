"""The `ports`, `free_ports`, `addresses`, `reach` and `listen` probes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.node.processes import command_of, linux_pids, linux_tcp, pids_of_runs, tool_output

_LISTEN = "0A"
_LINUX = sys.platform.startswith("linux")


def find_port_holder(ip: str, port: int) -> dict[str, Any] | None:
    """Who holds the port; None when a rank could listen on it. `orphan`: it is known to be a run's process."""
    if bindable(ip, port):
        return None
    listening = ("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-F", "p")
    pid = _linux_holder(port) if _LINUX else lsof_pid(tool_output(*listening))
    if pid is None:
        return {"holder": "a process that cannot be seen", "pid": None, "orphan": False}
    try:
        orphan = pid in pids_of_runs()
    except (OSError, ValueError, subprocess.SubprocessError):
        orphan = False
    return {"holder": f"pid {pid} ({(command_of(pid) or '?')[:120]})", "pid": pid, "orphan": orphan}


def _tcp_socket(ip: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM)


def bindable(ip: str, port: int) -> bool:
    """As MLX's ring listens on an address: with SO_REUSEADDR. `ip` "" is every address, and then without: on BSD
    (XNU, in_pcbbind) it would hide a socket that is bound to one of them."""
    with _tcp_socket(ip) as probe:
        if ip:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
            # On Linux two sockets may be bound with SO_REUSEADDR; only one may listen.
            probe.listen(1)
        except OSError:
            return False
    return True


def lsof_pid(output: str) -> int | None:
    """The first pid in what `lsof -F p` printed."""
    # A line that does not end has been cut off.
    match = re.search(r"^p([1-9]\d{0,9})\n", output, re.MULTILINE | re.ASCII)
    return int(match[1]) if match else None


def _linux_holder(port: int) -> int | None:
    targets = set[str]()
    with contextlib.suppress(OSError):
        rows = [row for row in linux_tcp() if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]
        targets = {f"socket:[{row[9]}]" for row in rows}
    for pid in linux_pids() if targets else ():
        with contextlib.suppress(OSError):
            # Path.readlink would take the target for a path; it is a name like "socket:[123]".
            if any(os.readlink(link) in targets for link in Path(f"/proc/{pid}/fd").iterdir()):  # noqa: PTH115
                return pid
    return None


_CONNECT_LIMIT_S = 3.0
_LOCAL_NETWORK = 65
"""EHOSTUNREACH on macOS, where it also stands for the Local Network privacy."""


def own(ip: str) -> str | None:
    """Why a rank could not listen on `ip`, or a server on that name; None when it could."""
    with _tcp_socket(ip) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            return f"{ip} is not an address of this machine ({error.strerror})"
    return None


def reach(ip: str, port: int) -> str | None:
    """Why a connection to `ip` cannot be made; None when it was."""
    try:
        with socket.create_connection((ip, port), timeout=_CONNECT_LIMIT_S):
            return None
    except TimeoutError:
        return f"no answer within {_CONNECT_LIMIT_S:g} s"
    except OSError as error:
        words = error.strerror or str(error)
        if sys.platform == "darwin" and error.errno in (_LOCAL_NETWORK, errno.EHOSTUNREACH):
            words += ": allow the Local Network in System Settings, Privacy & Security"
        return words


def probe_listen(seconds: str, *ips: str) -> Iterator[dict[str, Any]]:
    """`listening`, a free port of each address, on which connections are accepted for `seconds` or until stdin ends."""
    sockets = [socket.create_server((ip, 0)) for ip in ips]
    yield {"listening": [listener.getsockname()[1] for listener in sockets]}
    until = time.monotonic() + float(seconds)
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([*sockets, sys.stdin], [], [], left)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
            return
        for listener in sockets:
            if listener in ready:
                listener.accept()[0].close()


def _split(endpoint: str) -> tuple[str, int]:
    ip, _, port = endpoint.rpartition(":")
    return ip, int(port)


def probe_ports(*endpoints: str) -> dict[str, Any]:
    """`ports`, in the order of the arguments (IP:PORT): None when it is free, else its `holder`, `pid`, and whether it
    is an `orphan`: a process with a run's nonce."""
    return {"ports": [find_port_holder(*_split(endpoint)) for endpoint in endpoints]}


def probe_free_ports(request: str) -> dict[str, Any]:
    """`free`: those of the JSON request's `firsts` from which on all its `offsets` can be listened on now."""
    asked = json.loads(request)
    free = [first for first in asked["firsts"] if all(bindable("", first + offset) for offset in asked["offsets"])]
    return {"free": free}


def probe_addresses(*ips: str) -> dict[str, Any]:
    """`problems`, in the order of the arguments: None, or why no rank could listen there."""
    return {"problems": [own(ip) for ip in ips]}


def probe_reach(*endpoints: str) -> dict[str, Any]:
    """`problems`, in the order of the arguments (IP:PORT): None, or why it cannot be reached."""
    from concurrent.futures import ThreadPoolExecutor

    # All at once: one that does not answer takes _CONNECT_LIMIT_S.
    with ThreadPoolExecutor(max(1, len(endpoints))) as pool:
        return {"problems": list(pool.map(lambda endpoint: reach(*_split(endpoint)), endpoints))}
