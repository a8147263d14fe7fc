"""The demo's model and data below any home, made once on this machine: making them takes seconds, a copy none."""

from __future__ import annotations

import fcntl
import functools
import shutil
from pathlib import Path

from engine.demo import ensure_made
from engine.security.paths import make_home
from tests.bundles import link_bundle


@functools.cache
def made_demo() -> Path:
    """The folder with model/ and data/, beside this module's own compiled code. Its name changes with what makes it."""
    home = Path(__file__).with_name("__pycache__") / "demo-home"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return ensure_made(home)


def demo_below(home: Path) -> Path:
    """`home`, where the demo and the node bundle are ready as if it had been launched from there before."""
    made = made_demo()
    copy = home / "demo" / made.name
    if not copy.exists():
        make_home(home)
        shutil.copytree(made, copy)
        link_bundle(home / "node")
    return home
