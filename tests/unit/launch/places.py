"""Places for tests that need no staged worker."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.launch.place import Place


def local_place(root: Path, ranks: int = 1, bundle: str = "/no/bundle") -> Place:
    """This machine as the host of all `ranks`, its node root at `root`."""
    return Place("127.0.0.1", tuple(range(ranks)), str(Path.home()), str(root), bundle, sys.executable)
