"""What telemetry costs a node: `python -m tests.bench.telemetry [SECONDS]`, 60 by default.

The agent that a console has running on each node, with its telemetry probe, on a machine of 400 more processes of which
8 are ranks': on this machine, and on a node of the test cluster over ssh. Exit code 1 above 1 % of a core."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from engine.cluster.telemetry import INTERVAL_S, telemetry
from engine.cluster.transport.fleet import Fleet
from engine.config.models import ClusterConfig, Config, JobConfig, NodeConfig
from tests.cluster.cluster import Cluster

LIMIT = 0.01
CROWD, RANKS = 400, 8
SETTLE_S = 4.0
"""Left out: the start of the interpreter and the first look at every process."""


CROWD_SCRIPT = f"""
FLIGHTDECK_SPEC=/home/ana/.flightdeck/runs/r/attempts/1/spec.json; FLIGHTDECK_NONCE=bench; i=0
while [ $i -lt {CROWD} ]; do
  [ $i -eq 0 ] && export FLIGHTDECK_SPEC FLIGHTDECK_NONCE
  [ $i -eq {RANKS} ] && unset FLIGHTDECK_SPEC FLIGHTDECK_NONCE
  MLX_RANK=$i sleep 1000 </dev/null >/dev/null 2>&1 &
  i=$((i + 1))
done
"""
"""Processes that do nothing, the first of them marked as ranks'."""


@contextlib.contextmanager
def crowd() -> Iterator[None]:
    """The crowd on this machine, for as long as it is needed."""
    with subprocess.Popen(["/bin/sh", "-c", CROWD_SCRIPT + "wait"], start_new_session=True) as shell:
        try:
            yield
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def agents(python: str) -> list[int]:
    """Pids of the agents with this python, on this machine and on the test cluster's nodes, and of their probes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                argv = (entry / "cmdline").read_bytes()
                if argv.split(b"\0")[0].endswith(python.encode()) and b"engine.node.agent" in argv:
                    found.append(int(entry.name))
    return found


def cpu_s(pid: int) -> float:
    """Time on a core so far; it has one thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


async def measure(node: NodeConfig, seconds: float, home: Path) -> float:
    """The share of a core that an agent and its probe take, while their samples are read."""
    config = Config(cluster=ClusterConfig(), nodes=(node,), job=JobConfig(name="bench", command=("true",)))
    lines = 0
    async with Fleet(home) as fleet:
        values = telemetry(config, fleet)
        began = time.monotonic()
        before: tuple[float, float] | None = None
        async for value in values:
            if value.problem is not None:
                raise SystemExit(f"{node.name}: {value.problem}")
            lines += 1
            now = time.monotonic()
            if before is None and now - began >= SETTLE_S:
                pids = agents(node.python.removeprefix("~"))
                before = (now, sum(map(cpu_s, pids)))
            elif before is not None and now - before[0] >= seconds:
                share = (sum(map(cpu_s, pids)) - before[1]) / (now - before[0])
                seen = len(value.ranks)
                break
        await values.aclose()  # type: ignore[attr-defined]
    word = "ok" if share <= LIMIT else "TOO MUCH"
    print(f"{node.name}: {share:.2%} of a core over {seconds:g} s, a line each {INTERVAL_S:g} s ({lines}), ", end="")
    print(f"{seen} ranks seen (limit {LIMIT:.0%}): {word}", flush=True)
    return share


def main(seconds: float) -> int:
    with crowd():
        here = NodeConfig(name="this machine", python=sys.executable, workdir="/")
        shares = [asyncio.run(measure(here, seconds, Path("/nonexistent")))]
    if os.geteuid() == 0:
        with Cluster(1) as cluster:
            os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
            node = cluster.nodes[0]
            node.run(["/bin/sh", "-c", CROWD_SCRIPT])
            there = NodeConfig(name="a node over ssh", ssh=node.name, python=node.python, workdir="~")
            shares.append(asyncio.run(measure(there, seconds, cluster.folder / "home")))
    else:
        print("a node over ssh: not measured, the test cluster needs root")
    return 0 if max(shares) <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
