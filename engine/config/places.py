"""Paths, hosts and addresses of a configuration: their form, and what they stand for on the node they belong to.
Whether they exist is preflight's to say."""

from __future__ import annotations

import ipaddress
import os
import posixpath
import re
import shutil
from pathlib import Path

from engine.config.models import NodeConfig
from engine.errors import InputError
from engine.security.hosts import ACCEPTED, LOCAL, SshTarget
from engine.security.paths import path_fault

ON_NODE = "a path on the node: absolute, or below the home of its user (~/…)"
_OTHER_NAMES = frozenset({"localhost", "::1", "ip6-localhost"})
_DEVICE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


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


def remote_path_form(text: object) -> str | None:
    """As `path_form`, for a path that another machine will read: what is relative here is nowhere there."""
    fault = path_fault(text)
    if fault is None and isinstance(text, str):
        if ".." in text.split("/"):
            return "a path without .. (absolute, or below ~)"
        if text != "~" and not text.startswith(("/", "~/")):
            return ON_NODE
    return fault


def resolved(text: str, base: Path) -> str:
    """A path of good form, absolute: ~ expanded, relative ones taken from `base`. Symlinks stay: a virtual
    environment's python is one."""
    return os.path.normpath(base / Path(text).expanduser())


def on_node(text: str, node: NodeConfig, base: Path) -> str:
    """A path of [job] as `node` has it: on this machine absolute, relative ones below `base`, the configuration's
    folder; on another one absolute or below ~, relative ones below the node's workdir."""
    if node.local:
        return resolved(text, base)
    below = text if text == "~" or text.startswith(("/", "~/")) else posixpath.join(node.workdir, text)
    return posixpath.normpath(below)


def interpreter(text: str, base: Path) -> str:
    """As `resolved`, but a name without a folder is looked for on PATH first."""
    found = shutil.which(text) if os.sep not in text else None
    return str(Path(found).absolute()) if found else resolved(text, base)


def host_form(text: object) -> str | None:
    """What is accepted in place of a host; None when it is one."""
    try:
        target = SshTarget.parse(text if isinstance(text, str) else "")
    except InputError as refused:
        return ACCEPTED + (f"; {refused.why}" if refused.why else "")
    if target.host.lower() in _OTHER_NAMES:
        return f"{LOCAL}: localhost can stand for ::1, and MLX's ring takes IPv4 addresses"
    return None


def address_form(text: object) -> str | None:
    """What is accepted in place of an address that a rank listens on; None when it is one."""
    try:
        address = ipaddress.IPv4Address(text if isinstance(text, str) else "")
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_multicast or address.is_reserved:
        return "an IPv4 address of the node, such as 192.168.0.1: MLX's ring takes no names and no IPv6"
    return None


def device_form(text: object) -> str | None:
    """What is accepted in place of the name of an RDMA device; None when it is one."""
    if isinstance(text, str) and _DEVICE.fullmatch(text):
        return None
    return 'the name of an RDMA device such as "rdma_en5", or "" where there is none'
