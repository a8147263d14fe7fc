"""How far an attempt has come: rank 0's events become metrics, each once, however often the supervisor is
replaced."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.models import ConsistencyConfig
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import Event, Figures, StateSaved, TrainingStarted, WeightsSaved
from engine.run.history import MANIFESTS_KEPT
from engine.run.progress import AttemptProgress, EventIntake
from engine.run.rank_events import RankEvents
from engine.store.layout import RunDir


def event(name: str, rank: int = 0, **fields: Any) -> str:
    head = {"event": name, "rank": rank, "seq": 1, "t": 1.0, "at": 1_700_000_000.0, "attempt": 1}
    return json.dumps({**head, **fields}) + "\n"


def write(run_dir: RunDir, rank: int, *lines: str) -> None:
    with run_dir.events(rank).open("a") as file:
        file.write("".join(lines))


def rows(run_dir: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]


def intake_of(run_dir: RunDir, bases: dict[int, int]) -> EventIntake:
    watch = ConsistencyWatch(ConsistencyConfig(), {rank: f"node{rank}" for rank in bases}, lambda _alarm: None)
    return EventIntake(run_dir, 1, bases, watch)


def report(iteration: int) -> str:
    return event("report", iteration=iteration, train_loss=9.0 / iteration, tokens_per_second=100.0)


def test_the_loss_of_the_test_is_a_row_of_its_own(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1), event("test", iteration=1, test_loss=2.5, test_ppl=12.2))
    intake.poll()
    intake.close()
    _, row = rows(run_dir)
    assert (row["kind"], row["iteration"], row["test_loss"], row["test_ppl"]) == ("test", 1, 2.5, 12.2)
    assert (intake.latest.test_loss, intake.latest.train_loss) == (2.5, 9.0)


@pytest.mark.parametrize(
    ("reported", "first", "iteration"),
    [
        ((5, 10, 15), 305, 304),
        ((5, 10, 15), 5, 0),
        ((5, 10, 15), 1, 0),
        ((0, 10), 10, 9),
        ((300, 310, 320), 300, 299),
        ((300, 310, 320), 290, 289),
        ((300, 310, 320), 10, 0),
        ((300,), 300, 299),
        ((), 1, 0),
    ],
)
def test_where_a_command_went_on_is_known_by_the_steps_that_come(
    tmp_path: Path, reported: tuple[int, ...], first: int, iteration: int
) -> None:
    """It began anew where its first report is that of a training from the beginning. Also the run's first attempt may
    have gone on from a state of the command's own."""
    run_dir = RunDir(tmp_path)
    earlier = [{"kind": "train", "attempt": 0, "iteration": step} for step in reported]
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in earlier))
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, *(event("step", iteration=step) + report(step) for step in (first, first + 5)))
    intake.poll()
    resumed = intake.own_resumption()
    assert (resumed.source, resumed.iteration) == ("command", iteration)


def test_the_manifests_that_ranks_commit_are_passed_on_and_what_is_none_is_not(tmp_path: Path) -> None:
    intake = intake_of(run_dir := RunDir(tmp_path), {0: 0, 1: 0})
    found: list[StateSaved] = []
    intake.on_event = lambda event: found.append(event) if isinstance(event, StateSaved) else None

    def committed(kind: str, rank: int = 0, **fields: Any) -> str:
        return event(kind, rank, phase="committed", **{"state": "4.0", "manifest": 64 * "a", **fields})

    write(run_dir, 0, event("checkpoint", phase="begin"), committed("checkpoint"), event("checkpoint", phase="skipped"))
    wrong: list[dict[str, Any]] = [
        {"manifest": value} for value in (None, 7, "A" * 64, "a" * 65, "a" * 63 + "\n", ["a"])
    ]
    wrong += [{"state": value} for value in (None, 4.0, "4", "4.0@1", "../4.0", "4.0\n", "9" * 20 + ".0")]
    write(run_dir, 1, *(committed("checkpoint", 1, **fields) for fields in wrong))
    write(run_dir, 1, committed("emergency_checkpoint", 1, state="5.0@1.1", manifest=64 * "b"))
    intake.poll()
    assert [(each.rank, each.state, each.manifest) for each in found] == [
        (0, "4.0", 64 * "a"),
        (1, "5.0@1.1", 64 * "b"),
    ]
    found.clear()
    write(run_dir, 0, *(committed("checkpoint", state=f"{update}.0") for update in range(MANIFESTS_KEPT + 9)))
    intake.poll()
    assert [each.state for each in found] == [f"{update}.0" for update in range(9, MANIFESTS_KEPT + 9)]


