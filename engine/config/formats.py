"""Checks the form of paths, hosts, addresses and device names in a configuration, and resolves paths for their node.
The `*_form` functions return a description of what is accepted, or None if the value is valid."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from pathlib import Path

from engine.errors import InputError
from engine.protocol.partition import parse_split
from engine.security.identifiers import LOCAL, SSH_TARGET_FORM, SshTarget
from engine.security.paths import path_fault

ON_NODE = "a path on the node: absolute, or below the home directory of its user (~/…)"
_OTHER_NAMES = frozenset({"localhost", "::1", "ip6-localhost"})
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def path_form(text: object) -> str | None:
    fault = path_fault(text)
    if fault is None and isinstance(text, str):
        if ".." in Path(text).parts:
            return "a path without .. (absolute, below ~, or below the folder of this file)"
        if text.startswith("~"):
            try:
                Path(text).expanduser()
            except RuntimeError:
                return "a path below the home directory of an existing user"
    return fault


def remote_path_form(text: object) -> str | None:
    """Like `path_form`, for a path on another machine, which cannot be relative."""
    fault = path_fault(text)
    if fault is None and isinstance(text, str):
        if ".." in text.split("/"):
            return "a path without .. (absolute, or below ~)"
        if text != "~" and not text.startswith(("/", "~/")):
            return ON_NODE
    return fault


def resolved(text: str, base: Path) -> str:
    """The absolute path: ~ expanded, relative ones below `base`. Symlinks, such as a venv's python, are kept."""
    return os.path.normpath(base / Path(text).expanduser())


def interpreter(text: str, base: Path) -> str:
    """Like `resolved`, but a name without a folder is searched on PATH first."""
    found = shutil.which(text) if os.sep not in text else None
    return str(Path(found).absolute()) if found else resolved(text, base)


def host_form(text: object) -> str | None:
    try:
        target = SshTarget.parse(text if isinstance(text, str) else "")
    except InputError as refused:
        return SSH_TARGET_FORM + (f"; {refused.why}" if refused.why else "")
    if target.host.lower() in _OTHER_NAMES:
        return f"{LOCAL}: localhost may resolve to ::1, and MLX's ring needs IPv4 addresses"
    return None


def address_form(text: object) -> str | None:
    try:
        address = ipaddress.IPv4Address(text if isinstance(text, str) else "")
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast or address.is_reserved:
        return "an IPv4 address of the node, such as 192.168.0.1: MLX's ring accepts no names and no IPv6"
    return None


def device_form(device: object) -> str | None:
    """A list is one device for each of several cables."""
    names = device if isinstance(device, (list, tuple)) and device else [device]
    if all(isinstance(name, str) and _DEVICE.fullmatch(name) for name in names) and len(set(names)) == len(names):
        return None
    return 'the name of an RDMA device such as "rdma_en5", a list of several, or "" for none'


def split_form(text: str, nodes: int | None = None) -> str | None:
    try:
        ranges = len(parse_split(text))
    except ValueError as error:
        return f'one range per rank, such as "0-8,8-36": {error}'
    return f"{nodes} ranges, one per node, not {ranges}" if nodes not in (None, ranges) else None
