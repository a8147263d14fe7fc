"""flightdeck calibrate: progress on stderr, a table or one JSON document, and an exit code that tells."""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.api import ExitCode
from engine.errors import InputError
from engine.measurements import CalibrationProgress, Scaling
from tests.tui import fake_engine
from tests.tui.fake_engine import FakeEngine
from tui.commands.calibrate import calibrate


def run(fake: FakeEngine, **options: Any) -> int:
    known: dict[str, Any] = {"config": Path("x.toml"), "show": False, "quick": False, "json": False}
    known |= {"scaling": False, "per_rank_batch": False, "csv": None, "set": []}
    fake.measured.set()
    return calibrate(argparse.Namespace(**{**known, **options}), fake.engine)


def test_it_measures_tells_how_far_it_is_and_prints_what_follows(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.steps = [
        CalibrationProgress("local-0", "loading"),
        CalibrationProgress("local-0", "measuring", 1.0, 10.0, 16.0),
        CalibrationProgress("local-0", "measuring", 2.0, 10.0, 16.1),
        CalibrationProgress("local-0", "measured", 10.0, 10.0, 16.4),
        fake_engine.calibration(),
    ]
    assert run(fake, quick=True) == ExitCode.OK
    assert fake.measurements == [True] and fake.closed
    output = capsys.readouterr()
    assert output.err.splitlines() == [
        "local-0: loading",
        "local-0: measuring  1 of 10 s  16.0 ex/s",
        "local-0: measured  10 of 10 s  16.4 ex/s",
    ]
    for text in ("local-1  12.1 ex/s", "±3 %", "42.5%", "link: local-0 - local-1: 48 µs, 8.1 GB/s", "1.60 times"):
        assert text in output.out
    assert "shares: by the measured throughputs" in output.out


def test_what_is_stored_is_shown_and_nothing_is_measured(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    fake.taken = fake_engine.calibration()
    assert run(fake, show=True, json=True) == ExitCode.OK
    document = json.loads(capsys.readouterr().out)
    assert [node["examples_per_s"] for node in document["nodes"]] == [16.4, 12.1]
    assert document["shares"]["micro_batches"] == {"local-0": 5, "local-1": 3}
    assert document["prediction"]["speed_up"] == pytest.approx(1.6, abs=0.01)
    assert document["stale"] is False and fake.measurements == []


def test_nothing_stored_is_said_and_fails(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fake, show=True) == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "not calibrated" in output and "hardware calibration missing, assuming equal performance" in output
    assert run(fake, show=True, json=True) == ExitCode.FAILED
    document = json.loads(capsys.readouterr().out)
    assert document["nodes"] == [] and document["prediction"]["why_not"] == "not calibrated"


def test_a_node_that_was_not_measured_fails_with_its_words(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.steps = [fake_engine.calibration(speeds=(16.4, None))]
    assert run(fake) == ExitCode.FAILED
    assert "local-1: engine.trainer.calibrate ended without a result" in capsys.readouterr().out


def test_an_old_one_is_said_to_be_stale(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    fake.taken = fake_engine.calibration(old_s=45 * 86_400)
    assert run(fake, show=True) == ExitCode.OK
    assert "stale (limit 30 days)" in capsys.readouterr().out


def scaled(fake: FakeEngine, **options: Any) -> int:
    return run(fake, scaling=True, **options)


def test_a_scaling_is_measured_and_printed_as_a_table_with_where_it_stops_paying(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.steps = [CalibrationProgress("1 rank", "measuring"), fake_engine.scaling(old_s=0)]
    assert scaled(fake, quick=True, per_rank_batch=True) == ExitCode.OK
    assert fake.scalings == [(True, True)] and fake.closed
    output = capsys.readouterr()
    assert output.err == "1 rank: measuring\n"
    first, header, *rows, last = output.out.splitlines()
    assert "strong scaling, strategy data, ring: a batch of 8 over 1 to 4 ranks" in first
    assert " ".join(header.split()) == (
        "RANKS BATCH THROUGHPUT TOKENS SPEED-UP EFFICIENCY STEP DATA FWD+BWD EXCHANGE UPDATE PEAK"
    )
    assert " ".join(rows[0].split()) == "1 8 16.4 ex/s 1,443 tok/s 1.00 100% 0.49 s 900 µs 0.47 s 17.1 ms - 38 MB"
    assert rows[3].split()[6:8] == ["2.95", "74%"]
    assert last == "it stops paying at 4 ranks: from there a rank more brings less than half of its own rate"


def test_a_scaling_as_one_document_and_as_csv(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fake.scaled = fake_engine.scaling(speed_ups=(None, 2.0, 3.0))
    assert scaled(fake, show=True, json=True, csv=tmp_path / "s.csv") == ExitCode.FAILED
    document = json.loads(capsys.readouterr().out)
    assert [point["speed_up"] for point in document["points"]] == [None, 2.0, pytest.approx(3.0)]
    assert document["points"][2]["gain"] == pytest.approx(1.0) and document["stops_paying"] is None
    with (tmp_path / "s.csv").open(newline="") as file:
        one, two, _ = csv.DictReader(file)
    assert one["problem"].startswith("rank 2 on mini") and one["examples_per_s"] == one["efficiency"] == ""
    assert (two["ranks"], two["nodes"], float(two["efficiency"])) == ("2", "local-0 local-1", 1.0)
    assert sum(float(two[part]) for part in ("data_s", "compute_s", "communicate_s", "update_s")) == pytest.approx(
        float(two["step_s"])
    )
    assert scaled(fake, show=True, csv=Path("-")) == ExitCode.FAILED
    assert capsys.readouterr().out == (tmp_path / "s.csv").read_text()
    with pytest.raises(InputError, match="the CSV cannot be written"):
        scaled(fake, show=True, csv=tmp_path)


def test_a_csv_that_cannot_be_written_is_found_before_anything_is_measured(fake: FakeEngine, tmp_path: Path) -> None:
    fake.steps = [fake_engine.scaling()]
    with pytest.raises(InputError, match="the CSV cannot be written"):
        scaled(fake, csv=tmp_path / "nowhere" / "s.csv")
    with pytest.raises(InputError, match=r"--csv - and --json both print to stdout.*name a file for the CSV"):
        scaled(fake, csv=Path("-"), json=True)
    assert fake.scalings == []


def test_a_csv_stays_as_it_was_when_nothing_was_measured(fake: FakeEngine, tmp_path: Path) -> None:
    earlier = tmp_path / "s.csv"
    earlier.write_text("ranks\n")
    assert scaled(fake, show=True, csv=earlier) == ExitCode.FAILED
    assert earlier.read_text() == "ranks\n"


def test_numbers_of_ranks_that_failed_are_told_of_once_for_each_reason(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.steps = [fake_engine.scaling(speed_ups=(None, None, 2.0))]
    assert scaled(fake) == ExitCode.FAILED
    output = capsys.readouterr().out
    assert "not measured: 1, 2 ranks: rank 2 on mini: needs 9 GB" in output
    assert "note: fewer than 3 ranks were not measured: speed-up counts those as 3" in output
    fake.steps = [fake_engine.scaling(speed_ups=(None,))]
    assert scaled(fake) == ExitCode.FAILED
    assert len(capsys.readouterr().out.splitlines()) == 2, "no table of nothing"


def test_an_interrupted_scaling_prints_what_there_is_of_it(
    fake: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = fake_engine.scaling(speed_ups=(1.0, 1.9), complete=False)

    async def measure_scaling(*_: Any, **__: Any) -> AsyncIterator[Scaling]:
        yield part
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(10)

    monkeypatch.setattr(fake, "measure_scaling", measure_scaling)
    assert scaled(fake) == ExitCode.INTERRUPTED
    output = capsys.readouterr().out
    assert "over 1 to 2 ranks of 4, interrupted" in output and "95%" in output and fake.closed


def test_without_a_scaling_that_is_said(fake: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaled(fake, show=True) == ExitCode.FAILED
    assert capsys.readouterr().out.startswith("no scaling is known")
    assert scaled(fake, show=True, json=True) == ExitCode.FAILED
    assert json.loads(capsys.readouterr().out) == {"points": [], "stops_paying": None}
    for option in ({"per_rank_batch": True}, {"csv": Path("x.csv")}):
        with pytest.raises(InputError, match="goes with --scaling"):
            run(fake, **option)
