"""Network interfaces: macOS's `ifconfig -a` and `networksetup -listallhardwareports`, Linux's `ip -j addr`.

macOS names its hardware ports in the language of its user ("Thunderbolt Bridge", "雷雳网桥"), so what a port is follows
from its device: which bridge it is a member of, which RDMA device is named after it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from engine.models import Interface
from engine.nodes.words import document, rows, whole, word

LIMIT = 96
"""Interfaces kept of one node."""
_HEAD = re.compile(r"^([A-Za-z][\w.-]{0,31}): flags=")
_INET = re.compile(r"^\s+inet (\S{1,15})(?: --> \S+)? netmask 0x([0-9a-fA-F]{8})\b")
_MEMBER = re.compile(r"^\s+member: ([\w.-]{1,32})\b")
_STATUS = re.compile(r"^\s+status: (\w{1,32})")
_DEVICE = re.compile(r"[A-Za-z][\w.@-]{0,31}")
_NUMBERED = re.compile(r"(?P<words>.*\S)\s*?(?P<number>\d{1,3})")
_THUNDERBOLT = "Thunderbolt"


@dataclass(frozen=True)
class HardwarePort:
    """One port of `networksetup -listallhardwareports`."""

    name: str
    """In the user's language."""
    device: str


@dataclass
class _Seen:
    ipv4: list[str] = field(default_factory=list)
    active: bool | None = None
    members: list[str] = field(default_factory=list)


def hardware_ports(networksetup: str) -> list[HardwarePort]:
    ports, name = [], None
    for line in networksetup.splitlines():
        key, colon, value = line.partition(": ")
        if not colon:
            continue
        # The keys are never translated.
        if key == "Hardware Port":
            name = word(value)
        elif key == "Device" and name is not None and _DEVICE.fullmatch(value.strip()):
            ports.append(HardwarePort(name, value.strip()))
            name = None
    return ports[:LIMIT]


def mac_interfaces(ifconfig: str, ports: Sequence[HardwarePort] = ()) -> tuple[Interface, ...]:
    """Those of `ifconfig -a`, with the names that networksetup knows for them."""
    seen = _ifconfig(ifconfig)
    bridges = {member: name for name, entry in seen.items() for member in entry.members}
    names = {port.device: port.name for port in ports}
    for device in names:
        seen.setdefault(device, _Seen())
    found = [
        Interface(
            name=name,
            ipv4=tuple(entry.ipv4),
            active=entry.active,
            bridge=bridges.get(name),
            port_name=names.get(name),
        )
        for name, entry in seen.items()
        # A Mac has a dozen tunnels and radios of its own besides.
        if entry.ipv4 or entry.members or name in names or name in bridges
    ]
    return tuple(sorted(found, key=lambda interface: interface.name)[:LIMIT])


def _ifconfig(text: str) -> dict[str, _Seen]:
    seen: dict[str, _Seen] = {}
    entry = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            entry = seen.setdefault(head[1], _Seen())
        elif entry is None:
            continue
        elif (inet := _INET.match(line)) and len(entry.ipv4) < 16:
            if address := _with_prefix(inet[1], int(inet[2], 16).bit_count()):
                entry.ipv4.append(address)
        elif (member := _MEMBER.match(line)) and len(entry.members) < LIMIT:
            entry.members.append(member[1])
        elif status := _STATUS.match(line):
            entry.active = status[1] == "active"
    return seen


def linux_interfaces(ip: object) -> tuple[Interface, ...]:
    """Those of `ip -j addr`, given as its text or as the list in it."""
    found = []
    for row in rows(document(ip) if isinstance(ip, str) else ip):
        name, state, master = row.get("ifname"), row.get("operstate"), row.get("master")
        if not isinstance(name, str) or not _DEVICE.fullmatch(name):
            continue
        addresses = [
            address
            for entry in rows(row.get("addr_info"), 16)
            if entry.get("family") == "inet" and (address := _with_prefix(entry.get("local"), entry.get("prefixlen")))
        ]
        found.append(
            Interface(
                name=name,
                ipv4=tuple(addresses),
                # The loopback and tunnels say UNKNOWN.
                active={"UP": True, "DOWN": False, "LOWERLAYERDOWN": False}.get(
                    state if isinstance(state, str) else ""
                ),
                bridge=master if isinstance(master, str) and _DEVICE.fullmatch(master) else None,
            )
        )
    return tuple(sorted(found, key=lambda interface: (not interface.ipv4, interface.name))[:LIMIT])


def _with_prefix(address: object, prefix: object) -> str | None:
    length = whole(prefix)
    try:
        return (
            f"{ipaddress.IPv4Address(address)}/{length}" if isinstance(address, str) and length in range(33) else None
        )
    except ValueError:
        return None


def thunderbolt_devices(
    ports: Sequence[HardwarePort], interfaces: Sequence[Interface], rdma: Collection[str] = ()
) -> dict[str, str]:
    """Receptacle ("1", "2", …) → device, from the numbered hardware ports.

    A family of names that differ in their number alone is Thunderbolt's when it is called so, or, in a language where
    it is not, when one of its devices is a bridge's member or has an RDMA device of its own.
    """
    evident = {device.removeprefix("rdma_") for device in rdma}
    evident |= {interface.name for interface in interfaces if interface.bridge is not None}
    families: dict[str, dict[str, str]] = {}
    for port in ports:
        if match := _NUMBERED.fullmatch(port.name):
            families.setdefault(match["words"], {}).setdefault(str(int(match["number"])), port.device)
    if _THUNDERBOLT in families:
        return families[_THUNDERBOLT]
    return max(
        (family for family in families.values() if evident & set(family.values())),
        key=lambda family: len(evident & set(family.values())),
        default={},
    )
