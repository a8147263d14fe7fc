"""A node is a machine of its own: user, home, python, processes, disk and identity."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.machine import until
from tests.cluster.node import Node
from tests.cluster.system import PROJECT

ABOUT = """
import json, sys, mlx.core as mx
from importlib.util import find_spec
there = [name for name in ("mlx_lm", "engine", "tests") if find_spec(name)]
print(json.dumps([sys.executable, sys.prefix, (mx.array(1) + 1).item(), there]))
"""


def ssh(cluster: Cluster, node: Node, command: str) -> str:
    """What `command` prints on the node, over the system's ssh."""
    argv = ["ssh", "-F", str(cluster.ssh_config), node.ssh, command]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_every_node_has_its_own_home_and_host_key(cluster: Cluster) -> None:
    output = [ssh(cluster, node, 'echo "$HOME $PWD"; echo ~') for node in cluster.nodes]
    assert output == [f"{node.home} {node.home}\n{node.home}" for node in cluster.nodes]
    assert len({node.home for node in cluster.nodes}) == len({node.host_key for node in cluster.nodes}) == 4


def test_every_node_has_its_own_user_and_host_name(isolated_cluster: Cluster) -> None:
    nodes = isolated_cluster.nodes
    output = [ssh(isolated_cluster, node, 'echo "$(id -un) $(id -u) $(hostname)"') for node in nodes]
    assert output == [f"{node.user} {node.uid} {node.name}" for node in nodes]
    assert len({node.uid for node in nodes} | {os.getuid()}) == 5


def test_every_python_has_mlx_but_not_the_project(isolated_cluster: Cluster) -> None:
    nodes = isolated_cluster.nodes
    with ThreadPoolExecutor() as pool:
        output = list(pool.map(lambda node: ssh(isolated_cluster, node, f"{node.python} -c '{ABOUT}'"), nodes))
    for node, text in zip(nodes, output, strict=True):
        python, prefix, two, there = json.loads(text)
        assert python == node.python.replace("~", node.home)
        assert Path(prefix) == Path(python).parents[1]
        assert (two, there) == (2, ["mlx_lm"])


def test_a_module_runs_with_the_nodes_python(cluster: Cluster) -> None:
    node = cluster.nodes[3]
    assert ssh(cluster, node, f"{node.python} -m mlx_lm --version").startswith("0.")


def test_a_node_sees_the_project_and_nothing_of_the_heads_own(isolated_cluster: Cluster, tmp_path: Path) -> None:
    node = isolated_cluster.nodes[0]
    (tmp_path / "secret").write_text("the head's")
    seen = node.run(
        ["cat", str(tmp_path / "secret"), str(Path.home() / ".ssh" / "known_hosts"), "/run/flightdeck-cluster"]
    )
    assert seen.stdout == ""
    assert seen.stderr.count("No such file") == 3
    assert node.run(["touch", str(PROJECT / "pyproject.toml")]).returncode != 0
    assert node.run(["head", "-1", str(PROJECT / "pyproject.toml")]).stdout == "[build-system]\n"
    assert node.run(["cat", "/etc/shadow"]).returncode != 0


def test_an_orphan_is_reaped_by_the_nodes_pid_1(isolated_cluster: Cluster) -> None:
    node = isolated_cluster.nodes[1]
    node.run(["sh", "-c", "(sleep 0.01 &) ; (true &)"])
    states = ["sh", "-c", "cat /proc/[0-9]*/stat | grep -E '\\((sleep|true)\\)' | cut -d' ' -f3"]
    until(lambda: node.run(states).stdout == "", "the orphans' end", str)


def test_processes_are_found_by_nonce_on_their_node_only(cluster: Cluster) -> None:
    ana, bea = cluster.nodes[:2]
    ssh(cluster, ana, "FLIGHTDECK_NONCE=4711 nohup setsid sleep 60 >/dev/null 2>&1 </dev/null & echo")
    until(lambda: [process.command for process in ana.processes("4711")] == ["sleep 60"], "the process", str)
    assert ana.processes("471") == bea.processes("4711") == []
    ana.end_processes()
    until(lambda: ana.processes("4711") == [], "its end", str)


def test_files_in_memory_are_read_too(cluster: Cluster, tmp_path: Path) -> None:
    node = cluster.nodes[0]
    node.run(["sh", "-c", f"mkdir -p {tmp_path} && echo volatile > {tmp_path}/note"])
    assert node.read(f"{tmp_path}/note") == "volatile\n"


def test_what_is_written_on_a_node_is_its_users(cluster: Cluster) -> None:
    node = cluster.nodes[2]
    node.write("~/deep/down/note", "hello\n")
    assert ssh(cluster, node, "echo there >> ~/deep/down/note; cat ~/deep/down/note") == "hello\nthere"
    assert node.read("~/deep/down/note") == node.read(f"{node.home}/deep/down/note") == "hello\nthere\n"
