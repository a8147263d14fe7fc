"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FLIGHTDECK_HOME of this test's own."""
    path = tmp_path / "home"
    monkeypatch.setenv("FLIGHTDECK_HOME", str(path))
    return path
