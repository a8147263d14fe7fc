"""A rank's log on the node: every byte its program prints, pumped from one pipe into one file.

A full disk never stops the program: what cannot be stored is counted and dropped, and a marker line says so in the log
once there is room again.
"""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path

_CHUNK_BYTES = 65_536


class RankLog:
    """The append-only file. Never raises for what the disk does."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._unsaid = 0
        self._marker = b""
        self.dropped_bytes = 0

    def append(self, data: bytes) -> None:
        """Store `data`, or as much of its beginning as there is room for."""
        lost = len(data) - self._store(data) if self._say_gap() else len(data)
        self._unsaid += lost
        self.dropped_bytes += lost

    def close(self) -> None:
        self._say_gap()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def size(self) -> int:
        """Bytes in the file."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def _say_gap(self) -> bool:
        """Write the marker of an earlier gap; False while there is no room even for that."""
        while self._unsaid or self._marker:
            if not self._marker:
                marker = f"\n[flightdeck] {self._unsaid} bytes of output are missing here: disk full\n".encode()
                stored = self._store(marker)
                # Until its first byte is stored, the marker's number may still grow.
                if not stored:
                    return False
                self._unsaid = 0
                self._marker = marker[stored:]
            else:
                self._marker = self._marker[self._store(self._marker) :]
            if self._marker:
                return False
        return True

    def _store(self, data: bytes) -> int:
        """Append what fits and return how many bytes that was."""
        stored = 0
        view = memoryview(data)
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            while stored < len(data):
                stored += os.write(self._descriptor, view[stored:])
        except OSError:
            pass
        return stored


class Pump:
    """The thread that moves bytes from the program's pipe to its log until the pipe's end, or until told to finish."""

    def __init__(self, source: int, log: RankLog) -> None:
        self._source = source
        self._log = log
        self._wake_read, self._wake_write = os.pipe()
        self._drain_deadline = float("inf")
        os.set_blocking(source, False)
        self._thread = threading.Thread(target=self._run, name="pump", daemon=True)
        self._thread.start()

    def finish(self, within_s: float) -> bool:
        """Take what is in the pipe now, but wait no longer than `within_s` seconds for somebody who still holds it.

        False when the log's disk did not take it in that time.
        """
        self._drain_deadline = time.monotonic() + within_s
        os.write(self._wake_write, b".")
        self._thread.join(within_s + 1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # poll, not select: a log of many open files must not meet select's limit of 1,024 descriptors.
        waiting = select.poll()
        waiting.register(self._source, select.POLLIN)
        waiting.register(self._wake_read, select.POLLIN)
        while time.monotonic() < self._drain_deadline:
            waiting.poll()
            try:
                chunk = os.read(self._source, _CHUNK_BYTES)
            except BlockingIOError:
                if self._drain_deadline != float("inf"):
                    break
                continue
            if not chunk:
                break
            self._log.append(chunk)
        os.close(self._source)
        self._log.close()
