"""Runs the real `flightdeck` command."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FLIGHTDECK = str(Path(sys.executable).with_name("flightdeck"))


@dataclass(frozen=True)
class Done:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment with a home of the test's own, and no terminal settings that would change output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return {**kept, "FLIGHTDECK_HOME": str(home), **more}


def flightdeck(home: Path, *arguments: str, cwd: Path | None = None, timeout_s: float = 120) -> Done:
    """Run a command to its end, without a terminal."""
    done = subprocess.run(
        [FLIGHTDECK, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(home),
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
