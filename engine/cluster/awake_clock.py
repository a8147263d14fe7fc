"""The clock by which the head waits for others: it stands still while the head does not run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from engine.protocol.attempt import lease_clock

GAP_S = 5.0
"""Longer between two readings: this machine slept, or this process was stopped."""
_ANSWERED_AGAIN_S = 15.0
"""After a sleep, for every node to be connected again."""


class AwakeClock:
    """Seconds for which this process has run. Nobody could answer it in the meantime, so that time is not one in which
    it waited in vain. Leases go on all the same: they are not measured with this clock.

    It has to be read more often than every GAP_S, by `run` or anybody else, from any thread."""

    def __init__(self, clock: Callable[[], float] = lease_clock) -> None:
        """`clock` also counts while the machine sleeps."""
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._awake_s = 0.0
        self._woke_at = float("-inf")
        self.slept_s = 0.0
        """The sum of all gaps so far."""
        self.sleep_s = 0.0
        """The newest gap, with those before it after which there was no time to connect every node again."""

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            passed_s, self._read_at = now - self._read_at, now
            if passed_s > GAP_S:
                again = self._awake_s - self._woke_at < _ANSWERED_AGAIN_S
                self.sleep_s = passed_s + (self.sleep_s if again else 0.0)
                self.slept_s += passed_s
                self._woke_at = self._awake_s
            else:
                self._awake_s += passed_s
            return self._awake_s

    def silence_s(self, silent_s: float) -> float:
        """Seconds of a node's silence that mean something: soon after a sleep it may only be the sleep's own."""
        since_s = self() - self._woke_at
        return silent_s if since_s >= _ANSWERED_AGAIN_S else min(silent_s, since_s)

    async def run(self) -> None:
        """Read it often enough, until cancelled."""
        while True:
            self()
            await asyncio.sleep(GAP_S / 10)
