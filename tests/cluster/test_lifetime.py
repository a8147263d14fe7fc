"""A cluster is up in no time, leaves nothing when it goes, however it goes, and is never silently missing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster import network
from tests.cluster.cluster import Cluster
from tests.cluster.command import CommandFailed
from tests.cluster.disk import mounts_below
from tests.cluster.machine import until
from tests.cluster.registry import Record, Registry
from tests.cluster.system import PROJECT
from tests.cluster.test_nodes import ssh

HOLD = """
import time
from tests.cluster.cluster import Cluster
with Cluster(2) as cluster:
    print(cluster.record.number, cluster.folder, *(node.pid for node in cluster.nodes), flush=True)
    time.sleep(60)
"""


pytestmark = pytest.mark.needs("namespaces")


def left_of(number: int, folder: Path, namespaces: set[str]) -> list[str]:
    """Links, mounts, folders and network namespaces of a cluster that are still there."""
    bridge = network.bridge_of(number)
    links = [path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith((f"{bridge}n", bridge))]
    used = {namespace_of(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    own = [link for link in links if link == bridge or link.startswith(f"{bridge}n")]
    return [*own, *mounts_below(folder), *([str(folder)] if folder.exists() else []), *(used & namespaces)]


def namespace_of(process: Path) -> str:
    try:
        return str((process / "ns" / "net").readlink())
    except OSError:
        return ""


def test_four_nodes_are_up_soon_and_leave_nothing() -> None:
    begun = time.monotonic()
    with Cluster(4) as cluster:
        took = time.monotonic() - begun
        number, folder = cluster.record.number, cluster.folder
        assert [ssh(cluster, node, "hostname") for node in cluster.nodes] == [node.name for node in cluster.nodes]
        spaces = {namespace_of(Path(f"/proc/{node.pid}")) for node in cluster.nodes}
        assert len(spaces) == 4
        assert len(left_of(number, folder, spaces)) > 10
    assert took < 60
    assert left_of(number, folder, spaces) == []


def test_a_killed_owner_takes_its_nodes_with_it_and_the_rest_is_cleared_away_next_time() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        number, folder, *pids = owner.stdout.readline().split()
        spaces = {namespace_of(Path(f"/proc/{pid}")) for pid in pids}
        owner.send_signal(signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the nodes' end", str)
    Cluster.registry.clear_stale()
    assert left_of(int(number), Path(folder), spaces) == []


def test_a_number_that_is_in_use_without_a_record_is_left_alone(session_cluster: Cluster, tmp_path: Path) -> None:
    cleared = list[Record]()
    assert Registry(tmp_path, cleared.append, lambda number: number < 2).claim(1).number == 2
    assert cleared == [] and network.bridge_exists(session_cluster.record.number)


def test_a_dead_cluster_that_cannot_be_cleared_away_costs_its_number_alone(tmp_path: Path) -> None:
    def refused(record: Record) -> None:
        raise CommandFailed("still mounted")

    (tmp_path / "0").mkdir()
    assert Registry(tmp_path, refused).claim(1).number == 1


def test_a_cluster_by_hand_is_held_told_of_and_taken_away() -> None:
    def cluster(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "tests.cluster", *words]
        return subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=30, check=False)

    message = cluster("up", "2", "--detach", "--bare")
    assert "FLIGHTDECK_SSH_CONFIG=" in message.stdout, message.stderr
    number = message.stdout.split()[1].rstrip(":")
    try:
        assert cluster("--cluster", number, "power-off", "bea").returncode == 0
        assert [line.split() for line in cluster("list").stdout.splitlines() if f"10.77.{number}.3" in line] == [
            ["bea", f"bea@10.77.{number}.3", "off"]
        ]
        assert cluster("--cluster", number, "power-on", "bea").returncode == 0
        assert cluster("--cluster", number, "run", "bea", "--", "hostname").stdout == "bea\n"
    finally:
        assert cluster("--cluster", number, "down").returncode == 0
    assert not Path("/run/flightdeck-cluster", number).exists()
