"""pytest's fixtures of the test cluster, registered in tests/conftest.py; a cluster comes up when a test first asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import capability
from tests.cluster.cluster import Cluster
from tests.cluster.fallback import LoopbackCluster
from tests.needs import require, required

LOOPBACK = ("sshd", "ssh-keygen", "ssh", "ps")
"""Programs that a cluster of sshds on loopback needs."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose cluster cannot be had here; in CI, fail it, also where only sshds on loopback could be had."""
    wanted: set[str] = set(getattr(item, "fixturenames", ()))
    if "session_cluster" in wanted:
        require(*LOOPBACK)
    if "isolated_cluster" in wanted or ("session_cluster" in wanted and required()):
        require("namespaces")


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """The four nodes that all tests of a session share. Tests ask for `cluster` instead, which heals it.

    Where namespaces cannot be had they are sshds on loopback, and what needs more skips; in CI that fails."""
    with LoopbackCluster(4) if capability.missing() else Cluster(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """Four healthy nodes. Whatever a test did to them is undone after it, and what it left running there is ended."""
    yield session_cluster
    session_cluster.heal()


@pytest.fixture
def isolated_cluster(cluster: Cluster) -> Cluster:
    """The same, for tests whose every step needs users, networks or disks apart; they skip where there are none."""
    return cluster
