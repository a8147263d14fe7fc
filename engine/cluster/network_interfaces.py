"""Parsers for a node's network interfaces (`ifconfig -a`, `networksetup -listallhardwareports`, `ip -j addr`) and
its RDMA devices (`rdma_ctl status`, `ibv_devices`, `ibv_devinfo -v`, /sys/class/infiniband).

macOS translates the names of its hardware ports ("Thunderbolt Bridge", "雷雳网桥"), so a port is identified by its
device: the bridge it is a member of, the RDMA device named after it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from engine.models import Interface, RdmaDevice
from engine.security.sanitise import json_objects, text_or_none

INTERFACE_LIMIT = 96
"""Interfaces kept of one node."""
_HEAD = re.compile(r"^([A-Za-z][\w.-]{0,31}): flags=")
_INET = re.compile(r"^\s+inet (\S{1,15})(?: --> \S+)? netmask 0x([0-9a-fA-F]{8})\b")
_MEMBER = re.compile(r"^\s+member: ([\w.-]{1,32})\b")
_STATUS = re.compile(r"^\s+status: (\w{1,32})")
_DEVICE = re.compile(r"[A-Za-z][\w.@-]{0,31}")
_NUMBERED = re.compile(r"(?P<words>.*\S)\s*?(?P<number>\d{1,3})")
_THUNDERBOLT = "Thunderbolt"


@dataclass
class _ParsedInterface:
    ipv4: list[str] = field(default_factory=list)
    active: bool | None = None
    members: list[str] = field(default_factory=list)


def hardware_ports(networksetup: str) -> dict[str, str]:
    """Device → name of its port in the user's language."""
    ports: dict[str, str] = {}
    name = None
    # A line that does not end has been cut off.
    for line in networksetup.rpartition("\n")[0].splitlines():
        # The keys are never translated.
        key, _, value = line.partition(": ")
        if key == "Hardware Port":
            name = text_or_none(value)
        elif key == "Device" and name is not None and _DEVICE.fullmatch(value.strip()) and len(ports) < INTERFACE_LIMIT:
            ports.setdefault(value.strip(), name)
            name = None
    return ports


def mac_interfaces(ifconfig: str, ports: Mapping[str, str]) -> tuple[Interface, ...]:
    """The interfaces of `ifconfig -a`, with the port names of `hardware_ports`."""
    seen = _ifconfig(ifconfig)
    bridges = {member: name for name, entry in seen.items() for member in entry.members}
    for device in ports:
        seen.setdefault(device, _ParsedInterface())
    interfaces = [
        Interface(
            name=name, ipv4=tuple(entry.ipv4), active=entry.active, bridge=bridges.get(name), port_name=ports.get(name)
        )
        for name, entry in seen.items()
        # A Mac has a dozen tunnels and radios besides.
        if entry.ipv4 or entry.members or name in ports or name in bridges
    ]
    return tuple(sorted(interfaces, key=lambda interface: interface.name)[:INTERFACE_LIMIT])


def _ifconfig(text: str) -> dict[str, _ParsedInterface]:
    seen: dict[str, _ParsedInterface] = {}
    entry = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            entry = seen.setdefault(head[1], _ParsedInterface())
        elif entry is None:
            continue
        elif (inet := _INET.match(line)) and len(entry.ipv4) < 16:
            if address := _with_prefix(inet[1], int(inet[2], 16).bit_count()):
                entry.ipv4.append(address)
        elif (member := _MEMBER.match(line)) and len(entry.members) < INTERFACE_LIMIT:
            entry.members.append(member[1])
        elif status := _STATUS.match(line):
            entry.active = status[1] == "active"
    return seen


def linux_interfaces(ip: object) -> tuple[Interface, ...]:
    """The interfaces of `ip -j addr`, parsed."""
    interfaces = []
    for row in json_objects(ip):
        name, state, master = row.get("ifname"), row.get("operstate"), row.get("master")
        if not isinstance(name, str) or not _DEVICE.fullmatch(name):
            continue
        addresses = [
            address
            for entry in json_objects(row.get("addr_info"), 16)
            if entry.get("family") == "inet" and (address := _with_prefix(entry.get("local"), entry.get("prefixlen")))
        ]
        interfaces.append(
            Interface(
                name=name,
                ipv4=tuple(addresses),
                # The loopback and tunnels report UNKNOWN.
                active={"UP": True, "DOWN": False, "LOWERLAYERDOWN": False}.get(str(state)),
                bridge=master if isinstance(master, str) and _DEVICE.fullmatch(master) else None,
            )
        )
    return tuple(sorted(interfaces, key=lambda interface: (not interface.ipv4, interface.name))[:INTERFACE_LIMIT])


def _with_prefix(address: object, prefix: object) -> str | None:
    try:
        return str(ipaddress.IPv4Interface(f"{address}/{prefix}"))
    except ValueError:
        return None


