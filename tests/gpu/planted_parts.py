"""Parts that end in every way in which one can, for the tests of the visit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Final

from tests.gpu.part import Part, Visit

_SLEEP: Final = (sys.executable, "-c", "import time; time.sleep(600)")


def measures(visit: Visit) -> None:
    visit.result("speed", 12.5, unit="tokens/s", target=">= 10", ok=True)
    visit.record("card", "as nvidia-smi prints it | with a bar")


def misses(visit: Visit) -> None:
    visit.result("speed", 8, unit="tokens/s", target=">= 10", ok=False)


def hangs(visit: Visit) -> None:
    """With a child in a session of its own, which is found below it, and an orphan, which is found by its mark."""
    child = subprocess.Popen(_SLEEP, start_new_session=True)
    orphan = visit.call(["sh", "-c", 'setsid "$@" >/dev/null 2>&1 & echo $!', "sh", *_SLEEP]).output
    visit.result("pids", f"{os.getpid()} {child.pid} {orphan.strip()}")
    time.sleep(600)


def goes_on(visit: Visit) -> None:
    visit.result("begun", "yes")
    time.sleep(600)


def dies(visit: Visit) -> None:
    visit.result("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)


def lacks(visit: Visit) -> None:
    visit.cannot("this machine has one GPU")


def raises(visit: Visit) -> None:
    raise ValueError("a wrong figure")


def says_nothing(_: Visit) -> None:
    return


def calls(visit: Visit) -> None:
    done = visit.call([sys.executable, "-c", "import sys; print('out'); sys.exit(3)"])
    visit.result("code", f"{done.code} {done.output.strip()}", ok=(done.code, done.timed_out) == (3, False))
    late = visit.call(_SLEEP, limit_s=0.3)
    visit.result("late", late.seconds, unit="s", ok=late.timed_out and late.seconds < 5)


PARTS: Final = (
    Part("long", "takes longer than the visit", 1000.0, goes_on),
    Part("measures", "a figure that meets its target", 20.0, measures),
    Part("misses", "one that does not", 20.0, misses),
    Part("hangs", "waits for ever", 1.5, hangs),
    Part("dies", "is killed", 20.0, dies),
    Part("lacks", "cannot run here", 20.0, lacks),
    Part("raises", "fails", 20.0, raises),
    Part("says-nothing", "shows nothing", 20.0, says_nothing),
    Part("calls", "runs commands", 20.0, calls),
)
