"""The fixture of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.needs import require
from tests.ssh.bench import Bench


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "bench" in getattr(item, "fixturenames", ()):
        require("sshd", "ps")


@pytest_asyncio.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("FLIGHTDECK_SSH_CONFIG", raising=False)
    bench = Bench(tmp_path)
    yield bench
    await bench.close()
