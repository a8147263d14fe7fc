"""Without root the same tests run on sshds of the user's own: tried on a node, as its user, who is not root."""

from __future__ import annotations

import subprocess

import pytest

from engine.node.processes import start_time
from tests.cluster.cluster import Cluster
from tests.cluster.fallback import LoopbackCluster
from tests.cluster.machine import until
from tests.cluster.node import Node
from tests.cluster.system import PROJECT
from tests.cluster.test_nodes import ssh

CHOSEN = "stopped or changed_host or noisy or black_hole or full_disk or own_home or by_nonce"


def suite(node: Node, chosen: str, *environment: str) -> subprocess.CompletedProcess[str]:
    """Run a choice of this folder's tests on the node as its user."""
    python = node.python.replace("~", node.home)
    tests = [f"{PROJECT}/tests/cluster/test_nodes.py", f"{PROJECT}/tests/cluster/test_faults.py"]
    pytest = [python, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(PROJECT), "-k", chosen]
    # The fixtures alone, without the other tests' conftest and plugins, which take a second to import.
    lean = ["--noconftest", "-p", "tests.cluster.fixtures", "-c", "/dev/null", "-rs"]
    settings = ["PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={PROJECT}", *environment]
    return node.run(["env", *settings, *pytest, *lean, *tests], limit_s=240)


def test_an_ordinary_user_runs_the_same_tests_and_skips_what_needs_more(
    isolated_cluster: Cluster,
) -> None:
    done = suite(isolated_cluster["ana"], CHOSEN)
    assert done.returncode == 0, done.stdout
    assert "5 passed, 2 skipped" in done.stdout
    assert "SKIPPED [2] " in done.stdout
    assert "needs root, for a cluster of namespaces" in done.stdout
    # Other tests of the session may have connections of theirs open.
    left = [process.command for process in isolated_cluster["ana"].processes()]
    assert [command for command in left if not command.startswith("sshd: ")] == []


def test_in_ci_no_namespaces_is_a_failure_and_no_skip(isolated_cluster: Cluster) -> None:
    done = suite(isolated_cluster["ana"], "own_home", "CI=true")
    assert done.returncode == 1
    assert "needs root, for a cluster of namespaces" in done.stdout
    assert "skipped" not in done.stdout.splitlines()[-1]


@pytest.mark.needs("sshd", "ssh-keygen", "ssh", "ps")
def test_sshds_on_loopback_leave_nothing() -> None:
    with LoopbackCluster(2) as cluster:
        ana = cluster["ana"]
        assert ssh(cluster, ana, "(sleep 60 >/dev/null 2>&1 &); echo $HOME") == ana.home
        until(lambda: [process.command for process in ana.processes()] == ["sleep 60"], "the process", str)
        listeners = [node.pid for node in cluster.nodes]
        folder = cluster.folder
    assert [start_time(pid) for pid in listeners if pid] == [None, None]
    assert not folder.exists()
    assert ana.processes() == []
