"""The keeper's words to the trainer: to stop, to rescue the state and leave; and the keeper's own end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from .wire import CONTROL_FD_ENV, RESCUE, STOP

EXIT_PEER_LOST, EXIT_KEEPER_GONE = 5, 6


class Control:
    """Listens in a thread of its own, so that a word is heard in the middle of a step."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.on_rescue: Callable[[int], object] = os._exit
        """Called in the thread that listens, with the exit code to leave with; while there is no state, that is all."""
        descriptor = os.environ.get(CONTROL_FD_ENV)
        if descriptor is not None:
            threading.Thread(target=self._listen, args=(int(descriptor),), name="control", daemon=True).start()

    @property
    def stop_asked(self) -> bool:
        return self._stop.is_set()

    def _listen(self, descriptor: int) -> None:
        heard = b""
        while chunk := os.read(descriptor, 4096):
            heard += chunk
            *words, heard = heard.split(b"\n")
            for word in words:
                if word + b"\n" == STOP:
                    self._stop.set()
                elif word + b"\n" == RESCUE:
                    self.on_rescue(EXIT_PEER_LOST)
        # Nobody keeps this rank any more: no lease, no log, no exit record.
        os._exit(EXIT_KEEPER_GONE)
