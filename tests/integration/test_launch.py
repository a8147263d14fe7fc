"""The ranks of several hosts, with their own users, homes and pythons, started by mlx.launch and without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.transport.fleet import Fleet
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import fly, on, plan_of

LAUNCHERS = ["mlx.launch", "direct"]
RING = """
import json, os
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array(10.0 ** group.rank()), group=group, stream=mx.cpu).item()
content = {name: open(os.environ[name]).read() for name in ("MLX_HOSTFILE",)}
print(json.dumps([group.rank(), group.size(), total, dict(os.environ), content]))
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_ranks_on_hosts_with_other_homes_form_a_ring(
    launcher: str, cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    plan = plan_of(on(cluster, "ana", "bea", "cyd", "dov"), ["python", "-c", RING], launcher=launcher)
    flown = await fly(tmp_path / "home", plan, fleet)
    assert flown.launched.failures == ()
    said = [json.loads(await flown.said(rank)) for rank in range(4)]
    await flown.launcher_left()
    assert [each[:3] for each in said] == [[rank, 4, 1111.0] for rank in range(4)]
    assert [each[3]["HOME"] for each in said] == [cluster[name].home for name in ("ana", "bea", "cyd", "dov")]
