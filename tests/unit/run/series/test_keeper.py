"""A supervisor keeps what its nodes use, and the series, whatever fails."""

from __future__ import annotations

import json
from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.cluster.host_connection import HostConnection
from engine.run.json_lines import LineFile
from engine.run.series.keeper import EVERY_S, SeriesKeeper
from engine.run.series.reader import RunSeries
from engine.store.layout import RunDir
from tests.unit.run.series.test_series import append, report, run_dir

__all__ = ["run_dir"]


def host(name: str, *samples: dict[str, Any]) -> HostConnection:
    return cast("HostConnection", SimpleNamespace(names=(name,), power=SimpleNamespace(samples=deque(samples))))


def test_what_nodes_use_is_kept_and_drawn(run_dir: RunDir) -> None:
    keeper = SeriesKeeper(run_dir)
    first = {"gpu_use": 0.5, "power_w": 90.0, "gpu_temperature_c": 50.0, "ranks": (), "cpu_use": None}
    ultra, mini = host("ultra", first, {"gpu_power_w": 40.0}), host("mini", {"received_bytes_per_s": 7.0})
    keeper.poll(0.0, [ultra, mini])
    rows = [json.loads(line) for line in run_dir.telemetry.read_text().splitlines()]
    assert [{name: row[name] for name in row if name != "at"} for row in rows] == [
        {"node": "ultra", "gpu_use": 0.5, "power": 90.0, "temperature": 50.0},
        {"node": "ultra", "power": 40.0},
        {"node": "mini", "received_bytes_per_s": 7.0},
    ]
    series = RunSeries(run_dir)
    series.refresh()
    assert series.metrics == ["GPU use", "power", "temperature", "network"]
    assert not ultra.power.samples


def test_it_is_busy_once_a_second_and_takes_all_at_the_end(run_dir: RunDir) -> None:
    keeper, series = SeriesKeeper(run_dir), RunSeries(run_dir)
    append(run_dir.metrics, [report(1)])
    keeper.poll(0.0, ())
    append(run_dir.metrics, [report(2)])
    for now, points in ((EVERY_S / 2, 1), (EVERY_S, 2)):
        keeper.poll(now, ())
        series.refresh()
        assert len(series.chart("loss", "iterations", None, 10).curves[0].points) == points
    append(run_dir.metrics, [report(3)])
    keeper.close()
    series.refresh()
    assert series.extent("loss", "iterations") == (1.0, 3.0)


def test_a_full_disk_holds_up_nothing_and_loses_no_point(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, series = SeriesKeeper(run_dir), RunSeries(run_dir)
    append(run_dir.metrics, [report(1)])
    keeper.poll(0.0, ())

    def full(*_: object) -> int:
        raise OSError(28, "no space left on device")

    append(run_dir.metrics, [report(2)])
    with monkeypatch.context() as disk:
        disk.setattr("engine.run.series.pyramid.os.write", full)
        keeper.poll(10.0, [host("ultra", {"gpu_use": 0.5})])
    append(run_dir.metrics, [report(3)])
    keeper.poll(20.0, ())
    series.refresh()
    assert [x for x, _ in series.chart("loss", "iterations", None, 10).curves[0].points] == [1, 2, 3]


def test_a_pyramid_that_somebody_cuts_is_made_anew(run_dir: RunDir) -> None:
    keeper, series = SeriesKeeper(run_dir), RunSeries(run_dir)
    append(run_dir.metrics, [report(number) for number in range(1, 101)])
    keeper.poll(0.0, ())
    for file in run_dir.series.glob("*.1"):
        file.write_bytes(b"")
    append(run_dir.metrics, [report(number, attempt=2) for number in range(50, 61)])
    keeper.poll(10.0, ())
    keeper.poll(20.0, ())
    series.refresh()
    assert [x for x, _ in series.chart("loss", "iterations", None, 200).curves[0].points] == [*range(1, 61)]


def test_while_the_disk_is_full_samples_do_not_pile_up(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = SeriesKeeper(run_dir)
    monkeypatch.setattr(LineFile, "waits", True)
    monkeypatch.setattr(LineFile, "flush", lambda self, **_: False)
    keeper.poll(0.0, [host("ultra", {"gpu_use": 0.5})])
    assert run_dir.telemetry.read_bytes() == b""
