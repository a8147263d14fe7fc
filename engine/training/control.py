"""The keeper's commands to the trainer (stop; save an emergency checkpoint and exit), and its own end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from engine.protocol.attempt import CONTROL_FD_ENV, EMERGENCY_CHECKPOINT, STOP
from engine.protocol.exit_codes import TrainerExit


class Control:
    """Reads in a thread of its own, so that a command is received in the middle of a step."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self.save_and_exit: Callable[[int], object] = os._exit
        """Called in the reading thread with the exit code; until there is a state to save, it only exits."""
        descriptor = os.environ.get(CONTROL_FD_ENV)
        if descriptor is not None:
            threading.Thread(target=self._read, args=(int(descriptor),), name="control", daemon=True).start()

    @property
    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def _read(self, descriptor: int) -> None:
        received = b""
        while chunk := os.read(descriptor, 4096):
            received += chunk
            *commands, received = received.split(b"\n")
            for command in commands:
                if command + b"\n" == STOP:
                    self._stop.set()
                elif command + b"\n" == EMERGENCY_CHECKPOINT:
                    self.save_and_exit(TrainerExit.PEER_LOST)
        # Without its keeper the rank has no lease, no log and no exit record.
        os._exit(TrainerExit.KEEPER_GONE)
