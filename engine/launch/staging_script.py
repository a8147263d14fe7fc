"""Runs on the node, with the node's own python (any from 3.9) and the standard library, its text coming over stdin, so
that nothing that was staged earlier says of itself that it is whole.

    python - SHA256

Makes the node root and prints one JSON object: `home`, `whole`, `free_bytes`; or `problem`, `path`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

PACKAGE = "worker"
ROOT = ".flightdeck"
"""The node root, below the home of the node's user."""


def bundle_hash(package: Path) -> str:
    """SHA-256 over the names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for path in python_files(package):
        name, content = path.relative_to(package).as_posix().encode(), path.read_bytes()
        # Lengths keep "a" + "bc" and "ab" + "c" apart.
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def python_files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*.py") if path.is_file())


def private(directory: Path) -> None:
    """Make the directory, or what is already there of it, for its owner alone."""
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)


def is_whole(bundle: Path, expected: str) -> bool:
    """Whether the bundle is what it should be; one that is not makes way."""
    if not os.path.lexists(bundle):
        return False
    if (bundle / PACKAGE).is_dir() and bundle_hash(bundle / PACKAGE) == expected:
        return True
    aside = bundle.with_name(f".{bundle.name[:12]}-{os.getpid()}.damaged")
    try:
        bundle.rename(aside)
    except FileNotFoundError:
        # Somebody else who stages it has seen the same.
        return False
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()
    return False


def main(expected: str) -> None:
    home = Path("~").expanduser()
    root = home / ROOT
    bundle = root / "bundles" / expected
    try:
        private(root)
        private(root / "bundles")
        whole = is_whole(bundle, expected)
        print(json.dumps({"home": str(home), "whole": whole, "free_bytes": shutil.disk_usage(root).free}))
    except OSError as error:
        print(json.dumps({"problem": error.strerror or str(error), "path": error.filename or str(root)}))


if __name__ == "__main__":
    main(sys.argv[1])
