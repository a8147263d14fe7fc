"""Copies and saves text: to the clipboard where there is one, and always to a file, so that it is never lost."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path


def save(text: str, directory: Path, name: str, now: datetime) -> Path:
    """Write `text` to a new 0600 file below `directory` (made 0700 when missing) and return its path."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{name}-{now:%Y%m%d-%H%M%S}.txt"
    number = 1
    while path.exists():
        number += 1
        path = directory / f"{name}-{now:%Y%m%d-%H%M%S}-{number}.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    return path


def pasteboard(text: str) -> bool:
    """Put `text` on a local Mac's pasteboard; False elsewhere (then the terminal is asked by OSC 52)."""
    if sys.platform != "darwin" or "SSH_CONNECTION" in os.environ:
        return False
    try:
        done = subprocess.run(["pbcopy"], input=text.encode(), timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
