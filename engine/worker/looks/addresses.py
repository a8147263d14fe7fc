"""Whether this node has its addresses, and whether it reaches the others on theirs.

`python -m worker.looks.addresses own IP…` prints `own`: IP → null, or why no rank could listen there.
`python -m worker.looks.addresses listen SECONDS IP…` prints `listening`: IP → port, and accepts for that long.
`python -m worker.looks.addresses reach IP:PORT…` prints `reach`: IP:PORT → null, or why it cannot be reached.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import sys
import time

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
    ports = {ip: listener.getsockname()[1] for ip, listener in zip(addresses, sockets)}  # noqa: B905
    print(json.dumps({"listening": ports}), flush=True)
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([*sockets, sys.stdin], [], [], left)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
            return
        for listener in sockets:
            if listener in ready:
                listener.accept()[0].close()


def main(arguments: list[str]) -> None:
    match arguments[0]:
        case "own":
            print(json.dumps({"own": {ip: own(ip) for ip in arguments[1:]}}))
        case "listen":
            listen(float(arguments[1]), arguments[2:])
        case "reach":
            pairs = [(endpoint, *endpoint.rsplit(":", 1)) for endpoint in arguments[1:]]
            print(json.dumps({"reach": {endpoint: reach(ip, int(port)) for endpoint, ip, port in pairs}}))


if __name__ == "__main__":
    main(sys.argv[1:])
