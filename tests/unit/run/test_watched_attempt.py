"""The ranks of a watched attempt as their files and keepers show them; a real process is the keeper where one ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from engine.cluster.host_connection import ConnectionState
from engine.launch.start_script import StartFailure
from engine.node import processes
from engine.protocol.attempt import Identity, read_exit, read_identity, write_atomic
from engine.protocol.events import ExitOutput
from engine.protocol.exit_codes import TrainerExit
from engine.run.attempt import AttemptOrigin
from engine.run.effects import Judge, Standing
from engine.run.events import Event, ResultReported, Trigger
from engine.run.observation import RankView
from engine.run.run_context import AttemptContext
from engine.run.watched_attempt import WatchedAttempt
from tests.unit.run.live_attempt import LiveAttempt


class Watched:
    def __init__(self, home: Path, **how: object) -> None:
        self.live = LiveAttempt(home, **how)  # type: ignore[arg-type]
        live = self.live
        self.connections = live.connect(live.context, live.plan, live.attempt)
        context = AttemptContext(live.directory, live.plan, live.attempt, self.connections, live.recorder)
        self.news: list[Event] = []
        self.attempt = WatchedAttempt(context, live.context.clock, self.news.append)

    def rank(self, number: int = 0) -> RankView:
        self.attempt.poll()
        return self.attempt.ranks[number]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.attempt.close()
    made.live.recorder.close()


@pytest.fixture
def keeper(watched: Watched) -> Iterator[subprocess.Popen[bytes]]:
    """Of rank 0."""
    process = subprocess.Popen(["sleep", "60"])
    start = processes.start_time(process.pid) or ""
    pid, boot, nonce = process.pid, processes.boot_id(), watched.live.attempt.nonce
    identity = Identity(0, "r", 1, nonce, boot, pid, start, pid, pid, start, 0.0)
    write_atomic(watched.live.files.identity(0), json.dumps(asdict(identity)))
    yield process
    process.kill()
    process.wait()


def kill(keeper: subprocess.Popen[bytes]) -> None:
    keeper.kill()
    keeper.wait()


def test_a_rank_is_seen_to_start_and_to_end(watched: Watched) -> None:
    assert not watched.rank().started
    watched.live.start(0)
    assert watched.rank().started and not watched.rank().end_known
    watched.live.exit(0, 3)
    assert watched.rank().end_known and not watched.rank().vanished
    assert (watched.attempt.ends_known, watched.rank(1)) == (1, RankView(1, "node1"))


def test_a_keeper_that_is_gone_without_a_record_has_vanished(watched: Watched, keeper: subprocess.Popen[bytes]) -> None:
    assert watched.rank().started
    kill(keeper)
    assert watched.rank().vanished and watched.rank().end_known


def test_the_record_of_a_keeper_that_has_left_is_what_counts(watched: Watched, keeper: subprocess.Popen[bytes]) -> None:
    watched.rank()
    kill(keeper)
    assert watched.rank().vanished
    watched.live.exit(0, 0)
    assert watched.rank().record is not None and not watched.rank().vanished


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": 0}', "\0\0"])
def test_a_damaged_identity_or_record_is_none(watched: Watched, text: str) -> None:
    files = watched.live.files
    for path in (files.identity(0), files.exit(0)):
        path.write_text(text)
    assert (read_identity(files.identity(0)), read_exit(files.exit(0))) == (None, None)


def test_a_start_that_failed_counts_for_ranks_without_a_keeper_only(watched: Watched) -> None:
    watched.live.start(1)
    failures = tuple(StartFailure(rank, code=127, message="no python") for rank in (0, 1))
    watched.attempt.evidence.origin = AttemptOrigin(start_failures=failures)
    assert watched.rank(0).refused and watched.rank(0).launcher_code == 127
    assert watched.rank(1).launcher_code is None


def test_what_the_launcher_reports_of_a_rank_counts_like_a_start_that_failed(watched: Watched) -> None:
    launcher = Mock(rank_ends=Mock(side_effect=[[(0, 1), (9, 1)], []]), alive=Mock(return_value=True))
    watched.attempt.evidence.origin = AttemptOrigin(launcher)
    assert watched.rank(0).refused
    assert watched.rank(0).refused and watched.attempt.launcher_alive


def test_a_rank_that_left_because_it_lost_another_is_a_consequence_and_the_other_is_not(watched: Watched) -> None:
    watched.live.start(0, 1)
    watched.live.exit(0, TrainerExit.PEER_LOST)
    watched.live.exit(1, 1)
    assert watched.rank(0).consequence and not watched.rank(0).succeeded
    assert not watched.rank(1).consequence and not watched.rank(1).succeeded


def test_a_trainer_that_reports_its_end_has_succeeded_once_its_keeper_agrees_or_as_long_as_it_answers(
    watched: Watched,
) -> None:
    watched.live.start(0)
    # It tells of its end with the exit record only.
    watched.live.hosts[0].exit_output = lambda _: ExitOutput()  # type: ignore[method-assign,assignment]
    assert not watched.rank().succeeded
    watched.live.report(0, "end", completed=True)
    assert watched.rank().succeeded
    watched.live.exit(0, 1)
    assert not watched.rank().succeeded


def test_what_follows_from_a_ranks_end_is_found_out_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    watched.live.start(0)
    watched.live.exit(0, 1)
    watched.attempt.poll()
    monkeypatch.setattr(watched.attempt.evidence, "rank_evidence", Mock(side_effect=AssertionError("again")))
    watched.attempt.poll()


def test_the_view_of_progress_is_the_same_until_something_is_read(watched: Watched) -> None:
    watched.attempt.poll()
    view = watched.attempt.intake.progress.view
    watched.attempt.poll()
    assert watched.attempt.intake.progress.view is view
    watched.live.report(0, "step", iteration=3, update=3, t=1.0, at=1.0)
    watched.attempt.poll()
    progress = watched.attempt.intake.progress.view
    assert (view.furthest, progress.furthest, progress.steps, progress.reached) == (0, 3, 1, {0: 3})


def test_of_one_attempt_not_more_than_so_many_results_are_recorded(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.run.watched_attempt.MOST_RESULTS", 1)
    facts = {"kind": "evaluation", "variant": "base", "split": "test", "tokens": 9, "seconds": 0.1}
    for loss in (1.0, 2.0):
        watched.live.report(0, "result", loss=loss, **facts)
        watched.attempt.poll()
        for event in watched.news:
            watched.live.recorder.append(event)
        watched.news.clear()
    history = watched.live.recorder.history
    assert [getattr(result, "loss", None) for result in history.task_results] == [1.0]
    assert history.record.outcome == "base 1.000"


def test_a_loss_that_is_not_finite_is_a_result(watched: Watched) -> None:
    facts = {"kind": "evaluation", "variant": "adapter", "split": "test", "tokens": 9, "seconds": 0.1}
    watched.live.report(0, "result", loss=None, perplexity=None, **facts)
    watched.attempt.poll()
    (event,) = watched.news
    assert isinstance(event, ResultReported) and event.result.summary == "adapter not finite"


def test_a_node_that_is_lost_is_why_the_end_of_its_rank_is_not_known(watched: Watched) -> None:
    watched.live.start(0, 1)
    watched.live.exit(0, TrainerExit.PEER_LOST)
    watched.live.hosts[1].shown = ConnectionState(500.0, answered=True, problem="no route")
    watched.attempt.poll()
    judged = watched.attempt.judge(Judge(Trigger.RANK, (Standing(), Standing(lost=True))))
    assert (judged.verdict.reason, judged.verdict.host, judged.ends_known) == ("node_lost", "node1", 1)


@pytest.mark.parametrize("lost", [False, True])
def test_the_silence_of_a_rank_whose_end_is_known_says_nothing(watched: Watched, lost: bool) -> None:
    watched.live.hosts[0].shown = ConnectionState(500.0, answered=True)
    rank = replace(RankView(0, "node0"), vanished=True)
    evidence = watched.attempt.evidence.rank_evidence(rank, (), Standing(lost=lost))
    assert evidence.unreachable_s == (500.0 if lost else None)


def test_the_output_of_a_command_is_counted_while_its_node_answers(tmp_path: Path) -> None:
    watched = Watched(tmp_path, command=("python", "train.py"))
    watched.live.start(0, 1)
    for rank in (0, 1):
        watched.live.files.log(rank).write_text("step 1\n")
    watched.live.hosts[1].shown = ConnectionState(5.0, answered=True)
    watched.attempt.poll()
    assert watched.attempt.command is not None and watched.attempt.command.resumption is None
    signs = watched.attempt.intake.command
    assert signs is not None and [signs.ranks[rank].printed for rank in (0, 1)] == [7, 0]
    watched.live.report(0, "step", iteration=5)
    watched.attempt.poll()
    assert watched.attempt.command.outputs == 1
    assert watched.attempt.command.resumption is not None and watched.attempt.command.resumption.iteration == 4
    watched.attempt.close()
    watched.live.recorder.close()
