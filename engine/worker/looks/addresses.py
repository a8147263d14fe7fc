"""Whether this node has its addresses, and whether it reaches the others on theirs.

`python -m worker.looks.addresses own IP…` prints `problems`: null, or why no rank could listen there.
`python -m worker.looks.addresses listen SECONDS IP…` prints `listening`, a port on each, and accepts for that long.
`python -m worker.looks.addresses reach IP:PORT…` prints `problems`: null, or why it cannot be reached.
All in the order of the question.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

_CONNECT_LIMIT_S = 3.0
_LOCAL_NETWORK = 65
"""EHOSTUNREACH on macOS, where it also stands for the Local Network privacy."""


def own(ip: str) -> str | None:
    """Why a rank could not listen on `ip`; None when it could."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
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


def listen(seconds: float, addresses: list[str]) -> None:
    """Listen on a free port of each address, say which, and accept until the time is over or stdin ends."""
    sockets = [socket.create_server((ip, 0)) for ip in addresses]
    print(json.dumps({"listening": [listener.getsockname()[1] for listener in sockets]}), flush=True)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([*sockets, sys.stdin], [], [], left)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
            return
        for listener in sockets:
            if listener in ready:
                listener.accept()[0].close()


def reach_all(endpoints: list[str]) -> list[str | None]:
    """`reach` for each IP:PORT, all at once: one that does not answer takes its time."""
    with ThreadPoolExecutor(max(1, len(endpoints))) as pool:
        return list(pool.map(lambda endpoint: reach(*_split(endpoint)), endpoints))


def _split(endpoint: str) -> tuple[str, int]:
    ip, _, port = endpoint.rpartition(":")
    return ip, int(port)


def main(arguments: list[str]) -> None:
    verb, *rest = arguments
    if verb == "own":
        print(json.dumps({"problems": [own(ip) for ip in rest]}))
    elif verb == "listen":
        listen(float(rest[0]), rest[1:])
    elif verb == "reach":
        print(json.dumps({"problems": reach_all(rest)}))


if __name__ == "__main__":
    main(sys.argv[1:])
