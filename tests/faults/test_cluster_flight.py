"""Runs over ssh on four nodes with their own users, homes and pythons: how they go when nothing of the network fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.models import Reason, RunState
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import fly_on, ring_config


@pytest.fixture(autouse=True)
def over_ssh(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLIGHTDECK_SSH_CONFIG", str(cluster.ssh_config))


def test_four_ranks_over_ssh_come_home(cluster: Cluster, home: Path) -> None:
    run = fly_on(cluster, home, ring_config(cluster))
    for rank in range(4):
        run.await_output("step", rank)
    run.finish()
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1), run.troubles()
