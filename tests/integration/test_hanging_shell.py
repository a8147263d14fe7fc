"""A login shell that hangs in its start-up files."""

from __future__ import annotations

import asyncio

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.errors import NodeUnreachable
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import on


async def test_it_is_ended_and_does_not_stay_there_for_each_time_that_the_node_is_asked(
    cluster: Cluster, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the cluster: sshd takes no signals for a root that logs in."""
    dov, way = cluster["dov"], fleet.to(on(cluster, "dov")[0])
    dov.noisy_bashrc("sleep 4321\n")
    monkeypatch.setattr("engine.cluster.transport.ssh.channel._BEGIN_LIMIT_S", 0.5)
    with pytest.raises(NodeUnreachable, match=r"its login shell runs no command within 0\.5 s"):
        await way.run(["true"], timeout_s=10)
    async with asyncio.timeout(30):
        while any("4321" in process.command for process in dov.processes()):
            await asyncio.sleep(0.05)
    dov.quiet_bashrc()
