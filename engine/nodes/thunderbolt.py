"""Thunderbolt ports of a Mac and who is at their other end: `system_profiler SPThunderboltDataType -json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.models import ThunderboltPort
from engine.nodes.words import document, rows, word

_RECEPTACLE = re.compile(r"receptacle_\d{1,2}_tag")
_DOMAIN = "domain_uuid_key"
_DEPTH = 12
"""A chain of Thunderbolt has at most 6 devices."""
PORT_LIMIT = 32


def thunderbolt_ports(system_profiler: str, devices: Mapping[str, str]) -> tuple[ThunderboltPort, ...]:
    """One for each bus that can be at the end of a cable between computers; `devices` is receptacle → interface.

    A peer is what has a domain of its own: displays, docks and disks have none. It may lie behind a hub, which nests it
    in `_items`.
    """
    report = document(system_profiler)
    buses = rows(report.get("SPThunderboltDataType")) if isinstance(report, dict) else []
    found = []
    for bus in buses[:PORT_LIMIT]:
        domain = word(bus.get(_DOMAIN), 64)
        if domain is None:
            continue
        tag = _receptacle(bus)
        receptacle = word(tag.get("receptacle_id_key"), 8)
        peer: dict[str, Any] = next(_computers(bus, _DEPTH), {})
        found.append(
            ThunderboltPort(
                domain_uuid=domain,
                receptacle=receptacle,
                device=devices.get(receptacle or ""),
                peer_uuid=word(peer.get(_DOMAIN), 64),
                peer_name=word(peer.get("_name"), 64),
                speed=word(tag.get("current_speed_key"), 40),
            )
        )
    return tuple(sorted(found, key=lambda port: (port.device or "~", port.receptacle or "", port.domain_uuid)))


def _receptacle(bus: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in sorted(bus):
        tag = bus[key]
        if _RECEPTACLE.fullmatch(key) and isinstance(tag, dict):
            return tag
    return {}


def _computers(item: Mapping[str, Any], depth: int) -> Iterator[dict[str, Any]]:
    """Nearest first."""
    inner = rows(item.get("_items"), PORT_LIMIT)
    yield from (entry for entry in inner if isinstance(entry.get(_DOMAIN), str))
    if depth > 0:
        for entry in inner:
            yield from _computers(entry, depth - 1)
