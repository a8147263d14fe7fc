"""A node is a machine of its own: user, home, python, processes, disk and identity."""

from __future__ import annotations

import subprocess

from tests.cluster.cluster import Cluster
from tests.cluster.node import Node


def ssh(cluster: Cluster, node: Node, command: str) -> str:
    argv = ["ssh", "-F", str(cluster.ssh_config), node.ssh, command]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def test_every_node_has_its_own_user_home_and_name(cluster: Cluster) -> None:
    said = [ssh(cluster, node, 'echo "$USER $HOME $(hostname) $(id -u)"') for node in cluster.nodes]
    assert said == [f"{node.user} {node.home} {node.name} {node.uid}" for node in cluster.nodes]
    assert len({node.home for node in cluster.nodes}) == len({node.uid for node in cluster.nodes}) == 4
