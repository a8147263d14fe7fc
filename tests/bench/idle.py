"""An open console that nobody touches: `uv run python -m tests.bench.idle [--seconds N] [--size 120x36]`.

The real `flightdeck` on a pseudo-terminal shows a real run of two ranks, which report once a second and print ten lines
then; each view is left alone for N seconds, while it trains and after its end: processor time of the process. Then its
memory (`ps`, RSS): a second run prints a million log lines while the console shows it, every view is visited, and an
hour is simulated: a third run makes an hour's 3,600 reports in 72 s, with the console's clocks 50 times as fast (36,000
polls, 3,600 redraws of ages). Exits 1 when a target is missed."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.api import Engine
from engine.run.watch import RunWatch
from tests.bench.figures import Figure, machine, report
from tests.bench.flood import cpu_s
from tests.bench.logs import read_for, resident_mb
from tests.conftest import FLIGHTDECK
from tests.terminal import Terminal

CONFIG = """
[cluster]
name = "idle"
[[node]]
name = "left"
[[node]]
name = "right"
[job]
command = ["python", "rank.py", "{reports}", "{every}", "{lines}"]
[preflight]
all_sum_s = 0.2
"""

RANK = """
import sys, time
reports, every, lines = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
begun = time.monotonic()
for step in range(1, reports + 1):
    sys.stdout.write(f"step {step} of a line as programs print them, once for each batch\\n" * lines)
    print(f"Iter {step}: Train loss {3 / step ** 0.3:.3f}, Learning Rate 1.000e-05, It/sec {1 / every:.3f}, "
          f"Tokens/sec 1840.22, Trained Tokens {step * 800}, Peak mem 0.5 GB", flush=True)
    time.sleep(max(0.0, begun + step * every - time.monotonic()))
"""

FAST = """
import sys
from tui import app, poller
app.TICK_S, app.POLL_S, poller.ENDED_POLL_S, poller.RUNS_S = 1 / 50, 0.1 / 50, 1 / 50, 1 / 50
from tui.cli import main
sys.exit(main())
"""
HOUR, PACE = 3600, 50
MILLION = (100, 0.2, 5000)
"""Reports, seconds between two, and lines printed with each, of each of two ranks."""
VIEWS = {"dashboard": b"\x1b", "nodes": b"1", "preflight": b"2", "calibration": b"3", "run": b"4", "history": b"5"}
SETTLE_S = 4.0
IDLE_SHARE, TRAINING_SHARE, MOST_MB = 0.01, 0.04, 90.0


async def launched(engine: Engine, home: Path, reports: int, every: float, lines: int) -> RunWatch:
    config = home / "flightdeck.toml"
    config.write_text(CONFIG.format(reports=reports, every=every, lines=lines))
    run = await engine.launches.launch(engine.load_config(config))
    watch = engine.runs.watch(run.id)
    while watch.poll().series.train == ():
        await asyncio.sleep(0.1)
    return watch


def shares(console: Terminal, seconds: float) -> Iterator[tuple[str, float]]:
    """Of a core, in each view."""
    for view, key in VIEWS.items():
        console.press(key)
        read_for(console, SETTLE_S)
        used, begun = cpu_s(console.pid), time.monotonic()
        read_for(console, seconds)
        yield view, (cpu_s(console.pid) - used) / (time.monotonic() - begun)


def views(console: Terminal, watch: RunWatch, seconds: float) -> Iterator[Figure]:
    for limit, state in ((TRAINING_SHARE, "while it trains"), (IDLE_SHARE, "after its end")):
        for view, share in shares(console, seconds):
            yield Figure(f"{view}, {state}: of a core", f"{share:.2%}", f"<= {limit:.0%}", share <= limit)
        while not watch.poll().record.state.ended:
            read_for(console, 1.0)


def visited(console: Terminal, watch: RunWatch) -> float:
    """Megabytes after the run's end, every view seen."""
    while not watch.poll().record.state.ended:
        read_for(console, 1.0)
        console.press(b"4g")
        read_for(console, 1.0)
        console.press(b"G\x1b")
    for key in VIEWS.values():
        console.press(key)
        read_for(console, 1.0)
    return resident_mb(console.pid)


def figures(home: Path, seconds: float, size: tuple[int, int]) -> Iterator[Figure]:
    (home / "rank.py").write_text(RANK)
    engine, options = Engine(home / "state"), ["-c", str(home / "flightdeck.toml")]
    reports = int(len(VIEWS) * (seconds + SETTLE_S)) + 15
    watch = asyncio.run(launched(engine, home, reports, 1.0, 10))
    with Terminal([str(FLIGHTDECK), *options], size=size) as console:
        read_for(console, SETTLE_S)
        yield Figure("memory at the start", f"{resident_mb(console.pid):.1f} MB")
        yield from views(console, watch, seconds)
    watch = asyncio.run(launched(engine, home, *MILLION))
    with Terminal([str(FLIGHTDECK), *options], size=size) as console:
        megabytes = visited(console, watch)
        lines = 2 * MILLION[0] * (MILLION[2] + 1)
        name = f"memory after {lines:,} log lines, every view seen"
        yield Figure(name, f"{megabytes:.1f} MB", f"<= {MOST_MB:g} MB", megabytes <= MOST_MB)
    watch = asyncio.run(launched(engine, home, HOUR, 1 / PACE, 1))
    with Terminal([sys.executable, "-c", FAST, *options], size=size) as console:
        megabytes = visited(console, watch)
        yield Figure("memory after a simulated hour", f"{megabytes:.1f} MB", f"<= {MOST_MB:g} MB", megabytes <= MOST_MB)


def main() -> int:
    parser = argparse.ArgumentParser(description="What an open console that nobody touches takes.")
    parser.add_argument("--seconds", type=float, default=20.0, help="in each view")
    parser.add_argument("--size", default="120x36")
    options = parser.parse_args()
    print(machine())
    columns, rows = options.size.split("x")
    with TemporaryDirectory() as directory:
        home = Path(directory)
        os.environ["FLIGHTDECK_HOME"] = str(home / "state")
        return report(figures(home, options.seconds, (int(columns), int(rows))))


if __name__ == "__main__":
    raise SystemExit(main())
