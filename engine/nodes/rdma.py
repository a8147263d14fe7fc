"""RDMA on a node: `rdma_ctl status`, `ibv_devices`, `ibv_devinfo -v` of macOS, /sys/class/infiniband of Linux."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engine.models import RdmaDevice
from engine.nodes.words import rows, word

LIMIT = 64
_NAME = re.compile(r"[A-Za-z][\w.-]{0,31}")
_HCA = re.compile(r"^hca_id:\s*(\S{1,32})\s*$")
_STATE = re.compile(r"^\s+state:\s*(PORT_[A-Z_]{1,24})\b")
_GID = re.compile(r"^\s+GID\[\s*\d{1,4}\]:\s*([0-9a-fA-F:.]{2,45})")
_MAPPED = re.compile(r"(?:::|(?:0{1,4}:){5})ffff:(?P<address>[0-9a-f.:]{3,15})", re.IGNORECASE)
_SYSFS_STATE = re.compile(r"\d: (INIT|ACTIVE|DOWN|ARMED)\b")


def enabled(rdma_ctl: str | None) -> bool | None:
    """None where there is no such command, or it says something else."""
    return {"enabled": True, "disabled": False}.get((rdma_ctl or "").strip().lower())


def names(ibv_devices: str) -> tuple[str, ...]:
    """Device names of `ibv_devices`, which prints a table with two lines of heading."""
    words = (line.split() for line in ibv_devices.splitlines())
    rows = (row for row in words if len(row) == 2 and re.fullmatch(r"[0-9a-f]{16}", row[1]) and _NAME.fullmatch(row[0]))
    return tuple(sorted({row[0] for row in rows}))[:LIMIT]


def mac_devices(ibv_devices: str, ibv_devinfo: str) -> tuple[RdmaDevice, ...]:
    """By name. What ibv_devinfo did not tell (it can hang) is None."""
    states: dict[str, str] = {}
    gids: dict[str, list[str]] = {}
    device = ""
    for line in ibv_devinfo.splitlines():
        if head := _HCA.match(line):
            device = head[1] if _NAME.fullmatch(head[1]) else ""
        elif state := _STATE.match(line):
            states.setdefault(device, state[1])
        elif gid := _GID.match(line):
            gids.setdefault(device, []).append(gid[1])
    known = sorted({*names(ibv_devices), *states, *gids} - {""})
    return tuple(
        RdmaDevice(
            name=name,
            port_state=states.get(name),
            ipv4_gid=any(is_ipv4_gid(gid) for gid in gids[name]) if name in gids else None,
        )
        for name in known[:LIMIT]
    )


def linux_devices(infiniband: object) -> tuple[RdmaDevice, ...]:
    """From the script's list: name, state ("4: ACTIVE") and GIDs of each device's first port."""
    found = []
    for row in rows(infiniband, LIMIT):
        name, state, gids = word(row.get("name"), 32), row.get("state"), row.get("gids")
        if name is None or not _NAME.fullmatch(name):
            continue
        match = _SYSFS_STATE.match(state) if isinstance(state, str) else None
        texts: Sequence[object] = gids if isinstance(gids, list) else ()
        found.append(
            RdmaDevice(
                name=name,
                port_state=f"PORT_{match[1]}" if match else None,
                ipv4_gid=any(isinstance(gid, str) and is_ipv4_gid(gid) for gid in texts) if texts else None,
            )
        )
    return tuple(found)


def is_ipv4_gid(gid: str) -> bool:
    """Whether it stands for an IPv4 address: `::ffff:a.b.c.d`, also written out in full."""
    return _MAPPED.fullmatch(gid.strip()) is not None
