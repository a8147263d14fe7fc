"""The series of a run: built from its files by whoever comes first, kept over kills and restarts, read on any axis."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.errors import StateError
from engine.run.json_lines import parse_json_line
from engine.run.series import builder
from engine.run.series.builder import MOST_SERIES, SeriesBuilder, SeriesName, read_state
from engine.run.series.reader import AXES, RunSeries
from engine.store.layout import RunDir
from tests.unit.run.run_maker import START

EPOCH = START.timestamp()


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    directory = RunDir(tmp_path / "runs" / "r")
    directory.path.mkdir(parents=True)
    return directory


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def report(iteration: int, *, attempt: int = 1, at: float | None = None, **figures: Any) -> dict[str, Any]:
    moment = START + timedelta(seconds=iteration if at is None else at)
    row = {"kind": "train", "attempt": attempt, "at": moment.isoformat(), "iteration": iteration}
    return {**row, "train_loss": 1 / iteration, "trained_tokens": 100 * iteration, **figures}


def step(iteration: int, *, attempt: int = 1, compute_s: float = 1.0, **values: Any) -> dict[str, Any]:
    return {"event": "step", "attempt": attempt, "iteration": iteration, "compute_s": compute_s, **values}


def build(run_dir: RunDir, *, ended: bool = False) -> None:
    taken = SeriesBuilder.take(run_dir)
    assert taken is not None
    taken.poll(ended=ended)
    taken.close()


def read(
    run_dir: RunDir, metric: str, axis: str = "iterations", width: int = 200
) -> dict[str, list[tuple[float, float]]]:
    series = RunSeries(run_dir)
    series.refresh()
    return {curve.label: curve.points for curve in series.chart(metric, axis, None, width).curves}


def test_a_run_without_series_gets_them_when_they_are_read(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number, accuracy=0.5, note="text") for number in range(1, 31)])
    append(run_dir.metrics, [{"kind": "val", "attempt": 1, "iteration": 30, "val_loss": 0.7}])
    series = RunSeries(run_dir)
    series.refresh()
    assert series.metrics == ["loss", "accuracy"]
    curves = series.chart("loss", "iterations", None, 100).curves
    assert [curve.label for curve in curves] == ["train", "validation"]
    assert curves[0].points == [(number, 1 / number) for number in range(1, 31)]
    assert curves[1].points == [(30.0, 0.7)]


def test_a_figure_that_was_not_finite_is_a_gap(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(1), report(2, train_loss=None), report(3)])
    points = read(run_dir, "loss")["train"]
    assert [x for x, _ in points] == [1, 2, 3] and math.isnan(points[1][1])


def test_a_restart_takes_back_what_it_repeats(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 51)])
    build(run_dir)
    append(run_dir.metrics, [report(number, attempt=2, at=1000 + number, train_loss=9.0) for number in range(38, 45)])
    build(run_dir)
    points = read(run_dir, "loss")["train"]
    assert [x for x, _ in points] == list(range(1, 45))
    assert [y for _, y in points[36:]] == [1 / 37] + [9.0] * 7


def test_active_time_leaves_out_the_wait_for_a_restart(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 11)])
    append(run_dir.metrics, [report(number, attempt=2, at=5000 + number) for number in range(11, 21)])
    series = RunSeries(run_dir)
    series.refresh()
    assert series.extent("loss", "time") == (0.0, 18.0)
    assert series.extent("loss", "tokens") == (100.0, 2000.0)
    assert series.places("tokens", [5, 20]) == [500.0, 2000.0]
    half = series.chart("loss", "tokens", (500.0, 1000.0), 100).curves[0].points
    assert [x for x, _ in half] == [100.0 * number for number in range(4, 12)]
    values = dict(series.values("tokens", 700.0))
    assert values[SeriesName("loss", "train")] == 1 / 7


def test_tokens_that_are_not_reported_leave_iterations(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number, trained_tokens=None) for number in range(1, 5)])
    series = RunSeries(run_dir)
    series.refresh()
    assert series.chart("loss", "tokens", None, 10).axis == "iterations"


@pytest.mark.parametrize("axis", AXES)
def test_a_cursor_at_a_point_has_the_values_of_that_point(run_dir: RunDir, axis: str) -> None:
    numbers = random.Random(3)
    times, at = [], 0.0
    for _ in range(999):
        times.append(at := at + numbers.uniform(0.05, 0.9))
    rows = [report(n, at=at, trained_tokens=int(at * 317)) for n, at in enumerate(times, 1)]
    append(run_dir.metrics, [{"kind": "val", "attempt": 1, "iteration": 1, "val_loss": 0.7}, *rows])
    append(run_dir.telemetry, [{"at": EPOCH + at, "node": "ana", "cpu_use": n} for n, at in enumerate(times, 1)])
    series = RunSeries(run_dir)
    series.refresh()
    for iteration in range(1, 1000):
        (x,) = series.places(axis, [iteration])
        values = dict(series.values(axis, x))
        assert values[SeriesName("loss", "train")] == 1 / iteration
        assert values[SeriesName("loss", "validation")] == 0.7
        assert axis != "time" or abs(values[SeriesName("CPU use", "ana")] - iteration) < 1


def test_the_steps_of_all_ranks_make_one_point(run_dir: RunDir) -> None:
    for rank, seconds in enumerate((1.0, 1.5)):
        start = {"event": "start", "attempt": 1, "world_size": 2}
        steps = [step(n, compute_s=seconds, communicate_s=2.0 - seconds, peak_memory_bytes=n) for n in (1, 2)]
        append(run_dir.events(rank), [start, *steps])
    append(run_dir.events(0), [step(3, grad_norm=4.0)])
    assert read(run_dir, "skew") == {"": [(1.0, 0.5), (2.0, 0.5)]}
    assert read(run_dir, "compute") == {"rank 0": [(1.0, 1.0), (2.0, 1.0)], "rank 1": [(1.0, 1.5), (2.0, 1.5)]}
    parts = read(run_dir, "step time")
    assert [parts[name][0][1] for name in ("whole", "compute", "exchange")] == [2.0, 1.5, 0.5]
    assert "gradient" not in RunSeries(run_dir).metrics
    append(run_dir.events(1), [step(3)])
    assert read(run_dir, "gradient") == {"": [(3.0, 4.0)]}


def test_a_rank_that_is_lost_is_waited_for_only_while_it_may_report(run_dir: RunDir) -> None:
    for rank in (0, 1):
        append(run_dir.events(rank), [{"event": "start", "attempt": 1, "world_size": 2}])
    append(run_dir.events(0), [step(1), step(2)])
    append(run_dir.events(1), [step(1)])
    build(run_dir)
    assert [x for x, _ in read(run_dir, "step time")["compute"]] == [1]
    append(run_dir.events(0), [{"event": "start", "attempt": 2, "world_size": 1}, step(2, attempt=2, compute_s=7.0)])
    build(run_dir)
    assert read(run_dir, "step time")["compute"] == [(1.0, 1.0), (2.0, 7.0)]


def test_a_rank_may_say_any_size_of_its_world(run_dir: RunDir) -> None:
    for rank in (0, 1):
        append(run_dir.events(rank), [{"event": "start", "attempt": 1, "world_size": 2**62}, step(1)])
    build(run_dir)
    assert read(run_dir, "step time") == {}
    build(run_dir, ended=True)
    assert [x for x, _ in read(run_dir, "step time")["compute"]] == [1]


def test_the_end_of_a_run_waits_for_no_rank(run_dir: RunDir) -> None:
    for rank in (0, 1):
        append(run_dir.events(rank), [{"event": "start", "attempt": 1, "world_size": 2}])
    append(run_dir.events(0), [step(1)])
    series = RunSeries(run_dir)
    series.refresh()
    assert series.metrics == []
    build(run_dir, ended=True)
    series.refresh()
    assert series.metrics == ["step time"]


@pytest.mark.parametrize("lost", ["nothing", "state", "newest points", "half a point", "a level"])
def test_whatever_a_kill_has_left_the_series_are_whole(run_dir: RunDir, lost: str) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 101)])
    build(run_dir)
    before = (run_dir.series / "state.json").read_bytes()
    append(run_dir.metrics, [report(number) for number in range(101, 151)])
    build(run_dir)
    state = read_state(run_dir.series)
    assert state is not None
    place = next(place for place, name in enumerate(state.series) if tuple(name[:2]) == ("loss", "train"))
    if lost == "state":
        (run_dir.series / "state.json").write_text('{"version": 1, "ser')
    elif lost == "newest points":
        # They are on disk, and the state does not know of them yet.
        (run_dir.series / "state.json").write_bytes(before)
    elif lost != "nothing":
        file = run_dir.series / f"{place}.{0 if lost == 'half a point' else 1}"
        file.write_bytes(file.read_bytes()[:-7])
    append(run_dir.metrics, [report(number) for number in range(151, 161)])
    build(run_dir)
    assert read(run_dir, "loss")["train"] == [(number, 1 / number) for number in range(1, 161)]


@pytest.mark.parametrize("left", [0, 5], ids=["nothing", "the beginning"])
def test_pyramids_of_an_ended_run_that_have_lost_points_are_made_anew(run_dir: RunDir, left: int) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 101)])
    build(run_dir, ended=True)
    for file in run_dir.series.glob("*.0"):
        os.truncate(file, left * 16)
    assert read(run_dir, "loss", "time")["train"] == [(number - 1, 1 / number) for number in range(1, 101)]


@pytest.mark.parametrize("left", [0, 5], ids=["nothing", "the beginning"])
def test_pyramids_that_are_cut_while_they_are_read_are_shorter(run_dir: RunDir, left: int) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 101)])
    series = RunSeries(run_dir)
    series.refresh()
    for file in run_dir.series.glob("*.*"):
        os.truncate(file, left * 16 if file.suffix == ".0" else 0)
    for axis in AXES:
        chart = series.chart("loss", axis, series.extent("loss", axis), 100, smooth=True)
        assert len(chart.curves[0].points) == left
        assert len(list(series.values(axis, 1.0))) in (0, 4)


def test_of_two_that_would_build_one_does(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(1)])
    keeper = SeriesBuilder.take(run_dir)
    assert keeper is not None and SeriesBuilder.take(run_dir) is None
    series = RunSeries(run_dir)
    series.refresh()
    assert series.metrics == []
    keeper.poll()
    series.refresh()
    assert series.metrics == ["loss"]
    keeper.close()


def test_a_long_backlog_is_taken_in_bit_by_bit(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 3001)])
    keeper = SeriesBuilder.take(run_dir)
    assert keeper is not None
    counts = []
    for _ in range(4):
        keeper.poll(0.0)
        state = read_state(run_dir.series)
        counts.append(max(count for *_, count in state.series) if state is not None else 0)
    keeper.close()
    assert counts == [1000, 2000, 3000, 3000]


def test_what_nodes_use_lies_over_the_iterations_of_that_time(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 101)])
    samples = [{"at": EPOCH + at, "node": "ultra", "gpu_use": 0.9, "power": 100.0 + at} for at in range(-20, 140, 10)]
    append(run_dir.telemetry, samples)
    series = RunSeries(run_dir)
    series.refresh()
    assert series.metrics == ["loss", "GPU use", "power"]
    points = series.chart("power", "iterations", None, 100).curves[0].points
    assert points == [(float(at), 100.0 + at) for at in range(10, 101, 10)]
    assert series.extent("power", "iterations") == (1.0, 100.0)


def test_without_a_report_time_counts_from_the_first_sample(run_dir: RunDir) -> None:
    append(run_dir.telemetry, [{"at": EPOCH + at, "node": "ultra", "power": at} for at in (5, 15)])
    series = RunSeries(run_dir)
    series.refresh()
    chart = series.chart("power", "iterations", None, 100)
    assert (chart.axis, chart.curves[0].points) == ("time", [(0.0, 5.0), (10.0, 15.0)])


def test_a_program_that_reports_ever_new_figures_fills_no_disk(run_dir: RunDir) -> None:
    append(run_dir.metrics, [{**report(1), **{f"loss{number}": 1.0 for number in range(MOST_SERIES + 50)}}])
    series = RunSeries(run_dir)
    series.refresh()
    assert len(list(run_dir.series.glob("*.0"))) == MOST_SERIES


@pytest.mark.parametrize("part", ["points", "blocks", "everything"])
@pytest.mark.parametrize("seed", range(3))
def test_other_bytes_in_a_pyramid_are_noticed_and_it_is_made_anew(run_dir: RunDir, part: str, seed: int) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 1001)])
    build(run_dir, ended=True)
    rng = random.Random(seed)
    for file in run_dir.series.glob({"points": "*.0", "blocks": "*.1", "everything": "*.*"}[part]):
        if file.name != "state.json" or part == "everything":
            file.write_bytes(rng.randbytes(file.stat().st_size))
    series = RunSeries(run_dir)
    series.refresh(ended=True)
    for axis in AXES:
        chart = series.chart("loss", axis, series.extent("loss", axis), 20, smooth=True)
        heights = [y for _, y in chart.curves[0].points]
        assert (max(heights), min(heights)) == (1.0, 0.001)
        assert dict(series.values(axis, series.extent("loss", axis)[1]))[SeriesName("loss", "train")] == 0.001
    assert series.figures()["loss", "train"].lowest == 0.001


def test_damaged_series_that_a_supervisor_keeps_are_said_to_be(run_dir: RunDir) -> None:
    append(run_dir.metrics, [report(number) for number in range(1, 1001)])
    keeper = SeriesBuilder.take(run_dir)
    assert keeper is not None
    keeper.poll()
    for file in run_dir.series.glob("*.0"):
        file.write_bytes(random.Random(1).randbytes(file.stat().st_size))
    series = RunSeries(run_dir)
    series.refresh()
    with pytest.raises(StateError, match="the series are damaged"):
        series.extent("loss", "iterations")
    keeper.close()
    assert series.extent("loss", "iterations") == (1.0, 1000.0)


def test_a_clock_that_is_set_back_cuts_no_curve(run_dir: RunDir) -> None:
    """By an hour, after a hundred seconds."""
    moments = [at if at <= 100 else at - 3600 for at in range(1, 201)]
    append(run_dir.metrics, [report(number, at=at) for number, at in enumerate(moments, 1)])
    append(run_dir.telemetry, [{"at": EPOCH + at, "node": "ultra", "power": float(n)} for n, at in enumerate(moments)])
    series = RunSeries(run_dir)
    series.refresh()
    assert series.extent("loss", "time") == (0.0, 198.0)
    (power,) = series.chart("power", "time", None, 400).curves
    assert [y for _, y in power.points] == [float(number) for number in range(200) if number != 99]
    assert power.points[-1] == (198.0, 199.0)


def test_of_equal_times_a_clock_has_every_iteration(run_dir: RunDir) -> None:
    """Rows of one moment, as fast steps have, and tokens that go on."""
    append(run_dir.metrics, [report(number, at=5.0) for number in range(1, 2001)])
    assert read(run_dir, "loss", "tokens", 20)["train"][0] == (100.0, 1.0)
    series = RunSeries(run_dir)
    series.refresh()
    assert series.extent("loss", "tokens") == (100.0, 200_000.0)


def test_a_rank_that_is_read_later_is_not_taken_for_silent(run_dir: RunDir) -> None:
    """Rank 0 writes other events between its steps: of as many lines it has fewer steps."""
    for rank in (0, 1):
        append(run_dir.events(rank), [{"event": "start", "attempt": 1, "world_size": 2}])
    append(run_dir.events(0), [row for n in range(1, 3001) for row in ({"event": "report"}, step(n, compute_s=2.0))])
    append(run_dir.events(1), [step(number) for number in range(1, 3001)])
    assert read(run_dir, "compute", width=4000).keys() == {"rank 0", "rank 1"}
    assert {y for _, y in read(run_dir, "step time", width=4000)["compute"]} == {2.0}
    assert [len(points) for points in read(run_dir, "compute", width=4000).values()] == [3000, 3000]


def test_the_backlog_of_many_ranks_is_taken_in_bit_by_bit(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, steps = 64, 200
    for rank in range(ranks):
        append(run_dir.events(rank), [{"event": "start", "attempt": 1, "world_size": ranks}])
        append(run_dir.events(rank), [step(number) for number in range(1, steps + 1)])
    parsed, counts = 0, list[int]()

    def parse(line: bytes) -> dict[str, Any] | None:
        nonlocal parsed
        parsed += 1
        return parse_json_line(line)

    monkeypatch.setattr(builder, "parse_json_line", parse)
    keeper = SeriesBuilder.take(run_dir)
    assert keeper is not None
    while parsed < ranks * (steps + 1):
        before = parsed
        keeper.poll(0.0)
        counts.append(parsed - before)
    keeper.close()
    assert max(counts) <= 1000
    build(run_dir, ended=True)
    assert [x for x, _ in read(run_dir, "step time")["compute"]] == list(range(1, steps + 1))
