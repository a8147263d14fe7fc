"""The whole console under a flood, measured: `uv run python -m tests.bench.flood [--seconds N]`.

A real run of two ranks prints 50,000 lines a second through keepers, mlx.launch and supervisor; the real `flightdeck`
on a pseudo-terminal of 120x36 shows it on its dashboard, where keys are pressed and their answers awaited on the
screen. Also: what the supervisor and the launcher burn meanwhile. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.api import Engine
from engine.models import RunState
from engine.node.bootstrap import node_root
from engine.protocol.attempt import NodeFiles
from engine.run.events import LauncherStarted
from engine.run.journal import read_journal
from engine.run.logs.line_index import LogIndex
from engine.store.layout import RunDir
from tests.bench.figures import Figure, machine, report
from tests.bench.logs import GROWTH_MB, KEY_P99_MS, LINES_PER_SECOND, RANKS, quantile, read_for, resident_mb
from tests.conftest import FLIGHTDECK
from tests.terminal import Terminal

CONFIG = """
[cluster]
name = "flood"
[[node]]
name = "left"
[[node]]
name = "right"
[job]
command = ["python", "flood.py", "{rate}", "{seconds}"]
[preflight]
all_sum_s = 0.2
"""

RANK = """
import os, sys, time
rate, seconds = int(sys.argv[1]), float(sys.argv[2])
rank, step, begun = os.environ["MLX_RANK"], 0, time.monotonic()
line = "rank {rank} step {step:9d} loss 1.2391 learning rate 1.000e-05 tokens per second 1840.22\\n"
while (passed := time.monotonic() - begun) < seconds:
    due = int(passed * rate)
    sys.stdout.write("".join(line.format(rank=rank, step=number) for number in range(step, due)))
    sys.stdout.flush()
    step = due
    time.sleep(0.01)
"""

WARM_UP_S = 3.0
_TICK_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK_S


def answer_s(console: Terminal, key: bytes, answer: bytes) -> float:
    """Seconds from a key to its answer on the terminal."""
    console.output.clear()
    begun = time.perf_counter()
    console.press(key)
    console.read_until(answer)
    return time.perf_counter() - begun


async def flood(home: Path, seconds: float) -> list[Figure]:
    (home / "flood.py").write_text(RANK)
    config = home / "flightdeck.toml"
    config.write_text(CONFIG.format(rate=LINES_PER_SECOND // len(RANKS), seconds=seconds + WARM_UP_S))
    engine = Engine(home / "state")
    run = await engine.launches.launch(engine.load_config(config))
    watch = engine.runs.watch(run.id)
    while watch.poll().record.state is not RunState.RUNNING:
        await asyncio.sleep(0.05)
    head = RunDir(engine.home / "runs" / run.id)
    supervisor = int(json.loads(head.supervisor.read_text())["pid"])
    launcher = next(event.pid for event in read_journal(head.journal) if isinstance(event, LauncherStarted))

    with Terminal([str(FLIGHTDECK), "-c", str(config)]) as console:
        console.read_until(b"TAIL")
        read_for(console, WARM_UP_S / 2)
        begun, used = time.monotonic(), (cpu_s(supervisor), cpu_s(launcher), cpu_s(console.pid))
        moments, waits, before = random.Random(7), [], 0.0
        while time.monotonic() - begun < seconds - WARM_UP_S:
            # What a key does must be seen among all that pours in: space holds the display and lets it go again.
            waits.append(answer_s(console, b" ", b"FROZEN"))
            read_for(console, moments.uniform(0.02, 0.1))
            waits.append(answer_s(console, b" ", b"TAIL"))
            read_for(console, moments.uniform(0.02, 0.3))
            if not before and time.monotonic() - begun > seconds / 4:
                before = resident_mb(console.pid)
        passed, after = time.monotonic() - begun, resident_mb(console.pid)
        burnt = [
            (now - then) / passed
            for now, then in zip((cpu_s(supervisor), cpu_s(launcher), cpu_s(console.pid)), used, strict=True)
        ]
        console.press(b"q")
        console.wait()
    while not (record := watch.poll().record).state.ended:
        await asyncio.sleep(0.05)
    figures = _figures(head, record.state, waits, memory=(before, after), burnt=burnt, seconds=seconds + WARM_UP_S)
    return list(figures)


def _figures(
    head: RunDir,
    state: RunState,
    waits: list[float],
    *,
    memory: tuple[float, float],
    burnt: list[float],
    seconds: float,
) -> Iterator[Figure]:
    node = NodeFiles.for_attempt(node_root(), head.id, 1)
    written = [node.log(rank).read_bytes().count(b"\n") for rank in RANKS]
    same = all(head.log(rank).read_bytes() == node.log(rank).read_bytes() for rank in RANKS)
    whole = same and [LogIndex(head.index(rank)).count for rank in RANKS] == written
    p50, p99 = quantile(waits, 0.5) * 1000, quantile(waits, 0.99) * 1000
    rate = sum(written) / seconds
    yield Figure("the run", state.value, "succeeded", state is RunState.SUCCEEDED)
    yield Figure("lines printed per second", f"{rate:,.0f}", f"{LINES_PER_SECOND:,}", rate > 0.9 * LINES_PER_SECOND)
    yield Figure("lines printed, stored, indexed, bytes equal", f"{sum(written):,}", "all", whole)
    yield Figure(f"key answered, p50 of {len(waits)}", f"{p50:.1f} ms")
    yield Figure("key answered, p99", f"{p99:.1f} ms", f"< {KEY_P99_MS:.0f} ms", p99 < KEY_P99_MS)
    yield Figure("key answered, longest", f"{max(waits) * 1000:.1f} ms")
    yield Figure(
        "console's memory at a quarter, at the end",
        f"{memory[0]:.1f} MB, {memory[1]:.1f} MB",
        f"grows < {GROWTH_MB:.0f} MB",
        memory[1] - memory[0] < GROWTH_MB,
    )
    for name, share in zip(("supervisor", "mlx.launch", "console"), burnt, strict=True):
        yield Figure(f"{name}, share of a core", f"{share:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(description="The whole console under a flood, measured.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the flood")
    options = parser.parse_args()
    print(machine())
    with TemporaryDirectory() as directory:
        home = Path(directory)
        os.environ["FLIGHTDECK_HOME"] = str(home / "state")
        return report(asyncio.run(flood(home, options.seconds)))


if __name__ == "__main__":
    sys.exit(main())
