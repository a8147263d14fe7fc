"""The node bundle, staged on this machine without an agent: by the bootstrap's own functions."""

from __future__ import annotations

from pathlib import Path

from engine.cluster.bundle import node_bundle
from engine.node.bootstrap import install, prepare_root
from engine.security.paths import make_private


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
