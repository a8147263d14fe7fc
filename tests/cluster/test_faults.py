"""Each fault does what it says, to that node alone, and healing undoes it."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.faults import Traffic
from tests.cluster.machine import until
from tests.cluster.node import Node
from tests.cluster.test_nodes import ssh

BRIEF_S = 0.3
"""How long a node is listened to that must not answer; a healthy one answers in 5 ms."""


def answers(node: Node) -> bool:
    return node.greeting(5).startswith("SSH-")


def is_silent(node: Node) -> bool:
    return node.greeting(BRIEF_S) == ""


def listening(node: Node, port: int) -> subprocess.Popen[bytes]:
    """A rank's port on the node: it says hello to whoever comes."""
    program = f"import socket; s = socket.create_server(('', {port}))\nwhile True: s.accept()[0].sendall(b'hello')"
    entered = [*node.inside(), "python3", "-c", program]
    process = subprocess.Popen(entered)
    until(lambda: output(node, port) == b"hello", "the rank's port", str)
    return process


def output(node: Node, port: int) -> bytes:
    try:
        with socket.create_connection((node.ip, port), timeout=BRIEF_S) as connection:
            return connection.recv(16)
    except OSError:
        return b""


@contextmanager
def held(node: Node) -> Iterator[None]:
    """A connection that has been greeted and does not log in. The node's sshd may still have to notice that an earlier
    one is gone."""
    while True:
        with socket.create_connection((node.ip, node.port), timeout=5) as connection:
            if connection.recv(64).startswith(b"SSH-"):
                yield
                return