def thunderbolt_devices(
    ports: Mapping[str, str], interfaces: Sequence[Interface], rdma: Collection[str] = ()
) -> dict[str, str]:
    """Receptacle ("1", "2", …) → device, from the numbered hardware ports.

    A family of names that differ only in their number is Thunderbolt's when it is named so, or, in another language,
    when one of its devices is a member of a bridge or has an RDMA device."""
    evident = {device.removeprefix("rdma_") for device in rdma}
    evident |= {interface.name for interface in interfaces if interface.bridge is not None}
    families: dict[str, dict[str, str]] = {}
    for device, name in ports.items():
        if match := _NUMBERED.fullmatch(name):
            families.setdefault(match["words"], {}).setdefault(str(int(match["number"])), device)
    if _THUNDERBOLT in families:
        return families[_THUNDERBOLT]
    family = max(families.values(), key=lambda family: len(evident & set(family.values())), default={})
    return family if evident & set(family.values()) else {}


RDMA_DEVICE_LIMIT = 64
_HCA = re.compile(r"^hca_id:\s*(\S{1,32})\s*$")
_STATE = re.compile(r"^\s+state:\s*(PORT_[A-Z_]{1,24})\b")
_GID = re.compile(r"^\s+GID\[\s*\d{1,4}\]:\s*([0-9a-fA-F:.]{2,45})")
_SYSFS_STATE = re.compile(r"\d: (INIT|ACTIVE|DOWN|ARMED)\b")


def rdma_enabled(rdma_ctl: str | None) -> bool | None:
    """None where there is no such command, or its output is unknown."""
    return {"enabled": True, "disabled": False}.get((rdma_ctl or "").strip().lower())


def rdma_device_names(ibv_devices: str) -> tuple[str, ...]:
    rows = (line.split() for line in ibv_devices.splitlines())
    names = {row[0] for row in rows if len(row) == 2 and re.fullmatch(r"[0-9a-f]{16}", row[1])}
    return tuple(sorted(filter(_DEVICE.fullmatch, names)))[:RDMA_DEVICE_LIMIT]


def whole_rdma_table(ibv_devices: str, ibv_devinfo: str = "") -> bool:
    """Nothing of the table is missing, as far as can be seen: two heading lines, a device in each other one, and those
    that `ibv_devinfo` has."""
    heads, rows = ibv_devices.split("\n")[:2], ibv_devices.split("\n")[2:]
    names, others = rdma_device_names(ibv_devices), {*re.findall(r"^hca_id:\s*(\S+)", ibv_devinfo, re.MULTILINE)}
    headed = [head.split() for head in heads] == [["device", "node", "GUID"], ["------", "-" * 16]]
    return headed and rows[-1:] == [""] and len(rows) - 1 == len(names) and others <= {*names}


def mac_rdma_devices(ibv_devices: str, ibv_devinfo: str) -> tuple[RdmaDevice, ...]:
    """Sorted by name. Values missing from ibv_devinfo (it can hang) are None."""
    states: dict[str, str] = {}
    gids: dict[str, list[str]] = {}
    device = ""
    for line in ibv_devinfo.splitlines():
        if head := _HCA.match(line):
            device = head[1] if _DEVICE.fullmatch(head[1]) else ""
        elif state := _STATE.match(line):
            states.setdefault(device, state[1])
        elif gid := _GID.match(line):
            gids.setdefault(device, []).append(gid[1])
    if not ibv_devinfo.endswith("\n\n") and not _has_ipv4_gid(gids.get(device)):
        # A blank line ends each device: the rest of this one's table has been cut off.
        gids.pop(device, None)
    names = sorted({*rdma_device_names(ibv_devices), *states, *gids} - {""})
    return tuple(
        RdmaDevice(name=name, port_state=states.get(name), ipv4_gid=_has_ipv4_gid(gids.get(name)))
        for name in names[:RDMA_DEVICE_LIMIT]
    )


def linux_rdma_devices(infiniband: object) -> tuple[RdmaDevice, ...]:
    """From the probe's list: name, state ("4: ACTIVE") and GIDs of each device's first port."""
    devices = []
    for row in json_objects(infiniband, RDMA_DEVICE_LIMIT):
        name = text_or_none(row.get("name"), 32)
        if name is None or not _DEVICE.fullmatch(name):
            continue
        state = _SYSFS_STATE.match(str(row.get("state")))
        port_state = f"PORT_{state[1]}" if state else None
        devices.append(RdmaDevice(name=name, port_state=port_state, ipv4_gid=_has_ipv4_gid(row.get("gids"))))
    return tuple(devices)


def _has_ipv4_gid(gids: object) -> bool | None:
    return any(is_ipv4_gid(str(gid)) for gid in gids) if isinstance(gids, list) and gids else None


def is_ipv4_gid(gid: str) -> bool:
    """An IPv4 address is `::ffff:a.b.c.d`, also written in full."""
    try:
        return ipaddress.IPv6Address(gid.strip()).ipv4_mapped is not None
    except ValueError:
        return False