def test_saved_weights_and_the_files_of_states_are_passed_on_and_hostile_ones_are_not(tmp_path: Path) -> None:
    intake = intake_of(run_dir := RunDir(tmp_path), {0: 0, 1: 0})
    passed_on: list[Event] = []
    intake.on_event = passed_on.append
    file = ["adapters.safetensors", 7, 64 * "a"]

    def weights(rank: int = 0, **fields: Any) -> str:
        given = {"iteration": 4, "holds": "adapter", "folder": "/home/ana/a", "files": [file]}
        return event("checkpoint", rank, phase="committed", **{**given, **fields})

    started = event("start", versions={"mlx": "0.32.1", "x": 3}, inputs={"train.jsonl": "crc32 1"}, from_base=True)
    state: dict[str, Any] = {
        "state": "4.0",
        "manifest": 64 * "b",
        "iteration": 4,
        "folder": "/c/step-000000004",
        "files": [file],
    }
    write(run_dir, 0, started, weights(iteration=2), weights(), weights(val_loss=1.5), event("checkpoint", **state))
    # The last valid one of a poll counts.
    write(run_dir, 0, weights(iteration=8, folder=None))
    intake.poll()
    outside: list[dict[str, Any]] = [
        {"files": [[name, 7, 64 * "a"]]} for name in ("../x", "/etc/passwd", "a/../../x", "a\nb", "", "-rf", 5)
    ]
    outside += [{"folder": folder} for folder in ("adapters", "/a/../b", "", None)]
    outside += [{"files": [["x", -1, 64 * "a"]]}, {"files": [["x", 1, "a"]]}, {"holds": "all"}, {"iteration": -1}]
    for fields in outside:
        write(run_dir, 0, weights(**fields))
        intake.poll()
    # Those of a run are saved by rank 0.
    write(run_dir, 1, weights(1, iteration=5), event("checkpoint", 1, **{**state, "files": [["../x", 7, 64 * "a"]]}))
    intake.poll()
    training, saved, best, whole, unfetchable = [TrainingStarted, StateSaved, WeightsSaved, WeightsSaved, StateSaved]
    assert [type(event) for event in passed_on] == [training, saved, best, whole, unfetchable]
    assert isinstance(passed_on[0], TrainingStarted)
    assert (passed_on[0].versions, passed_on[0].from_base) == ({"mlx": "0.32.1"}, True)
    assert [(event.saved.iteration, event.val_loss) for event in passed_on if isinstance(event, WeightsSaved)] == [
        (4, None),
        (4, 1.5),
    ]
    states = [event for event in passed_on if isinstance(event, StateSaved)]
    assert states[0].saved is not None
    assert states[0].saved.files == (("adapters.safetensors", 7, 64 * "a"),)
    assert states[1].saved is None, "its manifest counts all the same"


def test_reports_and_validations_of_rank_0_become_metrics(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0, 1: 0})
    write(
        run_dir, 0, event("validation", iteration=0, val_loss=6.0, val_time=0.5), event("step", iteration=1), report(1)
    )
    write(run_dir, 1, event("report", rank=1, iteration=1, train_loss=5.0))
    intake.poll()
    intake.close()
    first, second = rows(run_dir)
    assert first == {
        "kind": "val",
        "attempt": 1,
        "at": "2023-11-14T22:13:20+00:00",
        "iteration": 0,
        "val_loss": 6.0,
        "val_time": 0.5,
    }
    assert (second["kind"], second["iteration"], second["train_loss"]) == ("train", 1, 9.0)
    assert intake.latest == Figures(iteration=1, train_loss=9.0, val_loss=6.0, tokens_per_second=100.0)


