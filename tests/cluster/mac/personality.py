"""Which Macs the nodes of a test cluster are, and how they are cabled: data files, joined into a document for each node
from which its commands answer (tests/cluster/mac/commands.py)."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PERSONALITIES, CABLINGS = (
    tuple(sorted(file.stem for file in (FOLDER / name).glob("*.toml"))) for name in ("personalities", "cablings")
)
USUAL, USUAL_CABLES = "m4-max-128", "mesh"

Document = dict[str, Any]


def documents(names: Sequence[str], personalities: Sequence[str], cabling: str) -> list[Document]:
    """A document for each node; of fewer personalities than nodes each serves several, in turn. Cables take a Mac's
    last receptacle first: one of a Mac Studio's first ones has no RDMA. Raises ValueError, LookupError."""
    found = [document(number, name, personalities[number % len(personalities)]) for number, name in enumerate(names)]
    cables = _read("cablings", cabling)
    free = [list(reversed(one["ports"])) for one in found]
    ends: dict[str, Document] = {}
    """Port → the one at the other end of its cable."""
    for a, b in cables["cables"]:
        if max(a, b) >= len(names):
            continue
        for end in (a, b):
            if not free[end]:
                raise ValueError(f"{names[end]} ({found[end]['model']}) has too few Thunderbolt ports for {cabling!r}")
        pair = (a, free[a].pop(0)), (b, free[b].pop(0))
        for (_, port), (other, peer) in (pair, pair[::-1]):
            ends[port["uuid"]] = peer
            about = {name: found[other][name] for name in ("name", "model", "product")}
            port["peer"] = {"uuid": peer["uuid"], "device": peer["device"], **about}
    if cables["addresses"] == "subnets":
        _give_subnets(found, ends)
    else:
        for number, one in enumerate(found):
            one["bridge"] = {"up": True, "ip": f"169.254.{40 + number}.{7 + number}/16"}
    for port in (port for one in found for port in one["ports"] if port["peer"]):
        port["peer"]["ip"] = ends[port["uuid"]]["ip"]
    return found


def _give_subnets(found: list[Document], ends: dict[str, Document]) -> None:
    """A /30 for each cable, in the order in which MLX's distributed_config gives them out."""
    subnets = 0
    for one in found:
        for port in sorted(one["ports"], key=lambda port: str(port["device"])):
            if port["peer"] and port["ip"] is None:
                for number, end in enumerate((port, ends[port["uuid"]]), 1):
                    end["ip"] = f"192.168.{subnets // 64}.{subnets % 64 * 4 + number}/30"
                subnets += 1


def lacks(mac: Document) -> set[str]:
    """Commands that a Mac may have and this one has not."""
    return {
        *(() if mac["macmon"] else ("macmon",)),
        *(() if "rdma" in mac else ("rdma_ctl", "ibv_devices", "ibv_devinfo")),
    }


def document(number: int, name: str, personality: str) -> Document:
    """A Mac with nothing plugged in, and its Thunderbolt bridge down."""
    kind = _read("personalities", personality)
    ports: list[Document] = [
        {
            "receptacle": str(at),
            "device": device,
            "uuid": f"{number:08X}-0000-4000-8000-{at:012X}",
            "peer": None,
            "ip": None,
        }
        for at, device in enumerate(kind["receptacles"], 1)
    ]
    return {**kind, "number": number, "name": name, "ip": f"10.0.0.{number + 1}/24", "ports": ports} | {
        "bridge": {"up": False, "ip": None}
    }


@cache
def _read(folder: str, name: str) -> Document:
    file = FOLDER / folder / f"{name}.toml"
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        there = ", ".join(sorted(each.stem for each in file.parent.glob("*.toml")))
        raise LookupError(f"{name!r} is none of the {folder}: {there}") from None
