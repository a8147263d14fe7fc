"""The worker bundle: `engine/worker` as it is here, staged on a node below the hash of its files."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import engine.worker
from engine.errors import LaunchError
from engine.launch.staging_script import PACKAGE, bundle_hash, python_files
from engine.security.home import make_private

SOURCE = Path(engine.worker.__file__).parent


def stage_bundle(node_root: Path, source: Path = SOURCE) -> Path:
    """Put the worker below `<node_root>/bundles/<sha>/worker/` unless it is there; returns `<node_root>/bundles/<sha>`.

    What is there is verified by its hash and replaced when it differs. Raises LaunchError when it cannot be written.
    """
    expected = bundle_hash(source)
    target = node_root / "bundles" / expected
    if (target / PACKAGE).is_dir() and bundle_hash(target / PACKAGE) == expected:
        return target
    try:
        # By itself: mkdir gives its mode to the last folder alone, and adapters and logs will lie in this one.
        make_private(node_root)
        target.parent.mkdir(exist_ok=True, mode=0o700)
        staging = Path(tempfile.mkdtemp(prefix=f".{expected[:12]}-", dir=target.parent))
        try:
            _copy(source, staging / PACKAGE)
            if bundle_hash(staging / PACKAGE) != expected:
                raise LaunchError("the worker's files changed while they were staged", where=str(source))
            _put(staging, target, expected)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise LaunchError(
            "the worker could not be staged",
            where=str(target),
            why=error.strerror or str(error),
            todo="make room or mend the permissions there",
        ) from error
    return target


def _put(staging: Path, target: Path, expected: str) -> None:
    """Rename `staging` to `target`; somebody else's good copy is as good as ours, a damaged one makes way."""
    try:
        staging.rename(target)
    except OSError:
        if (target / PACKAGE).is_dir() and bundle_hash(target / PACKAGE) == expected:
            return
        aside = staging.with_name(staging.name + ".damaged")
        target.rename(aside)
        staging.rename(target)
        shutil.rmtree(aside, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    for path in python_files(source):
        copied = target / path.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        with copied.open("wb") as file:
            file.write(path.read_bytes())
            file.flush()
            os.fsync(file.fileno())
