"""What can happen to a node's network: packet filter rules and a slower link, all inside the node's own namespace."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

SSH_PORT = 22


class Traffic(StrEnum):
    """What of a node's traffic a fault concerns; never its loopback."""

    EVERYTHING = "everything"
    SSH = "ssh"
    """To and from its sshd."""
    RING = "ring"
    """All TCP between unprivileged ports: the ranks' own, whatever ports they took."""


def matches(traffic: Traffic, peer: str | None) -> list[str]:
    """The two matches, incoming and outgoing, of `traffic` with `peer` (an address), or with everybody."""
    kinds = {
        Traffic.EVERYTHING: ("", ""),
        Traffic.SSH: (f"-p tcp --dport {SSH_PORT}", f"-p tcp --sport {SSH_PORT}"),
        # Not `! --sport 22 ! --dport 22`: iptables 1.8.9 on nftables lets that match packets with one port of 22.
        Traffic.RING: ("-p tcp --sport 1024: --dport 1024:",) * 2,
    }
    incoming, outgoing = kinds[traffic]
    return [
        f"INPUT ! -i lo {f'-s {peer}' if peer else ''} {incoming}",
        f"OUTPUT ! -o lo {f'-d {peer}' if peer else ''} {outgoing}",
    ]


def drop(traffic: Traffic, peer: str | None) -> list[str]:
    """Rules of a black hole: packets vanish both ways, and nobody is told."""
    return [f"{match} -j DROP" for match in matches(traffic, peer)]


def lose(share: float, traffic: Traffic, peer: str | None) -> list[str]:
    """Rules that lose this share (0 to 1) of the packets, each way."""
    return [f"{match} -m statistic --mode random --probability {share:.4f} -j DROP" for match in matches(traffic, peer)]


def reject(traffic: Traffic, peer: str | None) -> list[str]:
    """Rules that answer every TCP packet with a reset, the resets themselves apart."""
    tcp = [match if "-p tcp" in match else f"{match} -p tcp" for match in matches(traffic, peer)]
    return [f"{match} ! --tcp-flags RST RST -j REJECT --reject-with tcp-reset" for match in tcp]


def inserted(rules: Sequence[str]) -> str:
    """Input of `iptables-restore --noflush` that puts `rules` before those that are there."""
    return "\n".join(["*filter", *(f"-I {rule}" for rule in rules), "COMMIT"]) + "\n"


NO_RULES = "*filter\n:INPUT ACCEPT [0:0]\n:OUTPUT ACCEPT [0:0]\nCOMMIT\n"
"""Input of `iptables-restore` that takes all rules away, at once."""


def throttle(interface: str, rate: str) -> list[str]:
    """Arguments of the command that lets `interface` send no faster than `rate` (as tc writes it: 10mbit)."""
    return ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate, "burst", "32k", "latency", "100ms"]


def unthrottle(interface: str) -> list[str]:
    """Arguments of the command that undoes `throttle`; it fails where there was nothing to undo."""
    return ["tc", "qdisc", "del", "dev", interface, "root"]
