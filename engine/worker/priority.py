"""macOS's ways to keep a training on the performance cores and the machine awake; elsewhere nothing is done."""

from __future__ import annotations

import subprocess
import sys

_QOS_CLASS_USER_INTERACTIVE = 0x21


def raise_priority() -> str:
    """macOS: keep this thread, and those it makes, off the efficiency cores. In words what was done."""
    if sys.platform != "darwin":
        return "not on macOS"
    import ctypes

    code = ctypes.CDLL(None).pthread_set_qos_class_self_np(_QOS_CLASS_USER_INTERACTIVE, 0)
    return "QOS_CLASS_USER_INTERACTIVE" if code == 0 else f"QOS_CLASS_USER_INTERACTIVE was refused with {code}"


def stay_awake(pid: int) -> str:
    """macOS: keep the machine from sleeping while `pid` lives. In words what was done."""
    if sys.platform != "darwin":
        return "not on macOS"
    try:
        subprocess.Popen(
            ["/usr/bin/caffeinate", "-ims", "-w", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError as error:
        return f"caffeinate: {error}"
    return "caffeinate -ims"
