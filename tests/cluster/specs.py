"""What each node of a test cluster is: its name, user, home, python and address."""

from __future__ import annotations

from dataclasses import dataclass

SUBNET = "10.77"
FIRST_UID = 5001
FIRST_HOST = 2
"""The head has .1."""


@dataclass(frozen=True)
class NodeSpec:
    """One node before it is made. `home` is absolute; `python` lies below `~`."""

    name: str
    home: str
    python: str

    @property
    def user(self) -> str:
        return self.name


FIRST_FOUR = (
    NodeSpec("ana", "/Users/ana", "~/mlx/.venv/bin/python"),
    NodeSpec("bea", "/Users/Bea B", "~/venvs/mlx/bin/python"),
    NodeSpec("cyd", "/Volumes/fast/cyd", "~/.venv/bin/python"),
    NodeSpec("dov", "/home/dov", "~/miniforge3/envs/mlx/bin/python3.11"),
)
"""Different users, homes and pythons, as on the Macs of several people."""
LARGEST = 64


def specs(count: int) -> tuple[NodeSpec, ...]:
    """The first `count` nodes. Raises ValueError outside 1 to 64."""
    if not 1 <= count <= LARGEST:
        raise ValueError(f"{count} nodes: a test cluster has 1 to {LARGEST}")
    further = (
        NodeSpec(f"mac{number:02}", f"/Users/mac{number:02}", "~/mlx/.venv/bin/python")
        for number in range(len(FIRST_FOUR) + 1, count + 1)
    )
    return (FIRST_FOUR[:count] + tuple(further))[:count]


def address(cluster: int, index: int) -> str:
    """The fixed address of node `index` (from 0) of cluster number `cluster` (0 to 255)."""
    return f"{SUBNET}.{cluster}.{FIRST_HOST + index}"


def head_address(cluster: int) -> str:
    """The address of the head, where the tests run."""
    return f"{SUBNET}.{cluster}.1"


def subnet(cluster: int) -> str:
    """The network of a cluster."""
    return f"{SUBNET}.{cluster}.0/24"


def mac(cluster: int, host: int, end: int) -> str:
    """A hardware address that is the same at every start: a new one costs 50 s of stale ARP. `host` is the last number
    of the address, `end` 0 for the node's end of its cable and 1 for the bridge's."""
    return f"02:fd:{end:02x}:{cluster:02x}:00:{host:02x}"
