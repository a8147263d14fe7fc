"""Runs on the node, with the node's own python (any from 3.9) and the standard library, its text coming over stdin.

    python - '{"firsts": [21000, 22000], "offsets": [0, 1]}'

Prints one JSON object: `free`, the firsts from which on every one of the offsets could be listened on now.
"""

from __future__ import annotations

import json
import socket
import sys


def bindable(ip: str, port: int) -> bool:
    """Whether a rank could listen on `ip` ("" is every address), the way MLX's ring does: with SO_REUSEADDR."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ip, port))
            # On Linux two sockets may be bound with SO_REUSEADDR; only one may listen.
            probe.listen(1)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    free = [first for first in asked["firsts"] if all(bindable("", first + offset) for offset in asked["offsets"])]
    print(json.dumps({"free": free}))
