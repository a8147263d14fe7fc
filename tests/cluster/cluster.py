"""A cluster of nodes on this machine: up, down, and the ssh client that reaches it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster import network, registry
from tests.cluster.client import Client, Host
from tests.cluster.node import Node
from tests.cluster.specs import head_address, specs


class Cluster:
    """N nodes joined by a bridge; a context manager that brings them up and leaves nothing.

    The process that calls `up` owns the cluster: when it ends in whatever way, the nodes are switched off at once, and
    the next cluster's start clears the rest away."""

    def __init__(self, size: int = 4) -> None:
        self._specs = specs(size)
        self._record: registry.Record | None = None
        self.nodes: list[Node] = []

    @property
    def folder(self) -> Path:
        """Where the cluster's files lie on the head."""
        assert self._record is not None, "the cluster is not up"
        return self._record.folder

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
        assert self._record is not None, "the cluster is not up"
        return head_address(self._record.number)

    def __getitem__(self, name: str) -> Node:
        """The node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Bring all nodes up; their sshd's answer when this returns."""
        self._record = registry.claim(len(self._specs))
        number = self._record.number
        self.nodes = [Node(spec, number, index, self.folder) for index, spec in enumerate(self._specs)]
        try:
            network.lay_bridge(number)
            client_key = self.client.make_key()
            names = [("127.0.0.1", "localhost"), (self.head, "head"), *((node.ip, node.name) for node in self.nodes)]
            hosts = "".join(f"{ip} {name}\n" for ip, name in names)
            with ThreadPoolExecutor(len(self.nodes)) as pool:
                list(pool.map(lambda node: node.install(client_key, hosts), self.nodes))
                self.client.write(Host(node.name, node.ip, node.user, node.host_key) for node in self.nodes)
                list(pool.map(lambda node: node.power_on(), self.nodes))
        except BaseException:
            self.down()
            raise

    def heal(self) -> None:
        """Undo every fault, and end what the nodes' users left running."""
        for node in self.nodes:
            node.heal()

    def down(self) -> None:
        """Switch all nodes off, and remove everything that the cluster had on this machine."""
        if self._record is None:
            return
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.power_off(), self.nodes))
        registry.release(self._record)
        self._record = None
        self.nodes = []
