"""Nothing that preflight starts outlives a head that is killed, or that a node no longer hears."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.cluster.transport.fleet import Fleet
from engine.config.models import PreflightConfig, select_nodes
from engine.node.processes import with_any_nonce
from tests.cluster.cluster import Cluster
from tests.cluster.node import Node
from tests.integration.checks import assert_nothing_left, config_of, is_idle
from tests.waiting import wait_until

SUMS = """
import asyncio, sys
from pathlib import Path
from engine.config.models import Config
from engine.checks import gradient
from engine.checks.context import CheckContext
from engine.cluster.transport.fleet import Fleet
from engine.node.processes import with_any_nonce

async def main():
    config = Config.model_validate_json(Path(sys.argv[1]).read_text())
    async with Fleet(Path(sys.argv[2])) as fleet:
        print(await gradient.run(CheckContext(config, fleet)), flush=True)

asyncio.run(main())
"""


@pytest.fixture
def summing(cluster: Cluster, fleet: Fleet, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A head of its own in the middle of a long sum over two nodes."""
    pair = select_nodes(config_of(cluster), {node.name for node in cluster.nodes[:2]})
    config = pair.model_copy(update={"preflight": PreflightConfig(all_sum_s=60)})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    argv = [sys.executable, "-c", SUMS, str(tmp_path / "config.json"), str(fleet.home)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as head:
        wait_until(lambda: all(map(summers, cluster.nodes[:2])) or head.poll() is not None, within_s=120)
        assert head.poll() is None, head.stdout.read() if head.stdout else ""
        yield head
        head.kill()


def summers(node: Node) -> list[str]:
    return [process.command for process in node.processes() if "engine.trainer.allreduce_check" in process.command]


async def test_a_head_that_is_killed_leaves_nothing_anywhere(
    cluster: Cluster, summing: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert launchers(tmp_path)
    summing.kill()
    # Less than the sum itself would last.
    for node in cluster.nodes:
        wait_until(partial(is_idle, node), within_s=50)
        assert_nothing_left(node)
    wait_until(lambda: not launchers(tmp_path), within_s=50)


def launchers(home: Path) -> list[int]:
    """Processes of this machine that are of a sum whose files lie below `home`."""
    return [each.pid for found in with_any_nonce().values() for each in found if str(home) in each.command]


@pytest.mark.slow
async def test_a_node_that_is_cut_off_ends_its_ranks_by_itself(
    isolated_cluster: Cluster, summing: subprocess.Popen[bytes]
) -> None:
    last = isolated_cluster.nodes[1]
    last.cut()
    wait_until(lambda: not summers(last), within_s=25)