@pytest.mark.parametrize("torn", [0, 1, 30])
def test_a_successor_goes_on_where_the_first_was_killed(tmp_path: Path, torn: int) -> None:
    run_dir = RunDir(tmp_path)
    write(run_dir, 0, "an earlier attempt's\n")
    base = run_dir.events(0).stat().st_size
    intake = intake_of(run_dir, {0: base})
    write(run_dir, 0, report(1), report(2), report(3))
    intake.poll()
    os.truncate(run_dir.metrics, run_dir.metrics.stat().st_size - torn)
    successor = intake_of(run_dir, {0: base})
    write(run_dir, 0, report(4))
    successor.poll()
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2, 3, 4]
    assert successor.latest.iteration == 4
    intake.close()
    successor.close()


def test_a_row_that_was_damaged_since_is_not_written_again(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1), report(2), report(3))
    intake.poll()
    intake.close()
    first, second, third = run_dir.metrics.read_bytes().splitlines()
    run_dir.metrics.write_bytes(b"\n".join([first, b"\0" * len(second), third, b""]))
    successor = intake_of(run_dir, {0: 0})
    successor.poll()
    successor.close()
    assert run_dir.metrics.read_bytes().splitlines() == [first, b"\0" * len(second), third]


def test_a_rank_is_saving_from_begin_to_commit(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0, 1: 0})
    for rank, phase, saving in ((1, "begin", True), (1, "committed", False)):
        write(run_dir, rank, event("checkpoint", rank=rank, phase=phase, iteration=3))
        intake.poll()
        assert ("saving" in intake.progress.view.phases.values()) is saving
    intake.close()


def test_a_full_disk_delays_metrics_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1))

    def no_room(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", no_room)
        intake.poll()
        intake.poll()
    write(run_dir, 0, report(2))
    intake.poll()
    intake.poll()
    assert [row["iteration"] for row in rows(run_dir)] == [1, 2]
    intake.close()


def test_the_trainer_tells_how_many_iterations_there_are(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, event("start", iterations=350), report(1))
    intake.poll()
    intake.close()
    assert (intake.latest.iteration, intake.latest.iterations) == (1, 350)


def test_only_numbers_become_the_latest_figures(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, report(1), event("report", iteration="10", iterations=2.5, train_loss={}, tokens_per_second=50.0))
    intake.poll()
    intake.close()
    assert intake.latest == Figures(iteration=1, train_loss=9.0, tokens_per_second=50.0)


@pytest.mark.parametrize("at", [None, "2026-11-22T10:00:00", 1e20, float("inf"), 10**400])
def test_a_report_with_no_usable_time_is_kept(tmp_path: Path, at: object) -> None:
    run_dir = RunDir(tmp_path)
    intake = intake_of(run_dir, {0: 0})
    write(run_dir, 0, event("report", iteration=1, train_loss=9.0, at=at))
    rank = RankEvents(run_dir.events(0))
    intake.poll()
    intake.close()
    assert [row["iteration"] for row in rows(run_dir)] == [1]
    assert rank.poll().seen_at is None


def line(iteration: int, t: float, at: float = 1e9) -> bytes:
    """A step as a trainer writes it; `t` is its own monotonic clock."""
    event = {"event": "step", "rank": 0, "seq": 1, "t": t, "at": at, "attempt": 1, "iteration": iteration, "loss": 1.0}
    return json.dumps(event).encode()


def test_one_file_of_several_does_not_end_a_phase_of_saving() -> None:
    progress = AttemptProgress()
    progress.take(0, {"event": "phase", "phase": "saving"}, 1.0)
    for phase in ("begin", "committed"):
        progress.take(0, {"event": "checkpoint", "phase": phase}, 2.0)
        assert progress.view.phases == {0: "saving"}
    progress.take(0, {"event": "phase", "phase": "training"}, 3.0)
    assert progress.view.phases == {0: "training"}


def test_a_file_that_is_saved_outside_any_phase_leaves_it_training() -> None:
    progress = AttemptProgress()
    for phase, found in (("begin", "saving"), ("committed", "training")):
        progress.take(0, {"event": "checkpoint", "phase": phase}, 2.0)
        assert progress.view.phases == {0: found}


def test_events_that_come_late_and_all_at_once_are_not_quick_steps() -> None:
    progress = AttemptProgress()
    for iteration in range(1, 31):
        progress.step(0, line(iteration, 3.0 * iteration), 1000.0)
    assert progress.view.long_step_s == 3.0


def test_what_an_attempt_went_on_from_and_what_its_ranks_save() -> None:
    progress = AttemptProgress()
    progress.take(1, {"event": "resumed", "source": "emergency", "iteration": 37, "update": 36, "from_rank": 1}, 1000.0)
    progress.take(0, {"event": "resumed", "source": "emergency", "iteration": 37, "update": 36, "from_rank": 1}, 1000.0)
    progress.take(0, {"event": "emergency_checkpoint", "phase": "begin", "iteration": 40, "bytes": 512}, 1000.0)
    progress.take(1, {"event": "emergency_checkpoint", "phase": "committed", "iteration": 40, "seconds": 0.1}, 1000.0)
    assert progress.view.resumed is not None
    assert (progress.view.resumed.source, progress.view.resumed.from_rank, progress.view.furthest) == (
        "emergency",
        1,
        37,
    )
    assert progress.view.checkpoint_phases == {0: "begin", 1: "committed"}
    assert progress.view.checkpoint_bytes == {0: 512}


NAMES = ["start", "phase", "step", "report", "validation", "test", "checkpoint", "emergency_checkpoint",
         "replica_check", "chunk", "failure", "warning", "end", "resumed", "activity", "going_on"]  # fmt: skip
FIELDS = ["iteration", "iterations", "update", "train_loss", "val_loss", "own_loss", "own_grad_norm", "grad_norm",
          "t", "at", "attempt", "rank", "seq", "phase", "source", "bytes", "seconds", "compute_s", "communicate_s",
          "agreed", "ranks", "message", "chunk", "num_chunks", "epoch", "world_size", "background", "path",
          "tokens_per_second"]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just(10**400)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)
