"""A process beside the keeper that ends the rank's group when the keeper itself is killed.

The two share a pipe: its end without a farewell means that nobody is left to stop the program. Works alike on Linux and
macOS, and reaches the whole group, which a parent-death signal does not.
"""

from __future__ import annotations

import os
import signal

from .detach import close_all_but
from .processes import kill_group

_FAREWELL = b"0\n"


class Guardian:
    """The keeper's side. Made first of all in the keeper's life: the guardian inherits what is open."""

    def __init__(self) -> None:
        read_end, self._write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            # Whoever waits for the end of another pipe must not wait for the guardian.
            close_all_but(read_end)
            _watch(read_end)
        os.close(read_end)

    def guard(self, pgid: int) -> None:
        """From now on, process group `pgid` does not outlive the keeper."""
        self._tell(f"{pgid}\n".encode())

    def dismiss(self) -> None:
        """The group is gone and the keeper about to leave."""
        self._tell(_FAREWELL)
        os.close(self._write_end)
        os.waitpid(self.pid, 0)

    def _tell(self, word: bytes) -> None:
        try:
            os.write(self._write_end, word)
        except BrokenPipeError:
            # Somebody killed the guardian: the keeper does its own work without it.
            return


def _watch(pipe: int) -> None:
    """Read group ids until the pipe ends, then kill the last one named. Never returns."""
    try:
        os.setsid()
        for ignored in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
        heard = b""
        while chunk := os.read(pipe, 64):
            heard += chunk
        pgid = int(heard.split()[-1]) if heard.split() else 0
        if pgid:
            kill_group(pgid, signal.SIGKILL)
    finally:
        os._exit(0)
