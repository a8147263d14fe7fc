"""The demo's model and data below any home, made once in this process: making them takes seconds, a copy none."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

from engine.demo import ensure_made
from engine.security.paths import make_home
from tests.bundles import link_bundle


@functools.cache
def _made() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    # Kept by the cache, and removed with it when the process ends.
    folder = tempfile.TemporaryDirectory(prefix="flightdeck-demo-")
    return folder, ensure_made(Path(folder.name))


def demo_below(home: Path) -> Path:
    """`home`, where the demo and the node bundle are ready as if it had been flown from there before."""
    _, made = _made()
    copy = home / "demo" / made.name
    if not copy.exists():
        make_home(home)
        shutil.copytree(made, copy)
        link_bundle(home / "node")
    return home
