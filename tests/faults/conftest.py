"""Every fault test leaves nothing behind, also when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bundles import link_bundle
from tests.cluster.cluster import Cluster
from tests.faults.local_runs import PLANNED


@pytest.fixture(autouse=True)
def cleared_away() -> Iterator[None]:
    """End whatever a test has started and not ended."""
    yield
    while PLANNED:
        PLANNED.pop().clear_away()


@pytest.fixture
def home(home: Path) -> Path:
    """A FLIGHTDECK_HOME of the test's own; this machine has the node bundle."""
    link_bundle(home / "node")
    return home


@pytest.fixture
def nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The test cluster, reached by whatever a test starts."""
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))
    return cluster
