"""OpenSSH's files on the head: ssh_config (read for its hosts, and written for `ssh -F`, which mlx.launch and
interactive shells use) and known_hosts. User, port and jump hosts of an entry are left to ssh itself."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InputError
from engine.protocol.attempt import write_atomic
from engine.security.identifiers import SshTarget
from engine.security.paths import make_home

_HOST = r"[A-Za-z0-9_][A-Za-z0-9_.:%-]*"
_NAME = re.compile(rf"{_HOST}|\[{_HOST}\]:[0-9]{{1,5}}")
_KEY = re.compile(r"[a-z][a-z0-9@.-]* [A-Za-z0-9+/]+={0,2}")
CONFIG_VARIABLE = "FLIGHTDECK_SSH_CONFIG"
"""An ssh_config to use in place of ~/.ssh/config and /etc/ssh/ssh_config."""
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")


_USUAL_KNOWN_HOSTS = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")


OWN_KNOWN_HOSTS = "known_hosts"
"""The host keys that were accepted in Flight Deck, in the state directory."""


def _config_files() -> list[Path]:
    """The ssh_config files that count, the first value of an option wins."""
    given = os.environ.get(CONFIG_VARIABLE)
    return [Path(given).expanduser()] if given else [Path("~/.ssh/config").expanduser(), _SYSTEM_CONFIG]


def ssh_configs() -> list[Path]:
    """The ssh_config files that count, of those that are there."""
    return [file for file in _config_files() if file.is_file()]


def known_hosts_files(home: Path, user: list[str] | None = None, system: list[str] | None = None) -> list[Path]:
    """The known_hosts files that count, ours first, of those that are there: `user` and `system` are ssh_config's
    UserKnownHostsFile and GlobalKnownHostsFile. The user's usual ones count besides, the system's only for want of
    others."""
    if system is None:
        system = ["/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"]
    named = dict.fromkeys([*(user or []), *_USUAL_KNOWN_HOSTS, *system])
    files = [home / OWN_KNOWN_HOSTS, *(Path(name).expanduser() for name in named)]
    return [file for file in files if file.is_file()]


def add_known_host(home: Path, name: str, key: str) -> None:
    """Append a host's key to our own known_hosts, once. `name` is `host` or `[host]:port`, `key` is as in a public key
    file, without its comment. Raises InputError for what could be anything else, OSError."""
    if _NAME.fullmatch(name) is None or _KEY.fullmatch(key) is None:
        raise InputError("no host key to accept", where=name[:80], why="not a name and a public key")
    make_home(home)
    line = f"{name} {key}\n"
    descriptor = os.open(home / OWN_KNOWN_HOSTS, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        # Two consoles may accept at once; a line is one write, and nobody's is lost.
        fcntl.flock(file, fcntl.LOCK_EX)
        before = file.read()
        if line not in before.splitlines(keepends=True):
            # What a crash or a full disk has cut off is a line of its own, and none for ssh.
            file.write(line if before.endswith("\n") or not before else f"\n{line}")
            file.flush()
            os.fsync(file.fileno())


_DEPTH = 16
"""Nesting of Include, as in OpenSSH."""
_SIZE_LIMIT = 1 << 20
_HOST_LIMIT = 1000
_LINE = re.compile(r"\s*([A-Za-z]+)(?:\s*=\s*|\s+)(.*)")


@dataclass
class SshHost:
    """One concrete entry: the name after `Host`, and what its own section says."""

    alias: str
    hostname: str | None = None
    user: str | None = None
    port: str | None = None


def ssh_hosts(paths: Sequence[Path] | None = None) -> list[SshHost]:
    """Every `Host` name in these files, by default those that ssh reads here, and in what they include, that is no
    pattern and that can be a node; in order. What cannot be read has none; nothing is contacted or run (`Match exec`
    neither)."""
    hosts: dict[str, SshHost] = {}
    for path in ssh_configs() if paths is None else paths:
        _read(path, hosts, [], _include_folder(path), 0)
    # Git's servers let nobody train on them.
    return [host for host in hosts.values() if host.user != "git"]


def _read(path: Path, hosts: dict[str, SshHost], section: list[SshHost], folder: Path, depth: int) -> None:
    """Adds the file's entries to `hosts`. `section` are those that its first lines belong to, `folder` that of relative
    Includes."""
    for keyword, words in _settings(path):
        if keyword == "host":
            section = _section(words, hosts)
        elif keyword == "match":
            section = []
        elif keyword == "include" and depth < _DEPTH:
            for file in _included(words, folder):
                _read(file, hosts, section, folder, depth + 1)
        elif words and keyword in ("hostname", "user", "port"):
            for host in section:
                # The first value counts, as in ssh.
                if getattr(host, keyword) is None:
                    setattr(host, keyword, words[0])


def _include_folder(path: Path) -> Path:
    return path.parent if path == _SYSTEM_CONFIG else Path.home() / ".ssh"


def _included(words: list[str], folder: Path) -> list[Path]:
    """The files of an Include; that in the home of a user who does not exist is no fault."""
    patterns = (str(folder / os.path.expanduser(name)) for name in words)  # noqa: PTH111
    return [Path(file) for pattern in patterns for file in sorted(glob.glob(pattern))]  # noqa: PTH207


def _known_hosts_named(path: Path, folder: Path, depth: int = 0) -> list[str]:
    """Every UserKnownHostsFile in a file and what it includes, for whatever host."""
    names = list[str]()
    for keyword, words in _settings(path):
        if keyword == "userknownhostsfile":
            names += words
        elif keyword == "include" and depth < _DEPTH:
            names += (name for file in _included(words, folder) for name in _known_hosts_named(file, folder, depth + 1))
    return names


def _settings(path: Path) -> list[tuple[str, list[str]]]:
    """(keyword, words) of each line of an ssh_config; none where it cannot be read."""
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            return []
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    matches = (_LINE.match(line) for line in text.splitlines())
    return [(match[1].lower(), _words(match[2])) for match in matches if match is not None]


def _section(words: list[str], hosts: dict[str, SshHost]) -> list[SshHost]:
    section = []
    for alias in words:
        if any(character in alias for character in "*?!@") or len(hosts) >= _HOST_LIMIT:
            continue
        with contextlib.suppress(InputError):
            SshTarget.parse(alias)
            section.append(hosts.setdefault(alias, SshHost(alias)))
    return section


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        # A torn quotation is ssh's to complain of.
        return []


CONNECT_TIMEOUT_S = 10
KEEPALIVE_S = 5
KEEPALIVES = 3
_OPTIONS = (
    f"ConnectTimeout {CONNECT_TIMEOUT_S}", f"ServerAliveInterval {KEEPALIVE_S}", f"ServerAliveCountMax {KEEPALIVES}",
    "StrictHostKeyChecking yes", "UpdateHostKeys no", "ForwardAgent no", "ForwardX11 no",
)  # fmt: skip
_UNATTENDED = ("BatchMode yes", "RemoteCommand none", "ControlMaster no", "ControlPath none", "ClearAllForwardings yes")
"""A RemoteCommand of the user's is in the way of any other, a shared master connection has its own keepalive, and a
forwarded port is taken when several ranks go to one host."""
_GLOB = re.compile(r"[][*?\\]")
_ESCAPED = r"\\\\\g<0>"
"""ssh reads the backslash of an Include twice: as that of a word, and as that of a pattern."""


def write_openssh_config(path: Path, home: Path, *, unattended: bool = True) -> None:
    """Write the ssh_config for `ssh -F`. The first value of an option wins in ssh_config: ours, then the user's.

    `unattended` asks for nothing (no password, no passphrase), runs the command that it is given, and does nothing
    besides. Raises InputError for paths that no ssh_config can hold, OSError."""
    theirs = _config_files()
    ours = str(home / OWN_KNOWN_HOSTS).replace("%", "%%")
    # Ours would otherwise hide them.
    named = [name for file in theirs for name in _known_hosts_named(file, _include_folder(file))]
    usual = [name for name in (*named, *_USUAL_KNOWN_HOSTS) if name.lower() != "none"]
    known_hosts = dict.fromkeys([ours, *usual])
    options = [
        *_OPTIONS,
        f"UserKnownHostsFile {' '.join(map(_config_word, known_hosts))}",
        *(_UNATTENDED if unattended else ()),
    ]
    lines = ["# Written by Flight Deck: its own options first, then the user's configuration.", "Match all"]
    lines += [f"    {option}" for option in options]
    lines += [f"Include {_config_word(_GLOB.sub(_ESCAPED, str(file)))}" for file in theirs]
    write_atomic(path, "\n".join(lines) + "\n")


def shell_argv(target: SshTarget, config: Path, command: str | None = None) -> list[str]:
    """A person's own login shell on a node, or a command with their terminal; `config` is such an ssh_config, written
    with `unattended=False`."""
    if target.local:
        return ["/bin/sh", "-c", command] if command else [os.environ.get("SHELL", "/bin/sh"), "-l"]
    return ["ssh", "-t", "-F", str(config), "--", target.openssh, *([command] if command else [])]


def _config_word(name: str) -> str:
    """A word of ssh_config. Raises InputError for what none can hold."""
    if any(character in name for character in '"\n\r\0') or "${" in name:
        raise InputError(f"{name[:200]!r} cannot stand in an ssh_config", todo="choose another path")
    return f'"{name}"' if " " in name or "#" in name else name
