"""What a cluster of namespaces needs, and whether this machine has it."""

from __future__ import annotations

import os
import sys
from functools import cache

from tests import needs
from tests.cluster.command import attempt

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


@cache
def missing() -> str | None:
    """What a cluster of namespaces needs and this machine lacks; None when it lacks nothing."""
    if not sys.platform.startswith("linux"):
        return "Linux, for a cluster of namespaces"
    if os.geteuid() != 0:
        return "root, for a cluster of namespaces"
    if lacks := next(filter(None, map(needs.missing, TOOLS)), None):
        return lacks
    tried = attempt("unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c", _TRIAL)
    if tried.returncode != 0:
        return f"namespaces, which this machine refuses: {tried.stderr.strip().splitlines()[-1]}"
    return None
