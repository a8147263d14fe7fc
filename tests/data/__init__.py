"""Sample outputs: what programs print on a Mac, and failures as logs show them. Written for these tests."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent
NODES = DATA / "nodes"


def node_output(name: str) -> str:
    """One sample of tests/data/nodes."""
    return (NODES / name).read_text(encoding="utf-8")
