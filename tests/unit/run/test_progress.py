"""How far an attempt has come: rank 0's events become metrics, each once, however often the supervisor is replaced; and
when a training hangs, and who is named, on a clock of the test's own."""

from __future__ import annotations

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

from engine.config.models import ConsistencyConfig, RecoveryConfig
from engine.job.kinds import JobKind
from engine.run.consistency_watch import ConsistencyWatch
from engine.run.events import Figures, StateSaved
from engine.run.history import MANIFESTS_KEPT
from engine.run.progress import AttemptProgress, EventIntake, Watchdog
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
    intake.on_saved = found.append

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
        assert intake.progress.saving is saving
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


HANG_S, STALL_S = 10.0, 600.0


def line(iteration: int, t: float, at: float = 1e9) -> bytes:
    """A step as a trainer writes it; `t` is its own monotonic clock."""
    event = {"event": "step", "rank": 0, "seq": 1, "t": t, "at": at, "attempt": 1, "iteration": iteration, "loss": 1.0}
    return json.dumps(event).encode()


class Training:
    """Two ranks and the watchdog over them, or over some."""

    def __init__(self, watched: tuple[int, ...] = (0, 1), *, is_command: bool = False) -> None:
        self.now = 1000.0
        self.progress = AttemptProgress()
        limits = RecoveryConfig(hang_s=STALL_S if is_command else HANG_S, stall_s=STALL_S)
        self.progress.first_steps = 0 if is_command else JobKind.first_steps
        self.dog = Watchdog(self.progress, watched, limits, self.now, is_command=is_command)
        self.started_at = self.now

    def steps(self, first: int, last: int, *, seconds: float = 1.0, ranks: tuple[int, ...] = (0, 1)) -> None:
        for iteration in range(first, last + 1):
            self.now += seconds
            for rank in ranks:
                self.progress.step(rank, line(iteration, self.now - 900.0, self.now), self.now)
            assert self.check() is None

    def event(self, rank: int, **fields: Any) -> None:
        self.progress.take(rank, fields, self.now)

    def check(self, *, receiving: bool = True) -> Any:
        return self.dog.check(self.now, receiving=receiving, started_at=self.started_at)

    def wait(self, seconds: float, *, receiving: bool = True) -> Any:
        """What it finds meanwhile, checking ten times a second."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if (found := self.check(receiving=receiving)) is not None:
                return found
        return None


def test_no_step_for_the_limit_is_a_hang() -> None:
    training = Training()
    training.steps(1, 10)
    assert training.wait(HANG_S - 0.5) is None
    found = training.wait(1.0)
    assert (found.doing, found.iteration, found.rank) == ("training", 10, None)
    assert found.silent_s > HANG_S == found.limit_s


def test_slow_steps_have_five_times_their_99th_percentile() -> None:
    training = Training()
    training.steps(1, 10, seconds=4.0)
    assert training.wait(19.5) is None
    assert training.wait(1.0).limit_s == 20.0


def test_micro_batches_that_are_reported_in_one_burst_are_not_quick_steps() -> None:
    training = Training()
    for update in range(1, 9):
        assert training.wait(15.0) is None, "an update takes longer than the limit of quick steps"
        for micro in range(1, 9):
            last = b', "update": %d}' % update if micro == 8 else b"}"
            for rank in (0, 1):
                text = line(8 * (update - 1) + micro, training.now - 900.0)[:-1] + last
                training.progress.step(rank, text, training.now)
    found = training.progress.long_step_s()
    assert found is not None and round(found) == 15
    assert training.wait(74.0) is None
    assert training.wait(2.0) is not None


def test_the_one_that_is_behind_is_named() -> None:
    training = Training()
    training.steps(1, 10)
    training.now += 1.0
    training.progress.step(0, line(11, 111.0), training.now)
    assert training.wait(HANG_S + 1).rank == 1


def test_before_the_first_update_what_any_rank_loads_is_progress() -> None:
    training = Training(watched=(0,))
    for rank in (0, 1):
        training.event(rank, event="phase", phase="loading")
    assert training.wait(STALL_S - 1) is None
    training.event(1, event="download")
    assert training.wait(STALL_S - 1) is None
    assert training.wait(2).doing == "loading"


def test_only_the_steps_of_watched_ranks_count() -> None:
    training = Training(watched=(0,))
    training.steps(1, 10)
    training.event(1, event="phase", phase="loading")
    for iteration in range(11, 31):
        training.now += 10.0
        training.progress.step(0, line(iteration, training.now - 900.0), training.now)
        assert training.check() is None, "rank 1 alone makes no steps"
    for _ in range(5):
        training.event(1, event="fetch", done=1)
        training.now += HANG_S / 5
    assert training.wait(50.0).rank == 0, "rank 0 makes none, and rank 1 is loading"


def test_loading_validating_saving_and_the_first_steps_have_a_limit_of_their_own() -> None:
    training = Training()
    assert training.wait(60.0) is None, "loading"
    training.steps(1, 3)
    assert training.wait(60.0) is None, "the first steps"
    training.steps(4, 10)
    for phase in ("validating", "saving"):
        training.event(0, event="phase", phase=phase)
        assert training.wait(60.0) is None, phase
        training.event(0, event="phase", phase="training")
    assert training.wait(HANG_S + 1).doing == "training"
    training.event(0, event="phase", phase="validating")
    assert training.wait(STALL_S + 1).doing == "validating"


def test_a_rank_that_reports_its_loading_does_not_hang() -> None:
    training = Training()
    training.event(0, event="phase", phase="loading")
    for _ in range(3):
        assert training.wait(STALL_S - 1.0) is None
        training.event(0, event="fetch", done=1)
    training.event(0, event="phase", phase="training")
    assert training.wait(STALL_S - 1.0) is None
    training.event(0, event="warning", message="w")
    assert training.wait(2.0) is not None, "no other phase is kept up by words"


def test_one_file_of_several_does_not_end_a_phase_of_saving() -> None:
    progress = AttemptProgress()
    progress.take(0, {"event": "phase", "phase": "saving"}, 1.0)
    for phase in ("begin", "committed"):
        progress.take(0, {"event": "checkpoint", "phase": phase}, 2.0)
        assert progress.phases == {0: "saving"}
    progress.take(0, {"event": "phase", "phase": "training"}, 3.0)
    assert progress.phases == {0: "training"}


def test_a_file_that_is_saved_outside_any_phase_leaves_it_training() -> None:
    progress = AttemptProgress()
    for phase, found in (("begin", "saving"), ("committed", "training")):
        progress.take(0, {"event": "checkpoint", "phase": phase}, 2.0)
        assert progress.phases == {0: found}


def test_what_lies_between_two_steps_is_no_step() -> None:
    training = Training()
    training.steps(1, 10)
    training.event(0, event="phase", phase="validating")
    training.event(1, event="phase", phase="validating")
    training.now += 100.0
    training.event(0, event="phase", phase="training")
    training.event(1, event="phase", phase="training")
    training.steps(11, 12)
    assert training.wait(HANG_S + 1) is not None, "100 s of validation are not taken for the length of a step"


def test_time_in_which_nothing_could_be_received_does_not_count() -> None:
    training = Training()
    training.steps(1, 10)
    assert training.wait(300.0, receiving=False) is None
    assert training.wait(HANG_S - 1) is None
    assert training.wait(2.0) is not None


def test_events_that_come_late_and_all_at_once_are_not_quick_steps() -> None:
    training = Training()
    for iteration in range(1, 31):
        training.progress.step(0, line(iteration, 3.0 * iteration), training.now)
    assert training.progress.long_step_s() == 3.0


def test_what_an_attempt_went_on_from_and_what_its_ranks_save() -> None:
    training = Training()
    training.event(1, event="resumed", source="emergency", iteration=37, update=36, from_rank=1)
    training.event(0, event="resumed", source="emergency", iteration=37, update=36, from_rank=1)
    training.event(0, event="emergency_checkpoint", phase="begin", iteration=40, bytes=512)
    training.event(1, event="emergency_checkpoint", phase="committed", iteration=40, seconds=0.1)
    progress = training.progress
    assert progress.resumed is not None
    assert (progress.resumed.source, progress.resumed.from_rank, progress.furthest) == ("emergency", 1, 37)
    assert progress.checkpoint_phases == {0: "begin", 1: "committed"}
    assert progress.checkpoint_bytes == {0: 512}


def test_a_validation_that_goes_on_does_not_hang_however_long_it_is() -> None:
    training = Training()
    training.steps(1, 10)
    training.event(0, event="phase", phase="validating")
    for _ in range(3):
        assert training.wait(STALL_S - 1.0) is None
        training.event(0, event="going_on", phase="validating")
    assert training.wait(STALL_S + 1.0).doing == "validating", "one of its batches has the whole limit"


def test_a_command_that_reports_rarely_has_five_times_its_longest_interval() -> None:
    training = Training((0,), is_command=True)
    rare = 2 * STALL_S
    training.now += rare
    training.steps(500, 500, seconds=0.0, ranks=(0,))
    assert training.wait(4.9 * rare) is None, "the first report was as late"
    training.steps(1000, 1000, seconds=0.0, ranks=(0,))
    assert training.wait(20 * rare) is None
    assert training.wait(5 * rare).limit_s == pytest.approx(5 * 4.9 * rare, rel=0.01)


def test_activity_is_life_and_no_step() -> None:
    training = Training((0,), is_command=True)
    training.steps(1, 2, ranks=(0,))
    for _ in range(4):
        assert training.wait(0.9 * STALL_S) is None
        training.event(0, event="activity")
    assert training.progress.furthest == 2
    assert training.wait(1.1 * STALL_S) is not None


def test_of_an_elastic_job_any_rank_may_be_the_one_that_reports() -> None:
    training = Training((0, 1), is_command=True)
    training.steps(1, 20, ranks=(1,), seconds=STALL_S / 10)
    assert training.wait(STALL_S + 0.2).rank is None


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
