"""Two nodes with a disk in common, as most people's programs expect it: rank 0 saves, and every rank loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, SharedDiskCluster
from tests.faults.conftest import cleared_away, home

__all__ = ["cleared_away", "home"]


@pytest.fixture(scope="session")
def session_pair() -> Iterator[Cluster]:
    with SharedDiskCluster(2) as cluster:
        yield cluster


@pytest.fixture
def pair(session_pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(session_pair.ssh_config))
    yield session_pair
    session_pair.heal()
