"""How the head and an agent talk over one pair of pipes: a line of JSON, then as many raw bytes as it says.

Every message is one object with a `kind`; `bytes`, where it is there, is the length of what follows the line. From the
head:

    watch    nonce, ranks: the host's own ranks, known {rank: identity}: as the head has them; said first
    beat     n, heard: passed on to the ranks' keepers, answered by a pong; `heard` is the last beat
             that had been said when the head last heard anything
    word     rank, word ("stop", "rescue", "end"): for one keeper
    send     file, until, and at first `from`: send what is in it from there on as it comes, up to offset `until`
    kill     KILL to the groups of the ranks' programs
    list     n, kill: everything on this host with the nonce; with `kill`, each is killed after it was listed, and no
             rank of the attempt starts any more
    words    n, rank: the last words of a rank
    ports    n, ports: who holds them

From the agent:

    hello    boot_id, memory_kills, version: the answer to watch
    pong     n, at (wall clock of the node, seconds since the epoch)
    started  rank, identity
    ended    rank, record (None: its keeper has vanished), words
    data     file, from, end (whether it was read to its end), then the bytes
    trouble  file, problem: it cannot be read
    listed   n, left [[pid, command]], sizes {file: bytes}
    words    n, rank, words
    ports    n, held {port: who, in words}, of those that somebody holds
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

VERSION = 1
LONGEST_LINE = 4 << 20
MOST_BYTES = 4 << 20

Message = dict[str, Any]


def encode(message: Message, body: bytes = b"") -> bytes:
    """One frame."""
    if body:
        message = {**message, "bytes": len(body)}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n" + body


class Decoder:
    """Takes a stream apart, however it has been cut into pieces."""

    def __init__(self) -> None:
        self._waiting = bytearray()
        self._message: Message | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """The messages that `data` completes, with their bytes. Raises ValueError for what is no such stream."""
        self._waiting += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> tuple[Message, bytes] | None:
        if self._message is None:
            end = self._waiting.find(b"\n")
            if end < 0:
                if len(self._waiting) > LONGEST_LINE:
                    raise ValueError("a line without an end")
                return None
            self._message = _parsed(bytes(self._waiting[:end]))
            del self._waiting[: end + 1]
        size = self._message.get("bytes", 0)
        if len(self._waiting) < size:
            return None
        message, body = self._message, bytes(self._waiting[:size])
        del self._waiting[:size]
        self._message = None
        return message, body


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"no message: {line[:200]!r}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ValueError(f"no message: {line[:200]!r}")
    size = message.get("bytes", 0)
    if not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise ValueError(f"{size!r} bytes cannot follow a message")
    return message
