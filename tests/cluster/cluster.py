"""A cluster of nodes on this machine: up, down, and the ssh client that reaches it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tests.cluster import disk, network
from tests.cluster.client import Client, HostEntry
from tests.cluster.detour import Detour
from tests.cluster.machine import SHARED
from tests.cluster.node import Node
from tests.cluster.registry import Record, Registry
from tests.cluster.specs import FIRST_UID, head_address, specs


def clear_namespaces(record: Record) -> None:
    """Links and mounts of one cluster. Its processes ended with their pid 1's, which watch the owner."""
    network.clear_away(record.number)
    disk.unmount_below(record.folder)


def _tidy(node: Node) -> None:
    node.heal()
    node.end_processes()


class Cluster:
    """N nodes joined by a bridge; a context manager that brings them up and leaves nothing.

    The process that calls `up` owns the cluster: when it ends in whatever way, the nodes are switched off at once, and
    the next cluster's start clears the rest away."""

    registry: ClassVar[Registry] = Registry(Path("/run/flightdeck-cluster"), clear_namespaces, network.bridge_exists)
    isolated: ClassVar[bool] = True
    """Each node has namespaces of its own, and so a network that can fail."""
    names_addresses: ClassVar[bool] = True
    """A configuration names its nodes' addresses."""

    def __init__(self, size: int = 4) -> None:
        self._specs = specs(size)
        self._record: Record | None = None
        self._detours: dict[str, Detour] = {}
        self.nodes: list[Node] = []

    @classmethod
    def attach(cls, number: int) -> Self:
        """The cluster of that number which another process owns. Raises LookupError when there is none."""
        for record in cls.registry.clusters():
            if record.number == number:
                cluster = cls(record.size)
                cluster._record = record
                cluster.nodes = cluster._make_nodes(record)
                return cluster
        raise LookupError(f"there is no cluster {number}")

    @property
    def record(self) -> Record:
        assert self._record is not None, "the cluster is not up"
        return self._record

    @property
    def folder(self) -> Path:
        """Where the cluster's files lie on the head."""
        return self.record.folder

    @property
    def client(self) -> Client:
        return Client(self.folder / "client")

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`, and for FLIGHTDECK_SSH_CONFIG."""
        return self.client.config

    @property
    def known_hosts(self) -> Path:
        return self.client.known_hosts

    @property
    def head(self) -> str:
        """The head's address on the cluster's network."""
        return head_address(self.record.number)

    def __getitem__(self, name: str) -> Node:
        """The node of that name. Raises KeyError."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(f"no node {name!r}; there are {', '.join(node.name for node in self.nodes)}")

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Bring all nodes up; their sshd's answer when this returns."""
        self._record = self.registry.claim(len(self._specs))
        try:
            self.nodes = self._make_nodes(self._record)
            self._lay_network()
            client_key = self.client.make_key()
            names = [("127.0.0.1", "localhost"), (self.head, "head"), *((node.ip, node.name) for node in self.nodes)]
            hosts = "".join(f"{ip} {name}\n" for ip, name in names)
            self._on_all(lambda node: node.install(client_key, hosts))
            self._write_client()
            self._on_all(lambda node: node.power_on())
        except BaseException:
            self.down()
            raise

    def delay(self, node: Node, seconds: float) -> None:
        """Lead the ssh client's new connections to `node` over a detour on which every byte takes `seconds` longer,
        each way. Works by the ssh config, for whoever uses it; the ring's own connections are not delayed."""
        self.hasten(node)
        self._detours[node.name] = Detour(self.head, node.ip, node.port, seconds)
        self._write_client()

    def hasten(self, node: Node) -> None:
        """Undo `delay`; connections over the detour are lost."""
        if detour := self._detours.pop(node.name, None):
            detour.close()
            self._write_client()

    def heal(self) -> None:
        """Undo every fault, and end what the nodes' users left running."""
        for node in self.nodes:
            self.hasten(node)
        self._on_all(_tidy)

    def down(self) -> None:
        """Switch all nodes off, and remove everything that the cluster had on this machine."""
        if self._record is None:
            return
        for detour in self._detours.values():
            detour.close()
        self._detours.clear()
        try:
            self._on_all(lambda node: node.switch_off())
        finally:
            self.registry.release(self._record)
            self._record = None
            self.nodes = []

    def _make_nodes(self, record: Record) -> list[Node]:
        return [Node(spec, record, index) for index, spec in enumerate(self._specs)]

    def _lay_network(self) -> None:
        network.lay_bridge(self.record.number)

    def _write_client(self) -> None:
        hosts = []
        for node in self.nodes:
            detour = self._detours.get(node.name)
            hosts.append(
                HostEntry(
                    node.name,
                    node.ssh.split("@")[1],
                    node.user,
                    node.host_key,
                    (detour.host, detour.port) if detour else (node.ip, node.port),
                )
            )
        self.client.write(hosts)

    def _on_all(self, do: Callable[[Node], None]) -> None:
        with ThreadPoolExecutor(max(len(self.nodes), 1)) as pool:
            list(pool.map(do, self.nodes))


class SharedDiskCluster(Cluster):
    """Nodes of one user, who has a disk on all of them: system.VOLUME, as NFS in a data centre."""

    def _make_nodes(self, record: Record) -> list[Node]:
        nodes = super()._make_nodes(record)
        for node in nodes:
            node.uid = FIRST_UID
        (record.folder / SHARED).mkdir(exist_ok=True)
        os.chown(record.folder / SHARED, FIRST_UID, FIRST_UID)
        return nodes
