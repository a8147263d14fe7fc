"""Keeps the store up to date beside the watch: another writer's lock, or a slow disk, must not hold up a beat."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engine.errors import StateError
from engine.models import RunRecord

Put = Callable[[RunRecord], object]


class StoreWriter:
    """Puts a run's newest record, in one thread of its own; a record that a newer one has overtaken is left out."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._newest: RunRecord | None = None
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._problem: str | None = None

    def put(self, record: RunRecord) -> None:
        """Have `record` put; returns at once."""
        with self._lock:
            idle = self._newest is None
            self._newest = record
        if idle:
            self._thread.submit(self._drain)

    def problem(self) -> str | None:
        """Why the store could not be written, once for each time that it happened."""
        with self._lock:
            problem, self._problem = self._problem, None
        return problem

    def close(self) -> None:
        """Returns when the newest record has been put, or refused."""
        self._thread.shutdown(wait=True)

    def _drain(self) -> None:
        with self._lock:
            record, self._newest = self._newest, None
        if record is None:
            return
        try:
            self._put(record)
        except (StateError, OSError) as error:
            with self._lock:
                self._problem = str(error)
