"""Schedules full garbage collections for moments when no key is pressed: with 64 nodes connected one holds the loop for
up to 90 ms, and the interpreter would run one every second.
"""

from __future__ import annotations

import gc
from time import monotonic
from typing import Final

QUIET_S: Final = 2.0
"""Without a key press before a full collection."""
EVERY_S: Final = 30.0
"""Between two full collections."""
AT_LATEST_S: Final = 300.0
"""A full collection runs even between key presses."""
_NEVER: Final = 1_000_000
"""Collections of the middle generation before the interpreter does a full one by itself."""


class GcScheduler:
    """Takes the full collections over from the interpreter; the small ones stay its own."""

    def __init__(self) -> None:
        self._typed_at = monotonic()
        self._collected_at: float | None = None
        self._theirs = gc.get_threshold()

    def start(self) -> None:
        """Leave what has been imported by now out of all later collections."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._theirs[:2], _NEVER)
        self._collected_at = monotonic()

    def key_pressed(self) -> None:
        self._typed_at = monotonic()

    def tick(self) -> None:
        """Collect when it is due and no key was pressed lately."""
        if self._collected_at is None:
            return
        now = monotonic()
        since = now - self._collected_at
        if (since > EVERY_S and now - self._typed_at > QUIET_S) or since > AT_LATEST_S:
            gc.collect()
            self._collected_at = now

    def stop(self) -> None:
        """Give the full collections back to the interpreter."""
        gc.set_threshold(*self._theirs)
        gc.unfreeze()
        self._collected_at = None
