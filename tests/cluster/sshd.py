"""A node's sshd: its configuration, its host key, and what its start needs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.cluster.command import command

BINARY = "/usr/sbin/sshd"
"""sshd re-executes itself and wants an absolute path."""
CONFIG_NAME, KEY_NAME = "sshd_config", "ssh_host_ed25519_key"
PID_FILE = "/run/sshd.pid"
LOG = "/var/log/sshd.log"
PORT = 22
OPTIONS = {
    "Port": str(PORT),
    "ListenAddress": "0.0.0.0",
    "HostKey": f"/etc/ssh/{KEY_NAME}",
    "PidFile": PID_FILE,
    "AuthorizedKeysFile": ".ssh/authorized_keys",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "UsePAM": "no",
    "UseDNS": "no",
    "PrintMotd": "no",
    "PrintLastLog": "no",
    # The default, sntrup761x25519, costs 60 ms of a core at every login.
    "KexAlgorithms": "curve25519-sha256",
    "Subsystem": "sftp internal-sftp",
}


def config(changes: Mapping[str, str]) -> str:
    """The text of sshd_config, `changes` winning over the defaults above."""
    return "".join(f"{key} {value}\n" for key, value in (OPTIONS | dict(changes)).items())


def make_key(file: Path, comment: str) -> str:
    """Make an ed25519 key pair at `file`, replacing an older one; the public key as `type base64`."""
    for old in (file, file.with_name(f"{file.name}.pub")):
        old.unlink(missing_ok=True)
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file))
    return public_key(file)


def public_key(file: Path) -> str:
    """The public half of the key pair at `file`, as `type base64`."""
    return " ".join(file.with_name(f"{file.name}.pub").read_text().split()[:2])
