"""Running the system's own tools (ip, mount, nsenter, …), with what they said in the error."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from tests.needs import PATH

LIMIT_S = 20.0
"""No tool here needs a second; one that takes this long hangs."""


class CommandFailed(Exception):
    """A tool of the system ended with something other than 0."""


def command(*argv: str, stdin: str = "") -> str:
    """Run a tool and return its standard output. Raises CommandFailed with its standard error."""
    done = attempt(*argv, stdin=stdin)
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def attempt(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool that may fail."""
    return subprocess.run(
        argv,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
        env=os.environ | {"PATH": PATH, "LC_ALL": "C"},
    )


def in_batch(lines: Sequence[str]) -> None:
    """Run several `ip` commands in one process."""
    command("ip", "-batch", "-", stdin="\n".join(lines) + "\n")
