"""The activity of a command's rank, as its keeper sees it by its processes: such a program reports nothing by itself.

Two events, written when something has changed, and the first again while the rank is not busy. `processes`: `state` is
"busy", "idle" (all use less than IDLE_SHARE of one core) or "stopped" (one is, as by SIGSTOP, and the others do next to
nothing). `group`: `joined` is whether the rank is connected to another one, where the backend's connections show that;
`own_rank` is a process's rank in another group, as a launcher inside the command makes it."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from engine.node import processes
from engine.protocol.events import EventWriter

INTERVAL_S, FIRST_INTERVAL_S = 5.0, 1.0
REPEAT_S = 30.0
IDLE_SHARE, STOPPED_SHARE = 0.005, 0.02
"""Shares of one core: a rank that waits in gloo needs 0.14 %; what looks after a stopped one, as torchrun, more."""
GROUPS = (
    ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    ("MLX_RANK", "MLX_HOSTFILE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
"""The variables by which a launcher tells a process its rank, the first, and its group: torchrun and those that use
it, mlx.launch, mpirun."""
_ESTABLISHED = "01"


class RankActivity:
    """Call `poll` often: it looks at the processes when it is time to."""

    def __init__(self, events: EventWriter, pid: int, environment: Mapping[str, str], *, grouped: bool) -> None:
        """`pid`: the rank's program, which leads its session; `environment`: what it was started with. `grouped`: the
        ranks are to be one group, of which these variables tell."""
        self._events = events
        self._pid = pid
        self._began = self._polled_at = time.monotonic()
        self._cpu_s: Mapping[int, float] | None = None
        self._state, self._written_at, self._warned = "", self._began, False
        self._environment = environment
        self._given = {names: [environment.get(name) for name in names] for names in GROUPS if grouped}
        self._peers = peer_addresses(environment) if grouped else set()
        self._joined: bool | None = None
        self._own_rank: int | None = None

    def poll(self) -> None:
        now = time.monotonic()
        elapsed = now - self._polled_at
        if elapsed < min(INTERVAL_S, max(FIRST_INTERVAL_S, (now - self._began) / 4)):
            return
        self._polled_at = now
        # Without the list of processes nothing is known, and nothing is said.
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            cpu_s, stopped = processes.family_activity(self._pid)
            self._take_state(cpu_s, elapsed, stopped=stopped)
            self._look_at_group(cpu_s)

    def _take_state(self, cpu_s: Mapping[int, float], elapsed: float, *, stopped: bool) -> None:
        before, self._cpu_s = self._cpu_s, cpu_s
        used = sum(max(0.0, used - before.get(pid, 0.0)) for pid, used in cpu_s.items()) if before is not None else 1.0
        stopped = stopped and used < STOPPED_SHARE * elapsed
        state = "stopped" if stopped else "idle" if used < IDLE_SHARE * elapsed else "busy"
        if state != self._state or (state != "busy" and self._polled_at - self._written_at >= REPEAT_S):
            self._state, self._written_at = state, self._polled_at
            self._events.write("processes", state=state)
            if state == "idle" and not self._warned and (locks := processes.abandoned_locks(self._environment)):
                self._warned = True
                what = f"torch may be waiting for a lock that a killed build has left: rm {shlex.quote(locks[0])}"
                self._events.write("warning", message=what)

    def _look_at_group(self, pids: Iterable[int]) -> None:
        if self._peers and not self._joined and (joined := connected(self._peers)) != self._joined:
            self._joined = joined
            self._events.write("group", joined=joined)
        if self._own_rank is not None or self._joined:
            return
        for names, given in self._given.items():
            seen = processes.variables_of(pids, *names).values()
            differing = [values for values in seen if list(values.values()) != given]
            if ranks := [int(values[names[0]]) for values in differing if values[names[0]].isdecimal()]:
                self._own_rank = min(ranks)
                self._events.write("group", own_rank=self._own_rank)
                return


def peer_addresses(environment: Mapping[str, str]) -> set[tuple[str, int]]:
    """(IP, port) at which the other ranks of a rank's group listen; none where its backend's connections show nothing,
    as with PyTorch's rank 0, to which the others connect."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if "MASTER_PORT" in environment:
            is_first = environment["RANK"] == "0"
            return set() if is_first else {(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))}
        hosts: list[list[str]] = json.loads(Path(environment["MLX_HOSTFILE"]).read_text())
        others = [addresses for rank, addresses in enumerate(hosts) if rank != int(environment["MLX_RANK"])]
        pairs = [address.rpartition(":") for addresses in others for address in addresses]
        return {(host, int(port)) for host, _, port in pairs}
    return set()


def connected(peers: Iterable[tuple[str, int]]) -> bool:
    """This machine has a TCP connection to one of these addresses. Raises OSError, ValueError."""
    if sys.platform == "darwin":
        rows = [row.split() for row in processes.tool_output("netstat", "-anp", "tcp").splitlines()]
        far = {row[4] for row in rows if len(row) > 5 and row[5] == "ESTABLISHED"}
        return not far.isdisjoint(f"{host}.{port}" for host, port in peers)
    far = {row[2] for row in processes.linux_tcp() if row[3] == _ESTABLISHED}
    return any(address.endswith(tuple(_in_table(*peer) for peer in peers)) for address in far)


def _in_table(host: str, port: int) -> str:
    """An address as the tables of proc_pid_net(5) end with it, also one of IPv4 among those of IPv6: words in the
    machine's own byte order."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{port:04X}"
