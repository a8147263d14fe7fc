"""When the garbage collector looks through everything: while nobody types. A full collection holds the loop for up to
90 ms with 64 nodes connected, and left to itself comes every second."""

from __future__ import annotations

import gc
from time import monotonic
from typing import Final

QUIET_S: Final = 2.0
"""Without a key before a full collection."""
EVERY_S: Final = 30.0
"""Between two full collections."""
AT_LATEST_S: Final = 300.0
"""A full collection comes, whoever types: what it would free is memory until then."""
_NEVER: Final = 1_000_000
"""Collections of the middle generation before the interpreter does a full one by itself."""


class Tidying:
    """Takes the full collections over from the interpreter; the small ones stay its own."""

    def __init__(self) -> None:
        self._typed_at = monotonic()
        self._collected_at: float | None = None
        self._theirs = gc.get_threshold()

    def begin(self) -> None:
        """What has been imported by now stays: it is left out of all collections to come."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*self._theirs[:2], _NEVER)
        self._collected_at = monotonic()

    def typed(self) -> None:
        """A key has been pressed."""
        self._typed_at = monotonic()

    def tick(self) -> None:
        """Collect, when it is time and disturbs nobody."""
        if self._collected_at is None:
            return
        now = monotonic()
        since = now - self._collected_at
        if (since > EVERY_S and now - self._typed_at > QUIET_S) or since > AT_LATEST_S:
            gc.collect()
            self._collected_at = now

    def end(self) -> None:
        """Give the full collections back to the interpreter."""
        gc.set_threshold(*self._theirs)
        gc.unfreeze()
        self._collected_at = None
