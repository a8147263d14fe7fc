"""The ranks of several hosts, with their own users, homes and pythons, started by mlx.launch and without it."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.launch import mlx_launch
from engine.store.layout import LAUNCHER_SOURCE
from tests.cluster.cluster import Cluster
from tests.integration.over_ssh import on, plan_of, start_attempt

LAUNCHERS = ["mlx.launch", "direct"]
RING = """
import json, os
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array(10.0 ** group.rank()), group=group, stream=mx.cpu).item()
content = {name: open(os.environ[name]).read() for name in ("MLX_HOSTFILE",)}
print(json.dumps([group.rank(), group.size(), total, dict(os.environ), content]))
"""


async def test_a_launch_that_is_given_up_leaves_no_launcher(
    cluster: Cluster, fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(on(cluster, "head"), ["python", "-c", ""], launcher="mlx.launch")
    starting, begun, started = mlx_launch.start, threading.Event(), queue.Queue[mlx_launch.Launcher]()

    def slowly(*args: Any, **options: Any) -> mlx_launch.Launcher:
        begun.set()
        time.sleep(0.2)
        launcher = starting(*args, **options)
        started.put(launcher)
        return launcher

    monkeypatch.setattr(mlx_launch, "start", slowly)
    launching = asyncio.create_task(start_attempt(tmp_path / "home", plan, fleet))
    await asyncio.to_thread(begun.wait, 30)
    launching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launching
    launcher = await asyncio.to_thread(started.get, timeout=30)
    assert launcher.process is not None and launcher.process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("launcher", LAUNCHERS)
async def test_ranks_on_hosts_with_other_homes_form_a_ring(
    launcher: str, cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    plan = plan_of(on(cluster, "ana", "bea", "cyd", "dov"), ["python", "-c", RING], launcher=launcher)
    started = await start_attempt(tmp_path / "home", plan, fleet)
    assert started.launched.start_failures == ()
    output = [json.loads(await started.output(rank)) for rank in range(4)]
    await started.launcher_left()
    if started.launched.launcher is not None:
        assert started.run_dir.log(LAUNCHER_SOURCE).read_text() == "", "the launcher has nothing to complain of"
    assert [each[:3] for each in output] == [[rank, 4, 1111.0] for rank in range(4)]
    assert [each[3]["HOME"] for each in output] == [cluster[name].home for name in ("ana", "bea", "cyd", "dov")]
