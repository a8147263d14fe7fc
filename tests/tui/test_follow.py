"""What following a run prints: each event once, those of a resumed run as they come, and nothing from before."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.models import RunState
from engine.snapshots import RunSnapshot, Series, SeriesMark
from tests.tui.fake_engine import CHECKS, FakeEngine, aborted, record
from tui.commands.follow import Follower, until_ended, until_past_preflight
from tui.commands.terminal import Lines


def trained(*iterations: int, marks: Sequence[SeriesMark] = (), state: RunState = RunState.RUNNING) -> RunSnapshot:
    """A run that has reported these iterations."""
    points = tuple((iteration, 1.0 + iteration / 100) for iteration in iterations)
    series = Series(points, (), (), tuple(marks))
    return replace(aborted(), record=record(aborted().record.id, state), series=series, checks=(), supervised=True)


def lines_of(engine: FakeEngine, follower: Follower, output: io.StringIO, snapshot: RunSnapshot) -> list[str]:
    """The lines that a snapshot adds."""
    output.truncate(output.seek(0))
    engine.put(snapshot)
    follower.follow(lambda _: True)
    return output.getvalue().splitlines()


def follow(tmp_path: Path, first: RunSnapshot) -> tuple[FakeEngine, Follower, io.StringIO]:
    engine, output = FakeEngine(tmp_path), io.StringIO()
    engine.put(first)
    return engine, Follower(engine.engine, first.record.id, Lines(output)), output


def test_a_resumed_run_prints_nothing_of_its_former_attempts(tmp_path: Path) -> None:
    former = replace(trained(10, 20, 30, state=RunState.ABORTED), checks=tuple(CHECKS))
    engine, follower, output = follow(tmp_path, former)
    follower.skip()
    checking = replace(former, record=record(former.record.id, RunState.PREFLIGHT))
    assert lines_of(engine, follower, output, checking) == ["preflight"]
    again = replace(checking, checks=(CHECKS[0].model_copy(update={"duration_s": 9.5}),))
    (line,) = lines_of(engine, follower, output, again)
    assert CHECKS[0].name in line
    assert "9.5 s" in line


def test_iterations_that_a_resumed_run_repeats_are_printed_again(tmp_path: Path) -> None:
    engine, follower, output = follow(tmp_path, trained(10, 20, 30, state=RunState.ABORTED))
    follower.skip()
    restart = SeriesMark(21, "restart")
    first = lines_of(engine, follower, output, trained(10, 20, 21, 25, marks=[restart]))
    assert [line.split("   ")[0] for line in first[1:]] == ["iteration 21/60", "iteration 21/60", "iteration 25/60"]
    assert first[2].endswith("restart")
    (line,) = lines_of(engine, follower, output, trained(10, 20, 21, 25, 30, marks=[restart]))
    assert line.startswith("iteration 30/60   loss 1.30")


def test_warnings_and_the_loss_of_the_test_are_printed_once(tmp_path: Path) -> None:
    engine, follower, output = follow(tmp_path, trained(1))
    plain = trained(1)
    warned = replace(plain, ranks=tuple(replace(rank, warnings=("some rows are cut",)) for rank in plain.ranks))
    first = lines_of(engine, follower, output, warned)
    assert [line for line in first if "rows" in line] == ["rank 0: warning: some rows are cut"]
    assert warned.warnings == ("ranks 0, 1: some rows are cut",)
    tested = replace(warned, record=warned.record.model_copy(update={"test_loss": 2.5}))
    assert lines_of(engine, follower, output, tested) == ["test loss 2.500"]
    assert lines_of(engine, follower, output, tested) == []


def test_each_report_is_printed_once(tmp_path: Path) -> None:
    engine, follower, output = follow(tmp_path, trained(1))
    assert len(lines_of(engine, follower, output, trained(1, 2))) == 3
    assert lines_of(engine, follower, output, trained(1, 2)) == []
    lost, again = trained(1, 2), trained(1, 2, 9)
    lost = replace(lost, series=replace(lost.series, not_finite=(4, 8)))
    (line,) = lines_of(engine, follower, output, lost)
    assert line.startswith("iteration  8/60   loss not finite since 4")
    assert lines_of(engine, follower, output, lost) == []
    (line,) = lines_of(engine, follower, output, again)
    assert line.startswith("iteration  9/60   loss 1.09")
    assert until_ended(aborted())
    assert not until_past_preflight(replace(aborted(), record=record(state=RunState.PREFLIGHT)))