@contextmanager
def session(cluster: Cluster, node: Node) -> Iterator[subprocess.Popen[str]]:
    """An open ssh session that echoes lines."""
    argv = ["ssh", "-F", str(cluster.ssh_config), node.ssh, "cat"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as cat:
        assert echoes(cat, "first")
        yield cat
        cat.kill()


def echoes(cat: subprocess.Popen[str], line: str) -> bool:
    assert cat.stdin is not None
    assert cat.stdout is not None
    cat.stdin.write(f"{line}\n")
    cat.stdin.flush()
    return cat.stdout.readline() == f"{line}\n"


def test_a_cut_node_is_a_black_hole_and_the_others_are_not(cluster: Cluster) -> None:
    ana, bea = cluster.nodes[:2]
    ana.cut()
    assert is_silent(ana)
    assert answers(bea)
    ana.heal()
    assert answers(ana)


def test_ssh_and_ring_are_cut_apart(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    rank = listening(ana, 40123)
    try:
        ana.cut(Traffic.RING)
        assert output(ana, 40123) == b""
        assert answers(ana)
        ana.flush_rules()
        ana.cut(Traffic.SSH)
        assert is_silent(ana)
        until(lambda: output(ana, 40123) == b"hello", "the rank's port", str)
    finally:
        rank.kill()
        rank.wait()


def test_two_nodes_are_cut_from_one_another_only(cluster: Cluster) -> None:
    ana, bea, cyd = cluster.nodes[:3]
    ana.cut(peer=bea.ip)
    knock = ["bash", "-c", f"</dev/tcp/{ana.ip}/22"]
    assert bea.run(["timeout", "0.3", *knock]).returncode == 124
    assert cyd.run(["timeout", "10", *knock]).returncode == 0
    assert answers(ana)


def test_a_session_outlasts_a_short_cut(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    with session(cluster, ana) as cat:
        ana.cut()
        assert is_silent(ana)
        assert cat.stdin is not None
        cat.stdin.write("into the dark\n")
        cat.stdin.flush()
        ana.flush_rules()
        assert cat.stdout is not None
        assert cat.stdout.readline() == "into the dark\n"
        assert echoes(cat, "and on")


def test_rejected_connections_fail_at_once(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.reject()
    with socket.socket() as knock:
        knock.settimeout(5)
        assert knock.connect_ex((ana.ip, 22)) == errno.ECONNREFUSED
    ana.heal()
    assert answers(ana)


def test_open_connections_are_reset(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    if not cluster.isolated:
        ana.reset_ssh()
    with socket.create_connection((ana.ip, ana.port), timeout=5) as connection:
        assert connection.recv(64).startswith(b"SSH-")
        ana.reset_ssh()
        with pytest.raises(ConnectionResetError):
            connection.recv(64)
    assert answers(ana)


def test_a_lossy_link_loses_its_share_of_packets(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.lossy(1.0)
    assert is_silent(ana)
    ana.heal()
    ana.lossy(0.5)
    with socket.socket(type=socket.SOCK_DGRAM) as head:
        head.bind((cluster.head, 0))
        head.setblocking(False)
        ana.run(["bash", "-c", f"for i in {{1..200}}; do echo > /dev/udp/{cluster.head}/{head.getsockname()[1]}; done"])
        arrived = 0
        with pytest.raises(BlockingIOError):
            while head.recv(16):
                arrived += 1
    assert 50 < arrived < 150


def test_a_pulled_cable_is_seen_on_the_node(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.link_down()
    assert ana.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    assert is_silent(ana)
    ana.link_up()
    assert answers(ana)
    assert ana.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "1\n"


def test_a_slow_link_takes_its_time(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.slow_link("20mbit")
    begun = time.monotonic()
    assert len(ssh(cluster, ana, "head -c 1000000 /dev/zero | tr '\\0' x")) == 1_000_000
    assert time.monotonic() - begun > 0.35  # 8 Mbit at 20 Mbit/s


def test_a_detour_takes_its_time_each_way(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    cluster.delay(ana, 0.03)
    with session(cluster, ana) as cat:
        begun = time.monotonic()
        assert echoes(cat, "there and back")
        assert time.monotonic() - begun >= 0.06
    cluster.hasten(ana)
    assert ssh(cluster, ana, "echo direct") == "direct"


def test_a_stopped_sshd_keeps_its_sessions(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    with session(cluster, ana) as cat:
        ana.stop_sshd()
        with socket.socket() as knock:
            assert knock.connect_ex((ana.ip, ana.port)) == errno.ECONNREFUSED
        assert echoes(cat, "still here")
        ana.start_sshd()
        assert answers(ana)
        assert echoes(cat, "and still")


def test_a_frozen_sshd_accepts_and_says_nothing(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.freeze_sshd()
    with socket.create_connection((ana.ip, ana.port), timeout=BRIEF_S) as connection, pytest.raises(TimeoutError):
        connection.recv(64)
    ana.heal()
    assert answers(ana)


def test_startups_are_limited_as_told(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.configure_sshd(MaxStartups=1)
    with held(ana):
        assert ana.greeting(5) == "Exceeded MaxStartups\r\n"
    ana.heal()
    assert answers(ana)


def test_a_changed_host_key_is_refused_until_it_is_the_old_one_again(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    old = ana.host_key
    assert ana.change_host_key() == ana.host_key != old
    with pytest.raises(subprocess.CalledProcessError) as refused:
        ssh(cluster, ana, "true")
    assert "Host key verification failed" in refused.value.stderr
    ana.heal()
    assert ana.host_key == old
    assert ssh(cluster, ana, "echo known") == "known"


def test_a_noisy_shell_talks_before_every_command(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.noisy_bashrc()
    assert ssh(cluster, ana, "echo mine").splitlines()[0::2] == ["Welcome to this Mac.", "mine"]
    ana.heal()
    assert ssh(cluster, ana, "echo mine") == "mine"


def test_a_full_disk_takes_nothing_more(cluster: Cluster) -> None:
    ana = cluster.nodes[0]
    ana.fill_disk(leave=8192)
    full = ana.run(["sh", "-c", "head -c 100000 /dev/zero > ~/more"])
    assert "No space left on device" in full.stderr
    ana.heal()
    assert ana.run(["sh", "-c", "head -c 100000 /dev/zero > ~/more && rm ~/more"]).returncode == 0
