"""Files as no program of ours writes them: what is no regular file, and damaged bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

IRREGULAR = ("fifo", "directory", "socket", "device")


def make_irregular(path: Path, kind: str) -> None:
    """Put something else in the place of a file: one of IRREGULAR, or "bytes" that are no UTF-8."""
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "socket":
            folder = os.open(path.parent, os.O_RDONLY)
            with socket.socket(socket.AF_UNIX) as listening:
                # The path itself may be longer than an address.
                listening.bind(f"/proc/self/fd/{folder}/{path.name}")
            os.close(folder)
        case "device":
            path.symlink_to("/dev/zero")
        case "bytes":
            path.write_bytes(b"\xff\xfe\0not text\n")


@contextlib.contextmanager
def stalled(path: Path) -> Iterator[Path]:
    """`path` as on a disk that stalls: whoever opens it waits, for the 45 s of /proc/sys/fs/lease-break-time."""
    with path.open("r+b") as file:
        # By default the one who waits would be announced by SIGIO, which ends us.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield path
