"""MLX's own ring runs over two nodes' addresses."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.cluster import Cluster

PROGRAM = """
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
total = mx.distributed.all_sum(mx.array(float(group.rank() + 1)), stream=mx.cpu)
print(group.rank(), group.size(), total.item())
"""


def test_two_ranks_on_two_nodes_sum_over_a_ring(isolated_cluster: Cluster) -> None:
    nodes = [isolated_cluster["ana"], isolated_cluster["dov"]]
    hosts = json.dumps([[f"{node.ip}:{40500 + rank}"] for rank, node in enumerate(nodes)])
    for node in nodes:
        node.write("~/ring.json", hosts)

    def rank(number: int) -> str:
        node = nodes[number]
        python = node.python.replace("~", node.home)
        environment = [f"MLX_RANK={number}", f"MLX_HOSTFILE={node.home}/ring.json"]
        return node.run(["env", *environment, python, "-c", PROGRAM]).stdout

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, (0, 1))) == ["0 2 3.0\n", "1 2 3.0\n"]
