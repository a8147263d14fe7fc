"""Fixtures of tests on the nodes of the test cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.cluster.transport.fleet import Fleet
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import LAUNCHERS


@pytest_asyncio.fixture
async def fleet(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """The ways to the cluster's nodes, with a FLIGHTDECK_HOME of the test's own at `home` in its folder."""
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    async with Fleet((), tmp_path / "home") as fleet:
        yield fleet
    while LAUNCHERS:
        LAUNCHERS.pop().kill()
