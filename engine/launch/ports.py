"""Ports: a fresh consecutive block for each attempt, and who holds a port that turned out to be busy."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.config.models import NodeConfig
from engine.errors import LaunchError
from engine.launch.asking import ask, at_once
from engine.launch.hostfile import port_count, ports_of
from engine.launch.ports_script import bindable
from engine.launch.staging import Ways, hosts_of
from engine.planning.wiring import Wiring

# Below both systems' ephemeral ports (Linux 32768, macOS 49152), above the registered ones in common use,
# and away from MLX's own default of 32323.
LOWEST, HIGHEST = 20_000, 32_000
_ROUNDS, _CANDIDATES = 3, 24
SCRIPT = Path(__file__).with_name("ports_script.py")
_LISTEN = "0A"
_TOOL_TIMEOUT_S = 5.0


async def fresh_ports(
    fleet: Ways,
    nodes: Sequence[NodeConfig],
    wiring: Wiring,
    starting_port: int | None = None,
    *,
    rng: random.Random | None = None,
) -> int:
    """The first of the consecutive TCP ports that an attempt listens on, each really free where it will be listened on.

    A given `starting_port` is taken as it is: whether it is free is preflight's question. Otherwise the block is chosen
    at random, and each host is asked, all at the same time, for the ports of its own ranks. Raises LaunchError when
    nothing is free on all hosts, and what transports raise.
    """
    if starting_port is not None:
        return starting_port
    chooser = rng or random.SystemRandom()
    listening = {
        ranks: [offset for rank in ranks for offset in ports_of(rank, wiring, 0)] for ranks in hosts_of(nodes).values()
    }
    for _ in range(_ROUNDS):
        firsts = [chooser.randrange(LOWEST, HIGHEST - port_count(wiring)) for _ in range(_CANDIDATES)]
        free = await at_once(
            _free(fleet, nodes[ranks[0]], firsts, offsets) for ranks, offsets in listening.items() if offsets
        )
        if (common := next((first for first in firsts if all(first in each for each in free)), None)) is not None:
            return common
    raise LaunchError(
        f"no {port_count(wiring)} consecutive ports are free on all hosts",
        why=f"tried {_ROUNDS * _CANDIDATES} places between {LOWEST} and {HIGHEST}",
        todo="set starting_port in [cluster]",
    )


async def _free(fleet: Ways, node: NodeConfig, firsts: Sequence[int], offsets: Sequence[int]) -> set[int]:
    """Those of `firsts` from which on a host's ranks could listen."""
    if node.local:
        # Bound for a moment each: too quick to be worth a thread.
        return {first for first in firsts if all(bindable("", first + offset) for offset in offsets)}
    question = json.dumps({"firsts": list(firsts), "offsets": list(offsets)})
    answer = await ask(fleet.to(node), node, SCRIPT, question, "free")
    free = answer["free"]
    return {first for first in firsts if first in free} if isinstance(free, list) else set()


def holder(port: int) -> str | None:
    """Who listens on TCP `port` of this machine, as "pid 12 (command)"; None when nobody does.

    A listener that the caller may not inspect is "a process of another user".
    """
    return _linux_holder(port) if sys.platform.startswith("linux") else _lsof_holder(port)


def listening_inodes(table: str, port: int) -> set[str]:
    """Socket inodes that listen on `port` in the text of a /proc/net/tcp table."""
    found = set()
    for row in table.splitlines()[1:]:
        fields = row.split()
        if len(fields) > 9 and fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def lsof_pid(output: str) -> int | None:
    """The first pid in what `lsof -F p` printed."""
    match = re.search(r"^p(\d+)$", output, re.MULTILINE)
    return int(match[1]) if match else None


def _linux_holder(port: int) -> str | None:
    inodes: set[str] = set()
    for name in ("tcp", "tcp6"):
        try:
            inodes |= listening_inodes((Path("/proc/net") / name).read_text(), port)
        except OSError:
            continue
    if not inodes:
        return None
    targets = {f"socket:[{inode}]" for inode in inodes}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # Path.readlink would take the target for a path; it is a name like "socket:[123]".
            if any(os.readlink(link) in targets for link in (entry / "fd").iterdir()):  # noqa: PTH115
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return _described(int(entry.name), command)
        except OSError:
            continue
    return "a process of another user"


def _lsof_holder(port: int) -> str | None:
    pid = lsof_pid(_said("lsof", "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-F", "p"))
    if pid is None:
        return None
    return _described(pid, _said("ps", "-ww", "-o", "command=", "-p", str(pid)).strip())


def _described(pid: int, command: str) -> str:
    return f"pid {pid} ({command[:120] or '?'})"


def _said(*command: str) -> str:
    try:
        finished = subprocess.run(command, capture_output=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return finished.stdout.decode(errors="replace")
