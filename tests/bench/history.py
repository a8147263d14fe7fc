"""How fast the console's history and its comparison are: ten thousand runs, and twenty of a hundred thousand points.

python -m tests.bench.history [--runs 10000]
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path

from textual.pilot import Pilot

from engine.api import Engine
from engine.models import RunState
from engine.store.store import Store
from tests.bench.figures import Figure, measure
from tests.unit.run.run_maker import START, MadeRun, report, validation
from tests.unit.store.records import record
from tui.app import FlightDeckApp

COMPARED, POINTS = 20, 100_000
OPEN_LIMIT_S, KEY_LIMIT_S = 0.3, 0.05
KEYS = ("l", "l", "m", "h", "A", "plus", "greater_than_sign", "minus", "j", "k")


def make_history(home: Path, runs: int) -> None:
    """Runs that have ended, the newest COMPARED of which have POINTS reports, kept as their supervisor keeps them."""
    old = [record(number, ended_at=record(number + 1).created_at, train_loss=2.0) for number in range(runs - COMPARED)]
    Store(home).rebuild(old)
    (home / "runs").mkdir()
    for ended in old:
        (home / "runs" / ended.id).mkdir()
    rows = [report(step, 3.0 / step**0.2, tokens_per_second=1000.0 + step % 7) for step in range(1, POINTS + 1)]
    first: MadeRun | None = None
    for number in range(COMPARED):
        run = MadeRun(home, number=number, created=START + timedelta(days=300, minutes=number))
        run.state("preflight", "launching").attempt().state("running", "finishing")
        if first is None:
            first = run.metrics([*rows, validation(POINTS, 1.0)])
            Engine(home).runs.series(run.id).refresh(ended=True)
        else:
            os.link(first.directory.metrics, run.directory.metrics)
            shutil.copytree(first.directory.series, run.directory.series)
        run.state("succeeded", reason="completed", iteration=POINTS, train_loss=1.0).close()
        Store(home).put_run(run.plan.record().model_copy(update={"state": RunState.SUCCEEDED, "ended_at": START}))


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> float:
    """Seconds until it holds."""
    began = time.perf_counter()
    while not holds():
        await asyncio.sleep(0.005)
    await pilot.pause()
    return time.perf_counter() - began


async def console(home: Path, runs: int) -> dict[str, list[float]]:
    """Processor seconds of each kind of request, drawing included."""
    app, times = FlightDeckApp(Engine(home), None), dict[str, list[float]]()
    async with app.run_test(size=(160, 45)) as pilot:
        await until(pilot, lambda: app.state.ready and app.state.runs is not None)
        while len(app.screen_stack) > 1:
            app.pop_screen()
            await pilot.pause()

        async def timed(name: str, holds: Callable[[], bool], *keys: str) -> None:
            # Other work of the machine, and the pilot's own waiting, are no part of it.
            began = time.process_time()
            for key in keys:
                app.simulate_key(key)
            await until(pilot, holds)
            times.setdefault(name, []).append(time.process_time() - began)

        history, deck = app.deck.history, app.deck
        # Without a configuration it is what is shown first.
        app.simulate_key("4")
        await until(pilot, lambda: app.state.view == "run")
        assert len(app.state.runs or ()) == runs
        await timed("open", lambda: app.state.view == "history" and len(history._runs) == runs, "5")
        for number in range(COMPARED):
            await timed("key", lambda wanted=number + 1: len(app.state.marked) == wanted, "space")  # type: ignore[misc]
        await timed("compare", lambda: app.state.view == "compare" and deck.chart.reading is not None, "enter")
        for key in KEYS * 10:
            await timed("key in the comparison", lambda: deck.chart.settled, key)
    return times


def figures(runs: int, home: Path) -> Iterable[Figure]:
    make_history(home, runs)
    listed = []
    for _ in range(2):
        engine = Engine(home)
        began = time.process_time()
        assert len(engine.runs.all()) == runs
        listed.append(time.process_time() - began)
        began = time.process_time()
        engine.runs.all()
        again = time.process_time() - began
    yield Figure(f"{runs:,} runs are read (processor time)", f"{listed[0]:.3f} s")
    yield Figure("the same, a second later", f"{again * 1e3:.1f} ms", "<= 10 ms", again <= 0.01)
    times = asyncio.run(console(home, runs))
    for name, what in (
        ("open", "the history opens"),
        ("compare", f"{COMPARED} runs of {POINTS:,} points are compared"),
    ):
        seconds = times[name][0]
        yield Figure(what, f"{seconds:.3f} s", f"< {OPEN_LIMIT_S:g} s", seconds < OPEN_LIMIT_S)
    for name in ("key", "key in the comparison"):
        p99 = statistics.quantiles(times[name], n=100)[98]
        p50 = statistics.median(times[name])
        value = f"p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms"
        yield Figure(name, value, f"p99 < {KEY_LIMIT_S * 1e3:.0f} ms", p99 < KEY_LIMIT_S)


if __name__ == "__main__":
    raise SystemExit(measure("The history and the comparison in the console.", figures, "--runs", 10_000))
