"""Macs with Thunderbolt cables, as the commands on them would print it; the form is that of recorded output."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from engine.cluster.facts import read_facts
from engine.models import NodeFacts

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
    port_words: str = "Thunderbolt"

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

    def thunderbolt(self, mac: int) -> str:
        """`system_profiler SPThunderboltDataType -json`, which lists the buses backwards."""
        buses = [self._bus((mac, port)) for port in reversed(range(self.ports[mac]))]
        return json.dumps({"SPThunderboltDataType": buses}, indent=2)

    def _bus(self, end: End) -> dict[str, Any]:
        mac, port = end
        items: list[dict[str, Any]] = []
        peer = self.joined(end)
        if end in self.docks:
            items.append({"_name": "Dock", "device_name_key": "Dock", "vendor_name_key": "CalDigit, Inc."})
        if end in self.strangers:
            items.append({"_name": "MacBook", "domain_uuid_key": f"STRANGER-{mac}-{port}"})
        if peer is not None:
            items.append({"_name": "Mac Studio", "device_name_key": "Mac15,14", "domain_uuid_key": uuid(peer)})
        bus: dict[str, Any] = {
            "_name": f"thunderboltusb4_bus_{port}",
            "device_name_key": "Mac Studio",
            "domain_uuid_key": uuid(end),
            "receptacle_1_tag": {
                "current_speed_key": "80 Gb/s" if items else "Up to 120 Gb/s",
                "receptacle_id_key": str(port + 1),
                "receptacle_status_key": "receptacle_connected" if items else "receptacle_no_devices_connected",
            },
            "switch_uid_key": f"0x{mac:08X}{port:08X}",
        }
        return {"_items": items, **bus} if items else bus

    def networksetup(self, mac: int) -> str:
        ports = [("Ethernet", "en0"), ("Wi-Fi", "en1")]
        ports += [(f"{self.port_words} {port + 1}", device) for port, device in enumerate(self.devices[mac])]
        ports += [("Thunderbolt Bridge", "bridge0")]
        blocks = [f"\nHardware Port: {name}\nDevice: {device}\nEthernet Address: N/A\n" for name, device in ports]
        return "".join(blocks) + "\nVLAN Configurations\n===================\n"

    def ifconfig(self, mac: int) -> str:
        lines = ["en0: flags=8863<UP> mtu 1500", f"\tinet 10.0.0.{mac + 1} netmask 0xffffff00 broadcast 10.0.0.255"]
        lines += ["\tstatus: active"]
        for port, device in enumerate(self.devices[mac]):
            lines.append(f"{device}: flags=8863<UP> mtu 1500")
            if address := self.addresses.get(f"mac{mac} {device}"):
                lines.append(f"\tinet {address.partition('/')[0]} netmask 0xfffffffc broadcast 192.168.255.255")
            lines.append(f"\tstatus: {'active' if self.joined((mac, port)) else 'inactive'}")
        return "\n".join(lines) + "\n"

    def ibv_devices(self, mac: int) -> str:
        rows = [f"    rdma_{device}        \t{port:016x}" for port, device in enumerate(self.devices[mac])]
        return "\n".join(["    device          \t   node GUID", "    ------          \t----------------", *rows, ""])

    def ibv_devinfo(self, mac: int) -> str:
        blocks = []
        for port, device in enumerate(self.devices[mac]):
            state = "PORT_ACTIVE (4)" if self.joined((mac, port)) else "PORT_DOWN (1)"
            blocks.append(f"hca_id:\trdma_{device}\n\t\tport:\t1\n\t\t\tstate:\t\t\t{state}\n")
        return "\n".join(blocks)

    def facts(self, **changes: Any) -> list[NodeFacts]:
        """What the probe makes of it: RDMA on, macOS 26.4.1 everywhere."""
        return [self.fact(mac).model_copy(update=changes) for mac in range(len(self.ports))]

    def answers(self, mac: int) -> dict[str, str]:
        """What the facts probe's commands print."""
        return {
            "sysctl": "hw.memsize: 549755813888\nmachdep.cpu.brand_string: Apple M3 Ultra\nhw.model: Mac15,14\n",
            "sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t26.4.1\nBuildVersion:\t\t25E253\n",
            "thunderbolt": self.thunderbolt(mac),
            "networksetup": self.networksetup(mac),
            "ifconfig": self.ifconfig(mac),
            "ibv_devices": self.ibv_devices(mac),
            "ibv_devinfo": self.ibv_devinfo(mac),
            "rdma_ctl": "enabled\n",
            "mlx_import": json.dumps({"gpu": "gpu", "backends": ["ring", "jaccl", "jaccl-ring"], "working_set": 2**38}),
        }

    def fact(self, mac: int) -> NodeFacts:
        fields = read_facts({"system": "Darwin", "answers": self.answers(mac)})
        return NodeFacts(node=f"mac{mac}", host=f"mac{mac}.local", probed_at=NOW, **fields)


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
