"""pytest's fixtures of the test cluster, registered in tests/conftest.py; a cluster comes up when a test first asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import capability
from tests.cluster.cluster import Cluster
from tests.cluster.fallback import LoopbackCluster


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """The four nodes that all tests of a session share. Tests ask for `cluster` instead, which heals it.

    Where namespaces cannot be had they are sshds on loopback, and what needs more skips by name; in CI that fails."""
    reason = capability.missing()
    if reason and capability.required():
        pytest.fail(f"CI must run the cluster's tests on namespaces: {reason}", pytrace=False)
    with LoopbackCluster(4) if reason else Cluster(4) as cluster:
        yield cluster


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """Four healthy nodes. Whatever a test did to them is undone after it, and what it left running there is ended."""
    yield session_cluster
    session_cluster.heal()


@pytest.fixture
def isolated_cluster(cluster: Cluster) -> Cluster:
    """The same, for tests whose every step needs users, networks or disks apart; they skip where there are none."""
    if not cluster.isolated:
        capability.needs_namespaces("what this test is about")
    return cluster
