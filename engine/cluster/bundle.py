"""The node bundle: the part of this package that nodes get, named by its hash."""

from __future__ import annotations

import json
import zlib
from functools import cache, cached_property
from pathlib import Path

import engine.node
from engine.node.bootstrap import PACKAGE, hash_files, read_package

SOURCE = Path(engine.node.__file__).parents[1]


class NodeBundle:
    """Its files as they were when it was made."""

    def __init__(self, source: Path = SOURCE) -> None:
        files = read_package(source)
        self.name = hash_files(files)
        self.bootstrap = files["node/bootstrap.py"].decode()
        self.files = {f"{PACKAGE}/{name}": content.decode() for name, content in files.items()}
        """Relative name -> text."""

    @cached_property
    def packed(self) -> bytes:
        """As the bootstrap receives it."""
        data = zlib.compress(json.dumps(self.files).encode())
        return b"%d\n" % len(data) + data


@cache
def node_bundle() -> NodeBundle:
    """Read once by each process, so that a supervisor goes on with the one that it began with when this package is
    upgraded under it, and so that a disk that stalls holds up no connection."""
    return NodeBundle()
