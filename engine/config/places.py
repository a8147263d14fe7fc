"""Paths and hosts of a configuration: their form, and what they stand for. Whether they exist is preflight's to say."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from engine.security.paths import path_fault

LOCAL = "127.0.0.1"
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*@)?[A-Za-z0-9_][A-Za-z0-9._:-]*")
_OTHER_NAMES = frozenset({"localhost", "::1", "ip6-localhost"})


def path_form(text: object) -> str | None:
    """What is accepted in place of `text`; None when it is a plain path."""
    fault = path_fault(text)
    if fault is None and isinstance(text, str):
        if ".." in Path(text).parts:
            return "a path without .. (absolute, below ~, or below the folder of this file)"
        if text.startswith("~"):
            try:
                Path(text).expanduser()
            except RuntimeError:
                return "a path below the home of a user that exists"
    return fault


def resolved(text: str, base: Path) -> str:
    """A path of good form, absolute: ~ expanded, relative ones taken from `base`. Symlinks stay: a virtual
    environment's python is one."""
    return os.path.normpath(base / Path(text).expanduser())


def interpreter(text: str, base: Path) -> str:
    """As `resolved`, but a name without a folder is looked for on PATH first."""
    found = shutil.which(text) if os.sep not in text else None
    return str(Path(found).absolute()) if found else resolved(text, base)


def host_form(text: object) -> str | None:
    """What is accepted in place of a host; None when it is this machine."""
    if text == LOCAL:
        return None
    if not isinstance(text, str) or len(text) > 253 or _HOST.fullmatch(text) is None:
        return f"a host name (letters, digits, . - _ and user@ before it); in this release {LOCAL} alone"
    if text.rpartition("@")[2].lower() in _OTHER_NAMES:
        return f"{LOCAL}: localhost can stand for ::1, and MLX's ring takes IPv4 addresses"
    return f"{LOCAL}: this release runs ranks on this machine alone, other hosts come with a later one"
