"""The fixture of these tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.needs import require
from tests.ssh.bench import SshBench


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "bench" in getattr(item, "fixturenames", ()):
        require("sshd", "ps")


def set_time_to_leave(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in ("ssh.channel", "local"):
        monkeypatch.setattr(f"engine.cluster.transport.{module}._LEAVES_S", seconds)


@pytest.fixture(autouse=True)
def time_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that leaves by itself may need long for it on a busy machine."""
    set_time_to_leave(monkeypatch, 30.0)


@pytest.fixture
def killed_soon(time_to_leave: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For programs that never leave by themselves."""
    set_time_to_leave(monkeypatch, 0.2)


@pytest_asyncio.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SshBench]:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.delenv("FLIGHTDECK_SSH_CONFIG", raising=False)
    bench = SshBench(tmp_path)
    yield bench
    await bench.close()