EVENTS = st.builds(event, st.sampled_from(NAMES)).flatmap(
    lambda line: st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4).map(
        lambda fields: json.dumps({**json.loads(line), **fields}) + "\n"
    )
)


@given(st.lists(st.tuples(st.integers(0, 1), EVENTS), max_size=8))
@settings(max_examples=100)
def test_whatever_a_node_writes_as_an_event_is_a_finite_figure_or_none(events: list[tuple[int, str]]) -> None:
    with TemporaryDirectory() as folder:
        run_dir = RunDir(Path(folder))
        intake = intake_of(run_dir, {0: 0, 1: 0})
        intake.any_rank_reports = True
        for rank, line in events:
            write(run_dir, rank, line)
        intake.poll()
        intake.close()
        for line in run_dir.metrics.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)
        reports = [RankEvents(run_dir.events(rank)).poll() for rank in (0, 1)]
        numbers = [value for each in (intake.latest, *reports) for value in vars(each).values() if type(value) is float]
        assert all(map(math.isfinite, numbers))
        assert all(len(each.phase or "") <= 40 for each in reports)


def test_a_view_stays_as_it_was_while_more_is_read() -> None:
    progress = AttemptProgress()
    progress.step(0, event("step", iteration=1).encode(), 5.0)
    before = progress.view
    assert progress.view is before, "nothing has come"
    shown = copy.deepcopy(before)
    progress.step(0, event("step", iteration=2).encode(), 6.0)
    for name in ("start", "end", "emergency_checkpoint", "resumed", "activity"):
        progress.take(0, {"event": name, "phase": "begin", "bytes": 7, "completed": True}, 7.0)
    assert before == shown
    after = progress.view
    assert (after.steps, dict(after.reached), after.completed) == (2, {0: 2}, frozenset({0}))
