"""The process that has items started, turn by turn: in order, none twice, whatever ends it in between."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.api import Engine
from engine.api.queue import starting_time
from engine.api.queue_runner import QueueRunner
from engine.cluster.probe_results import OccupiedReport
from engine.config.models import Config
from engine.errors import InputError, LaunchError, NodeUnreachable, StateError
from engine.models import Reason, RunState
from engine.protocol import attempt
from engine.queue.items import QueueItem
from engine.queue.queue_files import QueueFiles, queued_configs
from engine.queue.runner_process import runner_alive
from engine.run.events import RunPlanned, StateChanged, Verdict
from engine.run.journal import Journal
from engine.run.run_plan import read_plan
from engine.store.layout import RunDir
from tests.unit.run.run_maker import make_run_config


class Killed(BaseException):
    """The process has ended here."""


class Head:
    """A home with a queue; the supervisors that are started do nothing."""

    def __init__(self, home: Path) -> None:
        self.home, self.files = home, QueueFiles(home)
        self.started: list[str] = []
        """Names of jobs, in the order of their starts."""
        self.runner = QueueRunner(home)

    def add(self, *jobs: str, ssh: str = "127.0.0.1", **wishes: Any) -> list[QueueItem]:
        return Engine(self.home).queue.add([config(job, ssh) for job in jobs], **wishes)

    def start_supervisor(self, directory: RunDir, *_: str) -> int:
        plan = read_plan(directory.plan)
        self.started.append(plan.config.job.name)
        Journal(directory.journal).append(RunPlanned(run=plan.record(), nonce=plan.nonce))
        return 1

    async def turn(self, *, anew: bool = False) -> bool:
        if anew:
            self.runner = QueueRunner(self.home)
        self.runner._not_before.clear()
        return await self.runner._turn()

    def items(self) -> tuple[QueueItem, ...]:
        return self.files.read().items

    def states(self) -> list[str]:
        return [item.outcome or item.state for item in self.items()]

    def end(self, item: int, state: RunState = RunState.SUCCEEDED) -> None:
        run = self.files.read().item(item).run
        assert run is not None
        journal = Journal(RunDir(self.home / "runs" / run).journal)
        for one in ("preflight", "finishing"):
            journal.append(StateChanged(state=RunState(one)))
        journal.append(StateChanged(state=state, verdict=Verdict(state, Reason.RANK_FAILED)))
        journal.close()


def config(job: str, ssh: str = "127.0.0.1") -> Config:
    made = make_run_config(1, name=job)
    return made.model_copy(update={"nodes": (made.nodes[0].model_copy(update={"ssh": ssh, "name": ssh}),)})


@pytest.fixture
def head(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    made = Head(home)
    monkeypatch.setattr("engine.api.queue_runner.start_supervisor", made.start_supervisor)
    monkeypatch.setattr("engine.api.runs.adopt_orphans", lambda *_: [])
    monkeypatch.setattr("engine.api.runs.start_runner", lambda *_, **__: False)
    monkeypatch.setattr("engine.api.queue.start_runner", lambda *_, **__: False)
    agent = SimpleNamespace(probe=made_answer(OccupiedReport(nonces=[])))
    monkeypatch.setattr("engine.cluster.transport.fleet.Fleet.agent", lambda *_: agent)
    yield made


def made_answer(answer: object) -> Callable[..., Any]:
    async def probe(*_: object, **__: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return probe


async def test_items_start_in_their_order_one_on_a_machine_at_a_time(head: Head) -> None:
    head.add("a1", "a2", ssh="ana.test")
    head.add("b1", ssh="bea.test")
    head.add("a3", ssh="ana.test")
    assert await head.turn() and await head.turn()
    assert head.started == ["a1", "b1"]
    head.end(1, RunState.FAILED)
    assert await head.turn()
    assert head.started == ["a1", "b1", "a2"]
    for number in (2, 3):
        head.end(number)
    assert await head.turn()
    head.end(4)
    assert not await head.turn()
    assert head.started == ["a1", "b1", "a2", "a3"]
    assert head.states() == ["failed", "succeeded", "succeeded", "succeeded"]
    assert head.files.read().told_empty and queued_configs(head.home) == {}


async def test_that_the_queue_is_empty_is_told_once(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr("engine.api.queue_runner.queue_empty", lambda _, config: names.append(config.job.name))
    monkeypatch.setattr("engine.api.queue_runner._POLL_S", 0.0)
    head.add("a1", "held")
    Engine(head.home).queue.hold(2)
    await head.turn()
    head.end(1)
    await head.runner.run()
    assert names == [], "one is held"
    Engine(head.home).queue.release(2)
    await head.turn(anew=True)
    head.end(2)
    for _ in range(2):
        await QueueRunner(head.home).run()
    assert names == ["held"]


async def test_that_it_is_empty_is_told_as_the_newest_run_that_is_left_wants_it(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr("engine.api.queue_runner.queue_empty", lambda _, config: names.append(config.job.name))
    head.add("a1", "a2")
    for number in (1, 2):
        await head.turn()
        head.end(number)
    await head.turn()
    shutil.rmtree(head.home / "runs" / str(head.items()[1].run))
    head.runner._tell_empty()
    assert names == ["a1"]


async def test_a_disk_that_is_full_at_the_start_is_waited_for(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[QueueFiles] = []

    def take_charge(files: QueueFiles) -> None:
        taken.append(files)
        if len(taken) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.api.queue_runner.take_charge", take_charge)
    monkeypatch.setattr("engine.api.queue_runner._RETRY_S", 0.0)
    monkeypatch.setattr("engine.api.queue_runner._POLL_S", 0.0)
    head.add("a1")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    assert Engine(head.home).queue.snapshot().waits[1] == "room: the disk is full"
    head.files.change(lambda queue: queue.changed(1, "launching", run="r1").changed(1, "started"))
    await head.runner.run()
    assert len(taken) == 3 and head.states() == ["ended"]
    assert "No space left on device" in capsys.readouterr().err


async def test_one_that_cannot_record_the_queues_end_is_still_in_charge(
    head: Head, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, in_charge, real = list[str](), list[bool](), attempt.write_atomic

    def write_atomic(path: Path, text: str) -> None:
        if '"told_empty":true' in text and len(in_charge) < 2:
            in_charge.append(runner_alive(head.home))
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    def tell(_: Path, config: Config) -> None:
        names.append(config.job.name)
        in_charge.append(runner_alive(head.home))
        if len(names) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("engine.api.queue_runner.queue_empty", tell)
    monkeypatch.setattr("engine.api.queue_runner._RETRY_S", 0.0)
    head.add("a1")
    await head.turn()
    head.end(1)
    monkeypatch.setattr("engine.queue.queue_files.write_atomic", write_atomic)
    await head.runner.run()
    assert in_charge == [True, True, False] and names == ["a1"] and not runner_alive(head.home)
    assert capsys.readouterr().err.count("Traceback") == 3


def test_a_queue_that_cannot_be_read_is_not_taken_for_an_empty_one(head: Head) -> None:
    head.add("a1")
    head.files.items.write_text(head.files.items.read_text()[:-20])
    with pytest.raises(StateError, match="not read"):
        head.add("a2")
    with pytest.raises(StateError, match="move that file away"):
        Engine(head.home).queue.snapshot()


def test_before_the_state_directory_is_made_the_queue_is_empty(tmp_path: Path) -> None:
    snapshot = Engine(tmp_path / "home").queue.snapshot()
    assert (snapshot.items, snapshot.waits, snapshot.attended) == ((), {}, False)


def test_a_configuration_in_use_is_called_by_its_items_number(head: Head) -> None:
    head.add("a1", "a2")
    Engine(head.home).queue.cancel(1)
    assert [*Engine(head.home).runs.configs_in_use()] == ["queued item 2 is to use it"]


async def test_a_run_of_the_queue_has_what_the_item_says(head: Head) -> None:
    head.add("a1", budget_s=60.0, skip=["ports_free"])
    await head.turn()
    plan = read_plan(RunDir(head.home / "runs" / str(head.items()[0].run)).plan)
    assert (plan.budget_s, plan.skip, plan.unattended) == (60.0, ("ports_free",), True)
    assert not head.files.config_file(1).exists(), "it has the job's environment"


@pytest.mark.parametrize("changes", range(6))
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_none_starts_twice_wherever_the_process_is_killed(
    head: Head, monkeypatch: pytest.MonkeyPatch, changes: int, *, after: bool
) -> None:
    """Before or after each change of the queue, and before or after the start of each supervisor."""
    head.add("a1", "a2")
    left = [changes]

    def killing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            left[0] -= 1
            if left[0] == -1 and not after:
                raise Killed
            answer = real(*arguments)
            if left[0] == -1 and after:
                raise Killed
            return answer

        return call

    monkeypatch.setattr(QueueFiles, "change", killing(QueueFiles.change))
    monkeypatch.setattr("engine.api.queue_runner.start_supervisor", killing(head.start_supervisor))
    for _ in range(12):
        try:
            if not await head.turn(anew=True):
                break
        except Killed:
            continue
        for item in head.items():
            if item.state == "started":
                head.end(item.id)
    assert head.started == ["a1", "a2"] and head.states() == ["succeeded"] * 2
    assert len(list((head.home / "runs").iterdir())) == 2


async def test_a_run_that_was_deleted_is_not_launched_again(head: Head) -> None:
    head.add("a1", "a2")
    await head.turn()
    shutil.rmtree(head.home / "runs")
    await head.turn(anew=True)
    first = head.items()[0]
    assert (first.state, first.why) == ("ended", "its run was deleted")
    assert head.started == ["a1", "a2"] or (await head.turn() and head.started == ["a1", "a2"])


async def test_a_failure_holds_what_waits_only_where_that_is_wished(head: Head) -> None:
    head.add("a1", stop_on_failure=True)
    head.add("a2", "b1")
    await head.turn()
    head.end(1, RunState.FAILED)
    assert not await head.turn(), "what is held waits for a person"
    assert head.states() == ["failed", "held", "held"] and head.items()[1].why == "item 1 (a1) failed"
    Engine(head.home).queue.release(2)
    await head.turn()
    assert head.started == ["a1", "a2"]


async def test_one_that_is_held_while_its_machine_is_asked_does_not_start(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def probe(*_: object, **__: object) -> OccupiedReport:
        Engine(head.home).queue.hold(1)
        return OccupiedReport(nonces=[])

    head.add("a1", ssh="ana.test")
    monkeypatch.setattr("engine.cluster.transport.fleet.Fleet.agent", lambda *_: SimpleNamespace(probe=probe))
    await head.turn()
    assert (head.started, head.states()) == ([], ["held"])


async def test_an_item_that_is_broken_does_not_stop_the_others(head: Head) -> None:
    head.add("a1", "a2")
    head.files.config_file(1).write_text("{}")
    await head.turn()
    await head.turn()
    assert head.states() == ["failed", "started"]
    assert "configuration is damaged" in head.items()[0].why


@pytest.mark.parametrize(("error", "turns", "state"), [
    (LaunchError("the supervisor ended at once"), 6, "failed"), (StateError("the disk is full"), 6, "launching"),
])  # fmt: skip
async def test_a_launch_that_fails_is_tried_again_and_a_full_disk_waited_for(
    head: Head, monkeypatch: pytest.MonkeyPatch, error: Exception, turns: int, state: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    head.add("a1")
    monkeypatch.setattr("engine.api.queue_runner.start_supervisor", fail)
    for _ in range(turns):
        await head.turn()
    assert head.states() == [state]
    assert state == "failed" or str(error) in json.loads(head.files.notes.read_text())["1"]


@pytest.mark.parametrize(("answer", "why"), [
    (OccupiedReport(nonces=["abc.1"]), "a run of another Flight Deck on ana.test"),
    (NodeUnreachable("no answer", where="ana.test"), "has not told if it is free"),
])  # fmt: skip
async def test_a_machine_that_another_head_uses_is_waited_for(
    head: Head, monkeypatch: pytest.MonkeyPatch, answer: object, why: str
) -> None:
    head.add("a1", ssh="ana.test")
    agent = SimpleNamespace(probe=made_answer(answer))
    monkeypatch.setattr("engine.cluster.transport.fleet.Fleet.agent", lambda *_: agent)
    await head.turn()
    assert head.started == [] and why in Engine(head.home).queue.snapshot().waits[1]
    monkeypatch.setattr("engine.api.queue_runner._AWAY_S", -1.0)
    await head.turn()
    assert head.started == (["a1"] if isinstance(answer, Exception) else []), "preflight says what is wrong with it"


async def test_runs_beside_the_queue_are_waited_for_and_listed(head: Head) -> None:
    engine = Engine(head.home)
    directory = engine.launches.make(config("direct"), ())
    head.start_supervisor(directory)
    head.add("a1")
    await head.turn()
    snapshot = engine.queue.snapshot()
    assert head.started == ["direct"] and [run.name for run in snapshot.direct] == ["direct"]
    assert snapshot.waits == {1: f"{directory.id} on 127.0.0.1"}
    assert engine.queue.users(config("other")) == [directory.id, "item 1 of the queue"]


def test_an_item_that_has_started_is_not_cancelled(head: Head) -> None:
    (item,) = head.add("a1")
    queue = Engine(head.home).queue
    assert queue.hold(item.id).state == "held" and queue.cancel(item.id).state == "cancelled"
    assert not head.files.config_file(item.id).exists()
    with pytest.raises(InputError, match="it is cancelled"):
        queue.hold(item.id)


@pytest.mark.parametrize(("text", "local"), [
    ("22:00", "2026-03-28 22:00"), ("4:30", "2026-03-29 04:30"), ("2026-04-01 06:00", "2026-04-01 06:00"),
])  # fmt: skip
def test_times_are_those_of_this_machine(text: str, local: str) -> None:
    now = datetime(2026, 3, 28, 12, 0).astimezone()
    assert starting_time(text, now).astimezone().replace(tzinfo=None) == datetime.fromisoformat(local)
    for refused in ("25:00", "soon", "2026-03-01 22:00", ""):
        with pytest.raises(InputError):
            starting_time(refused, now)


def test_the_same_clock_time_of_the_next_day_may_be_23_hours_away() -> None:
    now = datetime(2026, 3, 28, 12, 0).astimezone(UTC)
    assert starting_time("12:00", now) - now in (timedelta(hours=23), timedelta(hours=24))
