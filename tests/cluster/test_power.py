"""Pulling a node's plug, and what is the same and what is another when it is back."""

from __future__ import annotations

import socket

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.machine import until
from tests.cluster.test_nodes import ssh

ESTABLISHED = 1
"""TCP's state, the first byte of Linux's struct tcp_info."""
BOOT_ID = "/proc/sys/kernel/random/boot_id"


def test_power_off_says_no_word_and_power_on_is_another_boot_of_the_same_node(isolated_cluster: Cluster) -> None:
    ana = isolated_cluster.nodes[0]
    before = ana.read(BOOT_ID)
    ana.write("~/note", "kept\n")
    ssh(isolated_cluster, ana, "FLIGHTDECK_NONCE=off nohup setsid sleep 60 >/dev/null 2>&1 </dev/null & echo")
    until(lambda: bool(ana.processes("off")), "the process", str)
    with socket.create_connection((ana.ip, ana.port), timeout=5) as connection:
        assert connection.recv(64).startswith(b"SSH-")
        ana.power_off()
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        assert ana.pid is None
        assert ana.processes("off") == []
        assert ana.read("~/note") == "kept\n"
        ana.power_on()
        connection.sendall(b"anybody there?\n")
        with pytest.raises(ConnectionResetError):
            connection.recv(64)
    note, after = ssh(isolated_cluster, ana, f"cat ~/note {BOOT_ID}").split()
    assert note == "kept"
    assert f"{after}\n" == ana.read(BOOT_ID) != before
    assert len({node.read(BOOT_ID) for node in isolated_cluster.nodes}) == 4


def test_a_node_that_is_off_is_on_again_for_the_next_test(isolated_cluster: Cluster) -> None:
    bea = isolated_cluster["bea"]
    bea.power_off()
    isolated_cluster.heal()
    assert ssh(isolated_cluster, bea, "echo back") == "back"
