"""Charts of long runs, measured: `uv run python -m tests.bench.series [--points N] [--runs N]`.

(a) a run of N points of its loss is opened, and redrawn at random zooms, on all three axes and with its average, beside
one of a thousand points; (b) the curves of --runs runs with 100,000 points each are read, drawn in one chart; (c) how
fast rows become series, and what they take on disk. All times are CPU time of the thread: what a key waits on a quiet
machine with the files in memory. Exits 1 when a target is missed."""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.run.series.builder import SeriesBuilder, SeriesState
from engine.run.series.pyramid import PyramidWriter
from engine.run.series.reader import AXES, RunSeries
from engine.store.layout import RunDir
from tests.bench.figures import Figure, machine, report
from tui.glyphs import Glyphs
from tui.widgets.chart import draw, picture

SIZE = (156, 30)
COLUMNS = 2 * 148
KEYS = 200
COMPARED_POINTS = 100_000
ROWS = 20_000
OPEN_S, KEY_P99_MS, COMPARE_S = 0.3, 50.0, 0.3


def make_run(folder: Path, points: int) -> RunDir:
    """A run whose loss has so many points, each with its tokens and times, by the writer itself."""
    run_dir, rng = RunDir(folder), random.Random(points)
    run_dir.series.mkdir(parents=True)
    loss, clock = PyramidWriter(run_dir.series / "0"), PyramidWriter(run_dir.series / "1")
    for number in range(points):
        loss.add(number, 2.0 + math.exp(-6.0 * number / points) + rng.gauss(0.0, 0.1))
        clock.add(number, 1.5 * number)
    for writer in (loss, clock):
        writer.flush()
    for place in ("2", "3"):
        for path in run_dir.series.glob("1.*"):
            (run_dir.series / f"{place}{path.suffix}").hardlink_to(path)
    names = [("loss", "train"), ("clock", "tokens"), ("clock", "seconds"), ("clock", "at")]
    state = SeriesState(series=[(*name, points) for name in names])
    (run_dir.series / "state.json").write_text(json.dumps(asdict(state)))
    return run_dir


def drawn(runs: list[RunSeries], axis: str, share: float, rng: random.Random, *, smooth: bool = False) -> None:
    """What a key costs: the window of each run is read, and one chart drawn."""
    for series in runs:
        series.refresh()
    first, last = runs[0].extent("loss", axis)
    span = (last - first) * share
    left = first + rng.random() * (last - first - span)
    window = left, left + span
    charts = [series.chart("loss", axis, window, COLUMNS, smooth=smooth) for series in runs]
    curves = tuple(curve for chart in charts for curve in chart.curves)
    draw(picture(replace(charts[0], curves=curves), window), *SIZE, Glyphs())


def timed_ms(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return (time.thread_time() - begun) * 1e3


def keys(run_dir: RunDir) -> tuple[float, list[float]]:
    """Milliseconds to open the run, and of each key after that."""
    rng = random.Random(7)
    opened = timed_ms(lambda: drawn([RunSeries(run_dir)], "iterations", 1.0, rng))
    series, waits = [RunSeries(run_dir)], []
    for number in range(KEYS):
        share, axis = 10 ** -rng.uniform(0.0, 5.0), AXES[number % 3]
        waits.append(timed_ms(lambda: drawn(series, axis, share, rng, smooth=number % 2 == 0)))  # noqa: B023
    return opened, waits


def long_run(root: Path, points: int) -> Iterator[Figure]:
    """Part (a)."""
    for count in (1_000, points):
        run_dir = make_run(root / str(count), count)
        opened, waits = keys(run_dir)
        p99 = statistics.quantiles(waits, n=100)[98]
        value = f"{opened:.1f} ms, p50 {statistics.median(waits):.1f}, p99 {p99:.1f} ms"
        met = opened < OPEN_S * 1e3 and p99 < KEY_P99_MS
        yield Figure(f"{count:,} points: opened; a key redraws them", value, f"< {KEY_P99_MS:g} ms", met)


def compared(root: Path, runs: int) -> Iterator[Figure]:
    """Part (b)."""
    folders = [make_run(root / f"run{number}", COMPARED_POINTS) for number in range(runs)]
    rng = random.Random(3)
    opened = timed_ms(lambda: drawn([RunSeries(folder) for folder in folders], "tokens", 1.0, rng))
    series = [RunSeries(folder) for folder in folders]
    waits = [timed_ms(lambda: drawn(series, "tokens", 10 ** -rng.uniform(0.0, 4.0), rng)) for _ in range(20)]
    name = f"{runs} runs of {COMPARED_POINTS:,} points: opened, in one chart"
    yield Figure(name, f"{opened:.0f} ms", f"< {COMPARE_S * 1e3:g} ms", opened < COMPARE_S * 1e3)
    yield Figure("the same: a zoom of all", f"median {statistics.median(waits):.0f} ms")


def built(root: Path) -> Iterator[Figure]:
    """Part (c)."""
    run_dir, began = RunDir(root / "rows"), datetime(2026, 1, 1, tzinfo=UTC)
    run_dir.path.mkdir()
    with run_dir.metrics.open("w") as file:
        for number in range(ROWS):
            row = {"kind": "train", "attempt": 1, "at": (began + timedelta(seconds=number)).isoformat()}
            figures = {"train_loss": 2.5, "learning_rate": 1e-3, "tokens_per_second": 900.0, "trained_tokens": number}
            file.write(json.dumps({**row, "iteration": number, **figures}) + "\n")
    builder = SeriesBuilder.take(run_dir)
    assert builder is not None
    seconds = timed_ms(builder.poll) / 1e3
    builder.close()
    size = sum(path.stat().st_size for path in run_dir.series.iterdir())
    yield Figure("rows become series", f"{ROWS / seconds:,.0f} rows/s")
    yield Figure(
        "on disk, of six series and what they were read from",
        f"{size / ROWS:.0f}, {run_dir.metrics.stat().st_size / ROWS:.0f} bytes a row",
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--points", type=int, default=10_000_000)
    options.add_argument("--runs", type=int, default=20)
    chosen = options.parse_args()
    print(machine())
    with TemporaryDirectory() as directory:
        root = Path(directory)
        parts = (long_run(root, chosen.points), compared(root, chosen.runs), built(root))
        return max(report(part) for part in parts)


if __name__ == "__main__":
    raise SystemExit(main())
