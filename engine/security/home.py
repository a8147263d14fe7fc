"""The state directory: everything that flightdeck keeps on this machine lies in it, readable by its user alone."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_state_path

from engine.errors import StateError


def state_home() -> Path:
    """FLIGHTDECK_HOME, else the platform's user state directory. Not created here."""
    configured = os.environ.get("FLIGHTDECK_HOME")
    return Path(configured).expanduser().absolute() if configured else user_state_path("flightdeck")


def make_private(directory: Path) -> None:
    """Make `directory`, or what is already there of it, for its owner alone (0700). Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def make_home(home: Path) -> None:
    """Make the state directory, 0700. Raises StateError when it cannot be made or written, or is another user's."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = home.stat().st_uid
    except OSError as broken:
        raise StateError(
            "the state directory cannot be made", where=str(home), why=str(broken.strerror), todo="set FLIGHTDECK_HOME"
        ) from broken
    if owner != os.geteuid() and os.geteuid() != 0:
        raise StateError("the state directory belongs to another user", where=str(home), todo="set FLIGHTDECK_HOME")
    if not os.access(home, os.W_OK | os.X_OK):
        raise StateError("the state directory cannot be written", where=str(home), todo="set FLIGHTDECK_HOME")
