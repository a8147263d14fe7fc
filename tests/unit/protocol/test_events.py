"""Events are whole JSON lines, whatever the disk and the numbers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.attempt import NodeFiles
from engine.protocol.events import UPDATE_FIELD, EventWriter, exit_output, last_phase


def test_events_carry_rank_time_and_sequence(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for attempt in (1, 2):
        writer = EventWriter(path, rank=3, attempt=attempt)
        writer.write("step", loss=1.5)
        writer.write("end", completed=True)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(e["event"], e["rank"], e["seq"], e["attempt"]) for e in events] == [
        ("step", 3, 0, 1),
        ("end", 3, 1, 1),
        ("step", 3, 0, 2),
        ("end", 3, 1, 2),
    ]
    assert events[0]["t"] <= events[1]["t"] and events[0]["loss"] == 1.5


def test_the_line_of_an_update_is_found_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path, 0, 1)
    writer.write("step", iteration=1)
    writer.write("step", iteration=2, update=1)
    assert [UPDATE_FIELD in line for line in path.read_bytes().splitlines()] == [False, True]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventWriter(path, 0, 1).write("step", loss=float("nan"), inner={"a": [float("inf"), 1.0]})
    event = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert event["loss"] is None and event["inner"] == {"a": [None, 1.0]}


@given(message=st.text())
def test_any_text_stays_on_one_line(tmp_path_factory: pytest.TempPathFactory, message: str) -> None:
    path = tmp_path_factory.mktemp("e") / "events.jsonl"
    EventWriter(path, 0, 1).write("warning", message=message)
    raw = path.read_bytes()
    assert raw.count(b"\n") == 1 and raw.endswith(b"\n")
    assert json.loads(raw)["message"] == message


def test_a_program_that_is_started_again_does_not_add_to_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventWriter(path, 1, 1).write("step", iteration=1)
    with path.open("ab") as file:
        file.write(b'{"event": "st')
    EventWriter(path, 1, 1).write("start", iterations=60)
    first, _torn, second = path.read_text().splitlines()
    assert (json.loads(first)["event"], json.loads(second)["event"]) == ("step", "start")


def test_what_a_program_reported_before_it_was_started_again_is_not_its_end(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path)
    earlier = EventWriter(files.events(1), 1, 1)
    earlier.write("start", iterations=60)
    earlier.write("phase", phase="saving")
    earlier.write("failure", error_type="OSError", message="no")
    EventWriter(files.events(1), 1, 1).write("start", iterations=60)
    assert (exit_output(files, 1).failure, last_phase(files.events(1))) == (None, None)


@pytest.mark.needs("linux")
def test_a_full_disk_does_not_raise() -> None:
    EventWriter(Path("/dev/full"), 0, 1).write("step", loss=1.0)


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        ([], None),
        (['{"event": "phase", "phase": "saving"}'], "saving"),
        (['{"event": "phase", "phase": "saving"}', '{"event": "phase", "phase": "training"}'], "training"),
        (['{"event": "checkpoint", "phase": "begin"}', '{"event": "checkpoint", "phase": "comm'], "saving"),
        (['{"event": "phase", "phase": "saving"}', '{"event": "checkpoint", "phase": "committed"}'], "saving"),
        (['{"event": "phase", "phase": "saving"}', '{"event": "end"}'], None),
        (['{"event": "phase", "phase": "training"}', '{"event": "emergency_checkpoint", "phase": "begin"}'], "saving"),
        (
            [
                '{"event": "phase", "phase": "training"}',
                '{"event": "checkpoint", "phase": "begin", "background": true}',
            ],
            "training",
        ),
    ],
)
def test_the_last_phase_is_read_back(tmp_path: Path, lines: list[str], phase: str | None) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("\n".join(lines))
    assert last_phase(path) == phase


def test_no_events_is_no_phase(tmp_path: Path) -> None:
    assert last_phase(tmp_path / "none") is None
