"""Fixtures of tests on the nodes of the test cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from engine.checks.check import Check
from engine.checks.runner import CHECKS
from engine.cluster.transport.fleet import Fleet
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import LAUNCHERS


@pytest.fixture
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Check]:
    """The checks with limits for a busy machine."""
    monkeypatch.setattr("engine.checks.leases._RELEASE_LIMIT_S", 20.0)
    monkeypatch.setattr("engine.checks.hostfile._LISTEN_S", 60.0)
    monkeypatch.setattr("engine.checks.hostfile._PARSE_LIMIT_S", 60.0)
    return {name: replace(check, time_limit_s=300.0) for name, check in CHECKS.items()}


@pytest_asyncio.fixture
async def fleet(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """The ways to the cluster's nodes, with a FLIGHTDECK_HOME of the test's own at `home` in its folder."""
    monkeypatch.setenv("FLIGHTDECK_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    async with Fleet(tmp_path / "home") as fleet:
        yield fleet
    while LAUNCHERS:
        LAUNCHERS.pop().kill()
