"""A launch over SSH beside the stock launcher's, measured: `uv run python -m tests.bench.launch [--rounds N]`.

Four ranks on the test cluster run the same script by `flightdeck launch` and by bare `mlx.launch`, in turn. Compared
are the seconds from the command to the first step of the last rank (the preflight's time taken out), and what the head
spends while the ranks train. Exits 1 when a target is missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.launch import mlx_launch
from engine.models import RunState
from engine.run.events import LauncherStarted, StateChanged
from engine.run.journal import read_journal
from engine.store.layout import RunDir
from tests.bench.figures import Figure, measure
from tests.bench.flood import cpu_s
from tests.cluster.cluster import Cluster
from tests.conftest import FLIGHTDECK

OVERHEAD_S = 1.5
HEAD_SHARE = 0.05
TRAINED_S = 15.0
LIMIT_S = 60.0
FIRST = "first step at"

RING = f"""
import os, sys, time
import mlx.core as mx
group = mx.distributed.init(strict=True, backend="ring")
until, step = None, 0
while True:
    step += 1
    total = mx.distributed.all_sum(mx.ones(250_000), group=group, stream=mx.cpu)
    over = mx.array(float(until is not None and time.time() > until))
    mx.eval(total)
    if step == 1:
        print("{FIRST}", time.time(), flush=True)
        until = time.time() + float(sys.argv[1])
    if step % 50 == 0:
        print("step", step, flush=True)
    over = mx.distributed.all_sum(over, group=group, stream=mx.cpu)
    if over.item() > 0:
        break
    time.sleep(0.02)
