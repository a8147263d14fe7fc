"""The node bundle: the part of this package that nodes get, named by its hash."""

from __future__ import annotations

import json
import zlib
from functools import cache
from pathlib import Path

import engine.node
from engine.node.bootstrap import PACKAGE, bundle_hash, python_files

SOURCE = Path(engine.node.__file__).parents[1]
BOOTSTRAP = SOURCE / "node" / "bootstrap.py"


@cache
def bundle_name() -> str:
    """The hash of this package's bundle."""
    return bundle_hash(SOURCE)


@cache
def bootstrap_text() -> str:
    return BOOTSTRAP.read_text(encoding="utf-8")


def bundle_files(source: Path = SOURCE) -> dict[str, str]:
    """Relative name -> text."""
    return {
        f"{PACKAGE}/{path.relative_to(source).as_posix()}": path.read_text(encoding="utf-8")
        for path in python_files(source)
    }


@cache
def packed_bundle() -> bytes:
    """As the bootstrap receives it."""
    data = zlib.compress(json.dumps(bundle_files()).encode())
    return b"%d\n" % len(data) + data
