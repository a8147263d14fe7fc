"""Spreads out the full garbage collections: with 64 nodes connected one holds the loop for up to 90 ms, and the
interpreter would run one every second. Each line that is drawn leaves a cycle behind (in Textual's `Strip.divide`), so
that without them the console would grow by 20 MB a minute under a flood of output. A pause of 90 ms may fall on a key
press, once in 45 s.
"""

from __future__ import annotations

import gc
from time import monotonic
from typing import Final

SHARE: Final = 0.002
"""The part of the time that full collections may take."""
EVERY_S: Final = 5.0
"""Between two full collections, at least."""
_YOUNG: Final = 10_000
"""Objects between two small collections: a drawn line lives for a tenth of a second, and what outlives the small
collections waits for a full one."""
_NEVER: Final = 1_000_000
"""Collections of the middle generation before the interpreter does a full one by itself."""


class GcScheduler:
    """Takes the full collections over from the interpreter, and lets it do the small ones less often."""

    def __init__(self) -> None:
        self._due_at = float("inf")
        self._theirs = gc.get_threshold()

    def start(self) -> None:
        """Leave what has been imported by now out of all later collections."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, self._theirs[1], _NEVER)
        self._due_at = monotonic() + EVERY_S

    def tick(self) -> None:
        """Collect when it is due."""
        begun = monotonic()
        if begun >= self._due_at:
            gc.collect()
            ended = monotonic()
            self._due_at = ended + max(EVERY_S, (ended - begun) / SHARE)

    def stop(self) -> None:
        """Give the collections back to the interpreter."""
        gc.set_threshold(*self._theirs)
        gc.unfreeze()
        self._due_at = float("inf")
