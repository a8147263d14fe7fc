"""A look ends with whoever asked for it: nobody waits for what it reads when the head is gone."""

from __future__ import annotations

import os
import threading
import time

_LOOK_S = 1.0


def end_with_parent() -> None:
    """From now on this process ends within a second of its parent: sshd's session, or the head itself."""
    threading.Thread(target=_watch, args=(os.getppid(),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
