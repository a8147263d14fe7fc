"""The hosts that a person's ssh configuration names. What ssh makes of each (user, port, jump) stays ssh's business."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import InputError
from engine.security.hosts import SshTarget
from engine.transport.known_hosts import ssh_configs

_DEPTH = 16
"""Of Include, as in OpenSSH."""
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


@dataclass
class _Reading:
    hosts: dict[str, SshHost] = field(default_factory=dict)
    section: list[SshHost] = field(default_factory=list)
    """Those that the next keys belong to."""


def ssh_hosts(paths: Sequence[Path] | None = None) -> list[SshHost]:
    """Every `Host` name in these files, by default those that ssh reads here, and in what they include, that is no
    pattern and that can be a node; in order. What cannot be read has none; nothing is contacted or run (`Match exec`
    neither)."""
    reading = _Reading()
    for path in ssh_configs() if paths is None else paths:
        _read(path, reading, 0)
    # Git's servers let nobody train on them.
    return [host for host in reading.hosts.values() if host.user != "git"]


def _read(path: Path, reading: _Reading, depth: int) -> None:
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            return
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        keyword, words = match[1].lower(), _words(match[2])
        if keyword == "host":
            reading.section = _section(words, reading)
        elif keyword == "match":
            reading.section = []
        elif keyword == "include" and depth < _DEPTH:
            outside = reading.section
            for name in words:
                for file in sorted(glob.glob(str(_included(name)))):  # noqa: PTH207  (absolute patterns)
                    _read(Path(file), reading, depth + 1)
            # A section of an included file ends with it.
            reading.section = outside
        elif words and keyword in ("hostname", "user", "port"):
            for host in reading.section:
                # The first value counts, as in ssh.
                if getattr(host, keyword) is None:
                    setattr(host, keyword, words[0])


def _section(words: list[str], reading: _Reading) -> list[SshHost]:
    section = []
    for alias in words:
        if any(sign in alias for sign in "*?!") or len(reading.hosts) >= _HOST_LIMIT:
            continue
        try:
            SshTarget.parse(alias)
        except InputError:
            continue
        if "@" not in alias:
            section.append(reading.hosts.setdefault(alias, SshHost(alias)))
    return section


def _included(name: str) -> Path:
    path = Path(os.path.expanduser(name))  # noqa: PTH111  (a user that does not exist is no fault)
    return path if path.is_absolute() else Path.home() / ".ssh" / path


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()
