"""Recorded output: our own samples in tests/data, and the project's fixtures where they lie beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
OWN = REPOSITORY / "tests" / "data" / "nodes"
FIXTURES = REPOSITORY.parent / "shared" / "fixtures"
with_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason="the recorded outputs are not beside the repository")


def own(name: str) -> str:
    return (OWN / name).read_text()


def fixture(name: str) -> str:
    """A recorded output by the beginning of its name, which must be of one."""
    found = sorted(FIXTURES.glob(f"{name}*"))
    assert len(found) == 1, f"{name}: {[path.name for path in found]}"
    return found[0].read_text()


def everything() -> list[str]:
    """All samples there are."""
    paths = [*OWN.iterdir(), *FIXTURES.glob("*.txt")] if FIXTURES.is_dir() else [*OWN.iterdir()]
    return [path.read_text(errors="replace") for path in sorted(paths)]
