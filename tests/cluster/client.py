"""The ssh client's side of a cluster: key pair, known_hosts and config of its own, so that ~/.ssh is never used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import sshd


@dataclass(frozen=True)
class HostEntry:
    """What the client is told of one node: the name and the address (or alias) that it asks for, and where that is."""

    name: str
    address: str
    user: str
    host_key: str
    reached_at: tuple[str, int]


@dataclass(frozen=True)
class Client:
    """The files of one cluster's ssh client, in `folder`."""

    folder: Path

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def config(self) -> Path:
        return self.folder / "ssh_config"

    def make_key(self) -> str:
        """Make the key pair; the public key."""
        self.folder.mkdir(mode=0o700)
        return sshd.make_key(self.key, "flightdeck-test-head")

    def write(self, hosts: Iterable[HostEntry]) -> None:
        """Write known_hosts and ssh_config. A node is reached by its address or its name."""
        known, blocks = [], []
        for host in hosts:
            place, port = host.reached_at
            known.append(f"{host.address if port == 22 else f'[{place}]:{port}'} {host.host_key}\n")
            block = [f"Host {host.name} {host.address}", f"HostName {place}", f"Port {port}", f"User {host.user}"]
            blocks.append("\n    ".join(block))
        common = [
            "Host *",
            f"IdentityFile {self.key}",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.known_hosts}",
            "GlobalKnownHostsFile /dev/null",
            "StrictHostKeyChecking yes",
            "BatchMode yes",
            "ConnectTimeout 5",
        ]
        blocks.append("\n    ".join(common))
        self.known_hosts.write_text("".join(known))
        self.config.write_text("\n\n".join(blocks) + "\n")
