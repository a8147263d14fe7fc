"""Where ssh's facts lie on the head: the configuration, and the known_hosts files, ours first."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from engine.errors import InputError
from engine.security.home import make_home

_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*"
_NAME = re.compile(rf"{_HOST}|\[{_HOST}\]:[0-9]{{1,5}}")
_KEY = re.compile(r"[a-z][a-z0-9@.-]* [A-Za-z0-9+/]+={0,2}")
CONFIG_VARIABLE = "FLIGHTDECK_SSH_CONFIG"
"""An ssh_config to use in place of ~/.ssh/config and /etc/ssh/ssh_config."""


def own_known_hosts(home: Path) -> Path:
    """The host keys that were accepted in Flight Deck, in the state directory `home`."""
    return home / "known_hosts"


def ssh_configs() -> list[Path]:
    """The ssh_config files that count, the first word on a thing wins; only those that are there."""
    given = os.environ.get(CONFIG_VARIABLE)
    files = [Path(given).expanduser()] if given else [Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")]
    return [file for file in files if file.is_file()]


def known_hosts_files(home: Path, user: list[str] | None = None, system: list[str] | None = None) -> list[Path]:
    """The known_hosts files that count, ours first, of those that are there: `user` and `system` are ssh_config's
    UserKnownHostsFile and GlobalKnownHostsFile. The user's usual ones count besides, the system's only for want of
    others."""
    usual = ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
    if system is None:
        system = ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
    named = dict.fromkeys([*(user or []), *usual, *system])
    files = [own_known_hosts(home), *(Path(name).expanduser() for name in named)]
    return [file for file in files if file.is_file()]


def add_known_host(home: Path, name: str, key: str) -> None:
    """Append a host's key to our own known_hosts, once. `name` is `host` or `[host]:port`, `key` is as in a public key
    file, without its comment. Raises InputError for what could be anything else, OSError."""
    if _NAME.fullmatch(name) is None or _KEY.fullmatch(key) is None:
        raise InputError("no host key to accept", where=name[:80], why="not a name and a public key")
    make_home(home)
    line = f"{name} {key}\n"
    descriptor = os.open(own_known_hosts(home), os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        # Two consoles may accept at once; a line is one write, and nobody's is lost.
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read()
        if line not in before.splitlines(keepends=True):
            # What a crash or a full disk has cut off is a line of its own, and none for ssh.
            file.write(line if before.endswith("\n") or not before else f"\n{line}")
            file.flush()
            os.fsync(file.fileno())
