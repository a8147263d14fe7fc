"""`flightdeck metrics --try`: what would be read from a log, and from which lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tui.commands import flightdeck

LOG = "starting\niter 10: loss 3.25, time 65ms, mfu 0%\n\x1b[31mloss is 2 now\nstep 10: train loss 3.0, val loss 3.5\n"


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.log"
    file.write_text(LOG)
    return file


def test_each_line_that_is_read_is_shown_with_its_form(home: Path, log: Path) -> None:
    shown = flightdeck(home, "metrics", "--try", str(log))
    assert shown.code == 0
    _, first, second, *rest = (line.split() for line in shown.out.splitlines())
    assert (first[0], first[1], first[-2:]) == ("10", "3.2500", ["2", "nanoGPT"])
    assert (second[0], second[2], second[-2:]) == ("10", "3.5000", ["4", "nanoGPT"])
    assert [" ".join(line) for line in rest] == [
        "4 lines: 1 report and 1 validation, read as nanoGPT",
        "not read: line 3: loss is 2 now",
    ]
    document = json.loads(flightdeck(home, "metrics", "--try", str(log), "--json").out)
    assert [(row["line"], row["kind"], row["iteration"]) for row in document["reports"]] == [
        (2, "train", 10),
        (4, "val", 10),
    ]
    assert (document["lines"], document["unread"]) == (4, ["line 3: loss is 2 now"])


def test_a_log_of_which_nothing_is_read_fails_and_says_what_helps(home: Path, log: Path) -> None:
    log.write_text("hello\nthe loss became 3\n")
    shown = flightdeck(home, "metrics", "--try", str(log))
    assert (shown.code, "not read: line 2: the loss became 3" in shown.out, "metrics = " in shown.out) == (
        1,
        True,
        True,
    )


def test_the_configurations_pattern_is_tried(home: Path, log: Path) -> None:
    toml = log.parent / "flightdeck.toml"
    toml.write_text("[[node]]\n[job]\ncommand = ['python', 't.py']\nmetrics = '@(?P<step>[0-9]+) (?P<loss>[0-9.]+)'\n")
    log.write_text("@20 1.5\niter 10: loss 3.25, time 65ms\n")
    document = json.loads(flightdeck(home, "metrics", "--try", str(log), "--json").out)
    assert [(row["iteration"], row["train_loss"], row["read_as"]) for row in document["reports"]] == [
        (20, 1.5, "[job] metrics")
    ]
    toml.write_text("[[node]]\n[job]\ncommand = ['python', 't.py']\nmetrics = '(a+)+'\n")
    wrong = flightdeck(home, "-c", str(toml), "metrics", "--try", str(log))
    assert (wrong.code, "job.metrics" in wrong.err) == (2, True)


def test_a_file_that_cannot_be_read_is_bad_usage(home: Path, log: Path) -> None:
    missing = flightdeck(home, "metrics", "--try", str(log) + ".old")
    assert (missing.code, "No such file" in missing.err, missing.out) == (2, True, "")
