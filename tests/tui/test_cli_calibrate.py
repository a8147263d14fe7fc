"""flightdeck calibrate: progress on stderr, a table or one JSON document, and an exit code that tells."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from engine.api import ExitCode
from engine.measurements import CalibrationProgress
from tests.tui import fake_engine
from tests.tui.fake_engine import FakeEngine
from tui.commands.calibrate import calibrate


def run(fake: FakeEngine, **options: Any) -> int:
    known: dict[str, Any] = {"config": Path("x.toml"), "show": False, "quick": False, "json": False}
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
    for text in ("local-1  12.1 ex/s", "±3 %", "42.5%", "link local-0 - local-1: 48 µs, 8.1 GB/s", "1.60 times"):
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
