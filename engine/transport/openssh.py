"""OpenSSH's own `ssh` with the meaning of our connections: for mlx.launch, and for a person's shell on a node."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path

from engine.errors import InputError
from engine.security.hosts import SshTarget
from engine.transport.known_hosts import CONFIG_VARIABLE, own_known_hosts
from engine.worker.wire import write_atomic

CONNECT_TIMEOUT_S = 10
KEEPALIVE_S = 5
KEEPALIVES = 3
_KNOWN_HOSTS = re.compile(r"^[ \t]*UserKnownHostsFile(?:[ \t]*=[ \t]*|[ \t]+)(.+)$", re.IGNORECASE | re.MULTILINE)
_GLOB = re.compile(r"[][*?\\]")
_ESCAPED = r"\\\\\g<0>"
"""ssh reads the backslash of an Include twice: as that of a word, and as that of a pattern."""


def write_openssh_config(path: Path, home: Path, *, unattended: bool = True) -> None:
    """Write the ssh_config for `ssh -F`. The first word on a thing wins in ssh_config: ours, then the user's.

    `unattended` asks for nothing (no password, no passphrase), runs the command that it is given, and does nothing
    besides. Raises InputError for paths that no ssh_config can hold, OSError.
    """
    write_atomic(path, openssh_config(home, unattended=unattended))


def openssh_config(home: Path, *, unattended: bool = True) -> str:
    """The text of that ssh_config."""
    given = os.environ.get(CONFIG_VARIABLE)
    theirs = [Path(name).expanduser() for name in ([given] if given else ["~/.ssh/config", "/etc/ssh/ssh_config"])]
    usual = ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
    known = dict.fromkeys([str(own_known_hosts(home)).replace("%", "%%"), *_known_hosts_of(theirs), *usual])
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
        f"    UserKnownHostsFile {' '.join(map(_word, known))}",
    ]
    if unattended:
        # A RemoteCommand of the user's is in the way of any other, a shared master connection has its own keepalive,
        # and a forwarded port is taken when several ranks go to one host.
        lines += [
            "    BatchMode yes",
            "    RemoteCommand none",
            "    ControlMaster no",
            "    ControlPath none",
            "    ClearAllForwardings yes",
        ]
    lines += [f"Include {_word(_GLOB.sub(_ESCAPED, str(file)))}" for file in theirs]
    return "\n".join(lines) + "\n"


def shell_argv(target: SshTarget, config: Path) -> list[str]:
    """A person's own login shell on a node; `config` is such an ssh_config, written with `unattended=False`."""
    if target.local:
        return [os.environ.get("SHELL", "/bin/sh"), "-l"]
    return ["ssh", "-t", "-F", str(config), "--", target.openssh]


def _known_hosts_of(configs: list[Path]) -> list[str]:
    """Every UserKnownHostsFile that these files name, for whatever host: ours would otherwise hide them."""
    names = []
    for file in configs:
        try:
            text = file.read_text(errors="replace")
        except OSError:
            continue
        for said in _KNOWN_HOSTS.findall(text):
            # A torn quotation is ssh's to complain of.
            with contextlib.suppress(ValueError):
                names += [name for name in shlex.split(said) if name.lower() != "none"]
    return names


def _word(name: str) -> str:
    """A word of ssh_config. Raises InputError for what none can hold."""
    if any(character in name for character in '"\n\r\0') or "${" in name:
        raise InputError(f"{name[:200]!r} cannot stand in an ssh_config", todo="choose another path")
    return f'"{name}"' if " " in name or "#" in name else name
