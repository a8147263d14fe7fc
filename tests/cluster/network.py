"""The cables: one bridge per cluster, one veth pair per node, fixed addresses.

A node's end lies in its own network namespace and goes with it; the head has the bridge itself."""

from __future__ import annotations

import socket

from tests.cluster.command import attempt, command, in_batch
from tests.cluster.specs import FIRST_HOST, address, head_address, mac, subnet

PREFIX = "fdk"

PROMPT = "quickack 1"
"""Acknowledge at once: delayed acknowledgements add 90 ms to every login, and nothing to a test."""


def bridge_of(cluster: int) -> str:
    """The name of a cluster's bridge, at most 15 characters as the kernel demands."""
    return f"{PREFIX}{cluster}"


def port_of(cluster: int, index: int) -> str:
    """The name of the bridge's end of a node's cable."""
    return f"{PREFIX}{cluster}n{index}"


def bridge_exists(cluster: int) -> bool:
    return bridge_of(cluster) in {name for _, name in socket.if_nameindex()}


def lay_bridge(cluster: int) -> None:
    """Make the bridge and give the head its address on it."""
    bridge = bridge_of(cluster)
    in_batch(
        [
            f"link add {bridge} address {mac(cluster, 1, 1)} type bridge stp_state 0 forward_delay 0",
            f"addr add {head_address(cluster)}/24 dev {bridge} noprefixroute",
            f"link set {bridge} up",
            f"route add {subnet(cluster)} dev {bridge} src {head_address(cluster)} {PROMPT}",
        ]
    )


def plug_in(cluster: int, index: int, pid: int) -> None:
    """Lay the cable from the bridge to the network namespace of `pid`, and configure both ends."""
    port, host = port_of(cluster, index), FIRST_HOST + index
    node_end, bridge_end = mac(cluster, host, 0), mac(cluster, host, 1)
    in_batch(
        [
            f"link add {port} address {bridge_end} type veth peer name eth0 address {node_end} netns {pid}",
            f"link set {port} master {bridge_of(cluster)} up",
        ]
    )
    inside = [
        "link set lo up",
        f"addr add {address(cluster, index)}/24 dev eth0 noprefixroute",
        "link set eth0 up",
        f"route add {subnet(cluster)} dev eth0 src {address(cluster, index)} {PROMPT}",
        f"route add default via {head_address(cluster)}",
    ]
    command("nsenter", "-t", str(pid), "-n", "ip", "-batch", "-", stdin="\n".join(inside) + "\n")


def unplug(cluster: int, index: int) -> None:
    """Take the cable away, if it is there: nothing of the node's gets out any more."""
    attempt("ip", "link", "del", port_of(cluster, index))


def set_link(cluster: int, index: int, *, up: bool) -> None:
    """Pull or plug the cable at the bridge's end; the node sees its carrier go or come."""
    command("ip", "link", "set", port_of(cluster, index), "up" if up else "down")


def clear_away(cluster: int) -> None:
    """Remove every link of the cluster that is still there."""
    ours = (bridge_of(cluster), f"{bridge_of(cluster)}n")
    for line in attempt("ip", "-brief", "link").stdout.splitlines():
        name = line.split()[0].split("@")[0]
        if name == ours[0] or (name.startswith(ours[1]) and name.removeprefix(ours[1]).isdigit()):
            attempt("ip", "link", "del", name)
