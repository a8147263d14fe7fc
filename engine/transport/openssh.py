"""OpenSSH's own `ssh` with the meaning of our connections: for mlx.launch, and for a person's shell on a node."""

from __future__ import annotations

import os
from pathlib import Path

from engine.security.hosts import SshTarget
from engine.transport.known_hosts import CONFIG_VARIABLE, own_known_hosts
from engine.worker.wire import write_atomic

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S = 5
KEEPALIVES = 3


def write_openssh_config(path: Path, home: Path, *, unattended: bool = True) -> None:
    """Write the ssh_config for `ssh -F`. The first word on a thing wins in ssh_config: ours, then the user's.

    `unattended` asks for nothing: no password, no passphrase. Raises OSError.
    """
    write_atomic(path, openssh_config(home, unattended=unattended))


def openssh_config(home: Path, *, unattended: bool = True) -> str:
    """The text of that ssh_config."""
    given = os.environ.get(CONFIG_VARIABLE)
    theirs = [str(Path(given).expanduser())] if given else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    known = _known_hosts_of(theirs) or ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
    lines = ["# Written by Flight Deck: its own words first, then the user's configuration."]
    lines += [
        "Match all",
        f"    ConnectTimeout {CONNECT_TIMEOUT_S}",
        f"    ServerAliveInterval {KEEPALIVE_S}",
        f"    ServerAliveCountMax {KEEPALIVES}",
        "    StrictHostKeyChecking yes",
        "    UpdateHostKeys no",
        "    ForwardAgent no",
        "    ForwardX11 no",
        f"    UserKnownHostsFile {' '.join(_word(name) for name in (str(own_known_hosts(home)), *known))}",
    ]
    if unattended:
        lines += ["    BatchMode yes"]
    lines += [f"Include {_word(name)}" for name in theirs]
    return "\n".join(lines) + "\n"


def shell_argv(target: SshTarget, config: Path) -> list[str]:
    """A person's own login shell on a node; `config` is such an ssh_config, written with `unattended=False`."""
    if target.local:
        return [os.environ.get("SHELL", "/bin/sh"), "-l"]
    return ["ssh", "-t", "-F", str(config), "--", target.openssh]


def _known_hosts_of(configs: list[str]) -> list[str]:
    """UserKnownHostsFile as the first of these files says it for all hosts: ours would otherwise hide it."""
    for name in configs:
        try:
            lines = Path(name).expanduser().read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.strip().partition(" ")
            if key.lower() == "userknownhostsfile" and value.strip():
                return [word.strip('"') for word in value.split()]
    return []


def _word(name: str) -> str:
    return f'"{name}"' if " " in name else name
