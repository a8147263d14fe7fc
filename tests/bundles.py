"""The node bundle, staged on this machine without an agent: by the bootstrap's own functions, or as a copy at once."""

from __future__ import annotations

import compileall
import fcntl
import functools
import os
import shutil
import time
from pathlib import Path

from engine.cluster.bundle import node_bundle
from engine.node.bootstrap import install, make_private, prepare_root

_KEPT_S = 86_400
"""After its last use by a process that began with it; others may be under way with an earlier content."""


def stage_bundle(node_root: Path) -> Path:
    """The folder of the bundle below a node root. Raises OSError."""
    make_private(node_root)
    bundle = node_root / "bundles" / node_bundle().name
    prepared = prepare_root(node_root, bundle.name)
    if "problem" in prepared:
        raise OSError(0, prepared["problem"], prepared["path"])
    if prepared["missing"]:
        install(bundle, node_bundle().files)
    return bundle


@functools.cache
def _staged() -> Path:
    """Beside this module's own compiled code, once on this machine for each content of the bundle."""
    root = Path(__file__).with_name("__pycache__") / "bundle"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bundle = stage_bundle(root)
        os.utime(bundle)
        for other in bundle.parent.iterdir():
            if time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
        compileall.compile_dir(bundle, quiet=2)
    return bundle


def link_bundle(node_root: Path) -> Path:
    """As `stage_bundle`, of links to one bundle that was staged and compiled before: no disk is waited for, and no
    process compiles it anew."""
    bundle = node_root / "bundles" / node_bundle().name
    if not bundle.exists():
        node_root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_private(node_root)
        make_private(node_root / "bundles")
        link_files(bundle)
    return bundle


def link_files(to: Path) -> None:
    """The bundle's files as links, in the new folder `to`. A test that changes one must replace it."""
    shutil.copytree(_staged(), to, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # On a disk of the test's own.
        shutil.copy2(source, target)
