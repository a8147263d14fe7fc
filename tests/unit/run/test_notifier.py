"""What a run's notifier tells, and that it tells it once."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from engine.config.models import Config, NotifyConfig, WebhookConfig
from engine.models import RunRecord, RunState
from engine.run.notifier import Notifier, lasting, news
from engine.run.tracker import RunTrackers
from engine.run.watch import RunWatch
from engine.snapshots import AttemptStatus, Quiet, RunResult, RunSnapshot, Series
from engine.store.layout import RunDir
from tests.unit.notify.receiver import Receiver, receiver
from tests.unit.run.run_maker import START, MadeRun, make_run_config

NOW = START + timedelta(hours=5)
RECORD = RunRecord(
    id="run-1", name="night", state=RunState.RUNNING, created_at=START, world_size=2, cluster="c", backend="ring",
    iteration=40, iterations=60,
)  # fmt: skip


def taken(snapshot: RunSnapshot, **notify: Any) -> dict[str, tuple[str, str]]:
    config = make_run_config().model_copy(update={"notify": NotifyConfig(terminal=True, **notify)})
    return {key: (item.title, item.text) for key, item in news(snapshot, config, NOW)}


def snapshot(**fields: Any) -> RunSnapshot:
    of_snapshot = {field.name for field in dataclasses.fields(RunSnapshot)}
    own = {name: fields.pop(name) for name in list(fields) if name not in of_snapshot}
    return RunSnapshot(RECORD.model_copy(update=own), supervised=True, state_since=START, **fields)


def test_a_run_that_goes_on_well_is_no_news() -> None:
    assert taken(snapshot(quiet=Quiet("step", NOW - timedelta(seconds=20), 60.0))) == {}


def test_an_end_has_its_figures_and_a_failure_its_cause_and_fix() -> None:
    ended = snapshot(state=RunState.SUCCEEDED, ended_at=NOW, val_loss=1.25, result=RunResult(seconds=11_520))
    (end,) = taken(ended).values()
    assert end == ("night has succeeded", "validation loss 1.25, 40 iterations, ran 3 h 12 min")
    failed = snapshot(state=RunState.FAILED, ended_at=NOW, host="ana", cause="out of memory", fix="a smaller batch")
    ((key, failure),) = taken(failed).items()
    assert key.startswith("failure ")
    assert failure == ("night has failed on ana", "out of memory; a smaller batch; 40 iterations")
    assert [title for title, _ in taken(snapshot(state=RunState.ABORTED)).values()] == ["night was stopped"]


def test_a_restart_that_made_a_step_is_a_recovery_and_one_that_has_not_is_none() -> None:
    first = AttemptStatus(1, (), START)
    second = AttemptStatus(2, (), START, why="recovers from rank 1's death", resumed_at=30, recovery_s=41.6)
    assert taken(snapshot(attempts=(first, replace(second, recovery_s=None)))) == {}
    assert taken(snapshot(attempts=(first, second))) == {
        "recovery 2": (
            "night goes on",
            "attempt 2 made its first step 42 s after the failure, from iteration 30: recovers from rank 1's death",
        )
    }


def test_a_stall_is_told_at_half_of_the_limit_which_long_steps_extend() -> None:
    quiet = Quiet("step", NOW - timedelta(seconds=40), 60.0)
    assert taken(snapshot(quiet=quiet)) == {
        "stall 0.40": (
            "night has shown no step for 40 s",
            "since iteration 40; after 60 s it is ended as hung",
        )
    }
    assert taken(snapshot(quiet=quiet, eta_s=20 * 30.0)) == {}
    assert taken(snapshot(quiet=replace(quiet, hang_s=None))) == {}


def test_a_plateau_is_told_once_for_each_best_loss() -> None:
    losses = ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.25))
    assert taken(snapshot(series=Series(val=losses)), plateau_validations=3) == {}
    expected = {
        "plateau 20": (
            "night has no better validation loss in 2 validations",
            "the best is 2, of iteration 20; the last is 2.25",
        )
    }
    assert taken(snapshot(series=Series(val=losses)), plateau_validations=2) == expected
    more = taken(snapshot(series=Series(val=(*losses, (50, 2.5)))), plateau_validations=2)
    assert more.keys() == expected.keys()


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42 s"), (300, "5 min"), (11_520, "3 h 12 min")])
def test_times_are_short(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


@pytest.fixture
def server() -> Iterator[Receiver]:
    with receiver() as made:
        yield made


def notifying(home: Path, server: Receiver, **notify: Any) -> tuple[RunDir, Config]:
    own = NotifyConfig(webhooks=(WebhookConfig(url=server.url),), **notify)
    run = MadeRun(home, config=make_run_config().model_copy(update={"notify": own}))
    return run.directory, run.plan.config


def titles(server: Receiver) -> list[str]:
    return [json.loads(body)["title"] for body in server.bodies]


def test_an_event_is_told_once_over_the_notifiers_of_a_run(home: Path, server: Receiver) -> None:
    run, config = notifying(home, server)
    ended = snapshot(state=RunState.SUCCEEDED, ended_at=NOW)
    for _ in range(3):
        Notifier(run, config).take(ended, NOW)
    assert titles(server) == ["night has succeeded"]
    assert not run.end_untold.exists()
    (notification,) = RunWatch(run).poll().notifications
    assert (notification.event, notification.run, notification.problems) == ("end", "run-1", ())


def test_only_what_is_wanted_is_told(home: Path, server: Receiver) -> None:
    run, config = notifying(home, server, on=("failure",))
    Notifier(run, config).take(snapshot(state=RunState.SUCCEEDED, ended_at=NOW), NOW)
    assert (titles(server), run.end_untold.exists()) == ([], False)


def test_one_that_was_being_sent_when_the_notifier_was_killed_is_not_sent_again(home: Path, server: Receiver) -> None:
    run, config = notifying(home, server)
    ended = snapshot(state=RunState.SUCCEEDED, ended_at=NOW)
    Notifier(run, config).take(ended, NOW)
    begun, *_ = run.notifications.read_text().splitlines(keepends=True)
    run.notifications.write_text(begun)
    Notifier(run, config).take(ended, NOW)
    assert len(server.requests) == 1
    (notification,) = RunWatch(run).poll().notifications
    assert notification.problems == ("the notifier was killed while it sent this, which may have arrived",)


def test_a_run_that_recovers_again_and_again_is_told_six_times_an_hour_and_the_rest_summed_up(
    home: Path, server: Receiver
) -> None:
    run, config = notifying(home, server)
    attempts = tuple(AttemptStatus(number, (), START, recovery_s=1.0) for number in range(2, 12))
    for _ in range(2):
        Notifier(run, config).take(snapshot(attempts=attempts), NOW)
    assert len(server.requests) == 6
    Notifier(run, config).take(snapshot(attempts=attempts, state=RunState.SUCCEEDED, ended_at=NOW), NOW)
    assert len(server.requests) == 7
    assert json.loads(server.bodies[-1])["text"] == "40 iterations; not told before: 4 × recovery"


def test_what_cannot_be_sent_is_in_the_record_without_secrets(home: Path, server: Receiver) -> None:
    run, config = notifying(home, server)
    server.answers += [400]
    Notifier(run, config).take(snapshot(state=RunState.FAILED, ended_at=NOW, cause="hf_AbCdEfGhIjKlMnOpQr"), NOW)
    (notification,) = RunWatch(run).poll().notifications
    assert notification.problems == ("webhook 1: 127.0.0.1 answered 400: refused /topic-4711 None",)
    assert notification.text.startswith("[redacted]")


def test_a_process_that_is_started_after_the_end_tells_it(home: Path, server: Receiver) -> None:
    own = NotifyConfig(webhooks=(WebhookConfig(url=server.url),))
    made = MadeRun(home, config=make_run_config().model_copy(update={"notify": own}))
    made.state("preflight", "failed", cause="no room")
    run, config = made.directory, made.plan.config
    trackers = RunTrackers(run, config.job, notifies=True)
    trackers.start(ended=True)
    trackers.close()
    assert list(trackers.faults()) == []
    assert (titles(server), run.end_untold.exists()) == (["job has failed"], False)


def test_a_damaged_record_is_read_as_far_as_it_goes(home: Path, server: Receiver) -> None:
    run, _ = notifying(home, server)
    lines = ["[]", '{"key": 3}', '{"key": "x", "at": "never"}', '{"key": "x", "problems": [1]}', "torn"]
    run.notifications.write_text("\n".join(lines))
    assert RunWatch(run).poll().notifications == ()
