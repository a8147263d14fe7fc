"""Macs with Thunderbolt cables, as the commands of the test cluster's Macs print it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from engine.cluster.facts import read_facts
from engine.models import NodeFacts
from engine.node.probes.facts import MAC_COMMANDS
from tests.cluster.mac import personality
from tests.cluster.mac.commands import Mac, answer
from tests.cluster.mac.personality import Document, lacks

NOW = datetime(2026, 11, 21, tzinfo=UTC)
End = tuple[int, int]
"""(Mac, port), both from 0."""


@dataclass
class Macs:
    """How many, how many ports each has, which ends are joined, and what else hangs on the other ports."""

    ports: list[int]
    cables: list[tuple[End, End]]
    docks: set[End] = field(default_factory=set)
    strangers: set[End] = field(default_factory=set)
    devices: list[list[str]] = field(default_factory=list)
    """The device of each port, in the order of the receptacles; en3, en4, … where left out."""
    addresses: dict[str, str] = field(default_factory=dict)
    """ "mac0 en5" → "192.168.0.1/30"."""

    def __post_init__(self) -> None:
        self.devices = self.devices or [[f"en{3 + port}" for port in range(count)] for count in self.ports]

    @property
    def names(self) -> list[str]:
        return [f"mac{number}" for number in range(len(self.ports))]

    def joined(self, end: End) -> End | None:
        for a, b in self.cables:
            if end in (a, b):
                return b if end == a else a
        return None

    def document(self, mac: int) -> Document:
        """An M3 Ultra whose ports are those of `mac`."""
        ports = [self._port((mac, port)) for port in range(self.ports[mac])]
        return personality.document(mac, f"mac{mac}", "m3-ultra-512") | {"ports": ports}

    def _port(self, end: End) -> Document:
        mac, port = end
        device, joined = self.devices[mac][port], self.joined(end)
        peer = None
        if end in self.docks:
            peer = {"product": "Dock", "model": "Dock", "uuid": None}
        if end in self.strangers:
            peer = {"product": "MacBook", "model": "Mac16,1", "uuid": f"STRANGER-{mac}-{port}"}
        if joined is not None:
            peer = {"product": "Mac Studio", "model": "Mac15,14", "uuid": uuid(joined)}
        known = {"receptacle": str(port + 1), "device": device, "uuid": uuid(end), "peer": peer}
        return known | {"ip": self.addresses.get(f"mac{mac} {device}")}

    def thunderbolt(self, mac: int) -> str:
        return self.answers(mac)["thunderbolt"]

    def networksetup(self, mac: int) -> str:
        return self.answers(mac)["networksetup"]

    def facts(self, **changes: Any) -> list[NodeFacts]:
        """What the probe makes of it: RDMA on, macOS 26.4.1 everywhere."""
        return [self.fact(mac).model_copy(update=changes) for mac in range(len(self.ports))]

    def answers(self, mac: int) -> dict[str, str]:
        """What the facts probe's commands print."""
        return answers(self.document(mac))

    def fact(self, mac: int) -> NodeFacts:
        fields = read_facts({"system": "Darwin", "answers": self.answers(mac)})
        return NodeFacts(node=f"mac{mac}", host=f"mac{mac}.local", probed_at=NOW, **fields)


class Cabled(Macs):
    """The Macs of `documents`."""

    def __init__(self, documents: list[Document]) -> None:
        super().__init__([len(document["ports"]) for document in documents], [])
        self._documents = documents

    def document(self, mac: int) -> Document:
        return self._documents[mac]


def answers(document: Document) -> dict[str, str]:
    """What the facts probe's commands print on a Mac of the test cluster, whose MLX has every backend."""
    mac = Mac(document)
    backends = ["ring", "jaccl", "jaccl-ring"] if document.get("rdma") else ["ring"]
    imported = {"gpu": "gpu", "backends": backends, "working_set": document["working_set_bytes"]}
    found = {
        name: answer(mac, argv[0], argv[1:]) for name, argv in MAC_COMMANDS.items() if argv[0] not in lacks(document)
    }
    return {name: output for name, (output, _, _) in found.items()} | {"mlx_import": json.dumps(imported)}


def uuid(end: End) -> str:
    return f"{end[0]:08X}-0000-4000-8000-{end[1]:012X}"


@st.composite
def cablings(draw: st.DrawFn, most: int = 8, ports: int = 4) -> Macs:
    """Any number of Macs with any cables between different ones, at most one to a port."""
    counts = draw(st.lists(st.integers(1, ports), min_size=2, max_size=most))
    ends = [(mac, port) for mac, count in enumerate(counts) for port in range(count)]
    order = draw(st.permutations(ends))
    pairs = list(zip(order[::2], order[1::2], strict=False))
    # Most ports are in use: sparse cablings are found quickly, rings and meshes are not.
    kept = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(pairs), max_size=len(pairs)))
    cables = [pair for pair, keep in zip(pairs, kept, strict=True) if keep and pair[0][0] != pair[1][0]]
    free = set(ends) - {end for cable in cables for end in cable}
    docks = {end for end in free if draw(st.booleans())}
    strangers = {end for end in free - docks if draw(st.booleans())}
    names = [draw(st.permutations([f"en{number}" for number in range(3, 3 + count)])) for count in counts]
    return Macs(counts, cables, docks, strangers, [list(devices) for devices in names])


def mesh(macs: int, cables: int = 1) -> Macs:
    """Every pair joined, by so many cables."""
    pairs = [(a, b) for a in range(macs) for b in range(a + 1, macs) for _ in range(cables)]
    return _cabled(macs, pairs)


def ring(macs: int, order: list[int] | None = None) -> Macs:
    """Each joined to the next, in this order."""
    order = order or list(range(macs))
    return _cabled(macs, [(order[at], order[(at + 1) % macs]) for at in range(macs)])


def _cabled(macs: int, pairs: list[tuple[int, int]]) -> Macs:
    used = [0] * macs
    cables = []
    for a, b in pairs:
        cables.append(((a, used[a]), (b, used[b])))
        used[a] += 1
        used[b] += 1
    return Macs([max(count, 1) for count in used], cables)