"""
CONFIG = """
[cluster]
name = "bench"
launcher = "{launcher}"
{nodes}
[job]
command = ["python", "ring.py", "{seconds}"]
[preflight]
all_sum_s = 0.2
"""
NODE = """
[[node]]
name = "{name}"
ssh = "{ssh}"
ips = ["{ip}"]
python = "{python}"
"""


class LaunchBench:
    """The cluster, furnished for both launchers."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        for node in cluster.nodes:
            node.write("~/ring.py", RING)
            # Stock mlx.launch runs one and the same line everywhere, and these pythons lie elsewhere on each.
            python = node.python.replace("~", "$HOME", 1)
            node.write("~/ring.sh", f'#!/bin/sh\nexec "{python}" "$HOME/ring.py" "$@"\n', mode=0o755)
        hosts = [{"ssh": node.ssh, "ips": [node.ip]} for node in cluster.nodes]
        (folder / "hosts.json").write_text(json.dumps(hosts))
        real = shutil.which("ssh") or "/usr/bin/ssh"
        (folder / "bin").mkdir()
        shim = folder / "bin" / "ssh"
        shim.write_text(f'#!/bin/sh\nexec {real} -F {shlex.quote(str(cluster.ssh_config))} "$@"\n')
        shim.chmod(0o755)
        self._ports = iter(range(24_000, 30_000, 10))

    def ours(self, seconds: float, launcher: str = "mlx.launch") -> tuple[float, float]:
        """(seconds to the first step without the preflight's, share of a core that the head spent)."""
        nodes = "".join(NODE.format(**vars_of(node)) for node in self._cluster.nodes)
        config = self._folder / "flightdeck.toml"
        config.write_text(CONFIG.format(nodes=nodes, launcher=launcher, seconds=seconds))
        begun = time.time()
        done = subprocess.run(
            [FLIGHTDECK, "launch", "-c", str(config), "--json", "--accept"],
            check=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
        run = RunDir(Path(os.environ["FLIGHTDECK_HOME"]) / "runs" / json.loads(done.stdout)["id"])
        await_(lambda: all(FIRST in _text(run.log(rank)) for rank in range(4)))
        share = self._spent(run, seconds)
        await_(lambda: _states(run)[-1].state in ("succeeded", "failed"), limit_s=LIMIT_S + seconds)
        assert _states(run)[-1].state == "succeeded", _states(run)[-1]
        first = max(_first(_text(run.log(rank))) for rank in range(4))
        at = {event.state: event.at.timestamp() for event in _states(run)}
        return first - begun - (at[RunState.LAUNCHING] - at[RunState.PREFLIGHT]), share

    def stock(self, seconds: float) -> tuple[float, float]:
        """The same of bare mlx.launch."""
        environment = {**os.environ, "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}"}
        output = self._folder / "stock.log"
        argv = [str(mlx_launch.executable()), "--backend", "ring", "--hostfile", str(self._folder / "hosts.json")]
        argv += ["--starting-port", str(next(self._ports)), "--"]
        argv += ["/bin/sh", "-c", f'exec "$HOME/ring.sh" {seconds}']
        idle, held = os.pipe()
        begun = time.time()
        with output.open("wb") as log:
            launcher = subprocess.Popen(
                argv, stdin=idle, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        try:
            await_(lambda: _text(output).count(FIRST) == 4)
            used, then = cpu_s(launcher.pid), time.monotonic()
            time.sleep(seconds * 0.7)
            share = (cpu_s(launcher.pid) - used) / (time.monotonic() - then)
            launcher.wait(LIMIT_S + seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
            os.close(idle)
            os.close(held)
        return _first(_text(output)) - begun, share

    def _spent(self, run: RunDir, seconds: float) -> float:
        """Share of a core, by the supervisor and by mlx.launch while there is one."""
        pids = [int(json.loads(run.supervisor.read_text())["pid"])]
        pids += [event.pid for event in read_journal(run.journal) if isinstance(event, LauncherStarted)]
        before, then = {pid: _cpu(pid) for pid in pids}, time.monotonic()
        time.sleep(seconds * 0.7)
        spent = sum(max(0.0, _cpu(pid) - before[pid]) for pid in pids)
        return spent / (time.monotonic() - then)


def vars_of(node: Any) -> dict[str, str]:
    return {name: getattr(node, name) for name in ("name", "ssh", "ip", "python")}


def await_(condition: Any, limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:g} s")
        time.sleep(0.02)


def _cpu(pid: int) -> float:
    try:
        return cpu_s(pid)
    except FileNotFoundError:
        return 0.0


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _states(run: RunDir) -> list[StateChanged]:
    return [event for event in read_journal(run.journal) if isinstance(event, StateChanged)]


def _first(text: str) -> float:
    """The latest of the moments that ranks have told."""
    return max(float(part.split()[0]) for part in text.split(FIRST)[1:])


def figures(rounds: int, folder: Path) -> Iterator[Figure]:
    with Cluster(4) as cluster:
        os.environ["FLIGHTDECK_SSH_CONFIG"] = str(cluster.ssh_config)
        os.environ["FLIGHTDECK_HOME"] = str(folder / "home")
        bench = LaunchBench(cluster, folder)
        # Once for nothing: what is staged and cached on either side is no part of it.
        bench.ours(1)
        stock, ours, direct = [], [], []
        for _ in range(rounds):
            stock.append(bench.stock(1)[0])
            ours.append(bench.ours(1)[0])
            direct.append(bench.ours(1, "direct")[0])
        bare = statistics.median(stock)
        yield Figure(f"bare mlx.launch to the first step, median of {rounds}", f"{bare:.2f} s")
        over = statistics.median(ours) - bare
        name = "flightdeck launch, preflight apart, more than that"
        yield Figure(name, f"{over:+.2f} s", f"<= {OVERHEAD_S} s", over <= OVERHEAD_S)
        yield Figure('the same with launcher = "direct"', f"{statistics.median(direct) - bare:+.2f} s")
        yield Figure("bare mlx.launch while 4 ranks train", f"{bench.stock(TRAINED_S)[1]:.1%} of a core")
        share = bench.ours(TRAINED_S)[1]
        name = "supervisor and mlx.launch while 4 ranks train"
        yield Figure(name, f"{share:.1%} of a core", f"<= {HEAD_SHARE:.0%}", share <= HEAD_SHARE)


def main() -> int:
    return measure("Launches over SSH, measured.", figures, "--rounds", 5)


if __name__ == "__main__":
    sys.exit(main())
