"""The keeper's word to the trainer: a request to stop, and the keeper's own end."""

from __future__ import annotations

import os
import threading

from .wire import CONTROL_FD_ENV, STOP

EXIT_KEEPER_GONE = 6


class Control:
    """Listens in a thread of its own, so that a word is heard in the middle of a step."""

    def __init__(self) -> None:
        self._stop = threading.Event()
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
            if STOP in heard:
                self._stop.set()
        # Nobody keeps this rank any more: no lease, no log, no exit record.
        os._exit(EXIT_KEEPER_GONE)
