"""Whether this machine can have a cluster of namespaces, and what tests do when it cannot."""

from __future__ import annotations

import os
import shutil
import sys
from functools import cache
from typing import NoReturn

from tests.cluster.command import PATH, attempt

TOOLS = (
    "ip",
    "iptables-restore",
    "mount",
    "nsenter",
    "pivot_root",
    "setpriv",
    "ss",
    "ssh-keygen",
    "sshd",
    "tc",
    "unshare",
)
_TRIAL = """
set -e
ip link add trial0 type veth peer name trial1
ip link add trial2 type bridge
mount -t tmpfs trial /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work trial /mnt/root
"""


def needs_namespaces(what: str) -> NoReturn:
    """Skip the test that asks a node without namespaces for `what`."""
    # Not at the top: clusters by hand need no pytest.
    import pytest

    pytest.skip(f"{what} needs a cluster of namespaces: {missing() or 'this one is of sshds on loopback'}")


@cache
def missing() -> str | None:
    """Why there can be no cluster of namespaces here; None when there can."""
    if not sys.platform.startswith("linux"):
        return f"namespaces are Linux's, this is {sys.platform}"
    if os.geteuid() != 0:
        return "namespaces need root"
    if absent := [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]:
        return f"not installed: {', '.join(absent)}"
    tried = attempt("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", _TRIAL)
    if tried.returncode != 0:
        return f"this machine refuses namespaces: {tried.stderr.strip().splitlines()[-1]}"
    return None


def required() -> bool:
    """Whether tests must have the real thing: in CI, a skipped cluster suite is a failure."""
    return os.environ.get("CI", "").lower() in ("1", "true") or os.environ.get("FLIGHTDECK_REQUIRE_CLUSTER") == "1"
