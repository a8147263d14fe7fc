"""What the step decides is done on the hosts and in the run's files, in its order; what has come of it is seen in the
next observation."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine.cluster.host_connection import ConnectionState, HostFacts
from engine.errors import LaunchError
from engine.models import CheckStatus, PreflightReport, Reason, RunState
from engine.node import processes
from engine.node.processes import Process
from engine.protocol.attempt import END, read_regular
from engine.run import attempt_hosts, driver, observer, preparation, watched_attempt
from engine.run.attempt import AttemptOrigin
from engine.run.effects import (
    Cancel,
    Connect,
    DropPipes,
    Effect,
    EndTrackers,
    Find,
    Judge,
    KillPrograms,
    PlanAttempt,
    Reconnect,
    Record,
    RequestExitOutput,
    RequestProcesses,
    RunPreflight,
    Send,
    Settle,
    SignalLauncher,
    Standing,
    Start,
)
from engine.run.events import (
    AttemptPlanned,
    EnergyMeasured,
    LauncherStarted,
    LogsMissing,
    Note,
    RequestReceived,
    StateChanged,
    StateSaved,
    TrackerFailed,
    Trigger,
)
from engine.run.journal import read_journal
from engine.run.logs import mirror
from engine.run.observation import Cancelled, Checked, Found, Judged, Observation, Planned, Result, Settled, Started
from engine.run.supervisor_process import request_abort
from engine.security.identifiers import LOCAL
from tests.unit.run.live_attempt import LiveAttempt

STANDINGS = (Standing(), Standing())
NOW = datetime(2026, 5, 6, tzinfo=UTC)


@asynccontextmanager
async def opened(home: Path, **how: Any) -> AsyncIterator[LiveAttempt]:
    live = LiveAttempt(home, **how)
    live.run.start()
    try:
        yield live
    finally:
        await live.close()


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[LiveAttempt]:
    """Its attempt is connected."""
    async with opened(tmp_path) as live:
        await live.run.perform([Connect(live.attempt)])
        yield live


async def after(live: LiveAttempt, *effects: Effect) -> Observation:
    await live.run.perform(effects)
    return await live.run.observe()


async def result_of(live: LiveAttempt, effect: Effect) -> Result:
    """Of one that takes long."""
    seen = await after(live, effect)
    while not seen.finished:
        await live.run.await_news(10.0)
        seen = await live.run.observe()
    [result] = seen.finished
    return result


async def test_the_hosts_and_ranks_of_the_attempt_are_seen(live: LiveAttempt) -> None:
    live.start(0)
    live.hosts[1].shown = ConnectionState(4.0, answered=False, problem="no route")
    live.hosts[0].facts = HostFacts("boot", 7, 0.0)
    seen = await live.run.observe()
    assert [host.key for host in seen.hosts] == ["1:node0", "1:node1"]
    first, second = seen.hosts
    assert (first.answering, first.boot_id, first.memory_kills, first.current) == (True, "boot", 7, True)
    assert (second.answering, second.answered, second.problem) == (False, False, "no route")
    assert [rank.started for rank in seen.ranks] == [True, False]
    assert seen.host_of(1).names == ("node1",)
    assert (seen.receiving, seen.command, seen.finished, seen.news) == (True, None, (), ())


async def test_without_an_attempt_nothing_is_seen_of_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as live:
        seen = await live.run.observe()
        later = await live.run.observe()
    assert (seen.ranks, seen.hosts, seen.launcher_alive, seen.unknown) == ((), (), False, None)
    assert later.now >= seen.now and 0.5 <= seen.jitter <= 1.0


async def test_an_event_is_recorded_before_what_follows_it_with_the_time_of_the_step(live: LiveAttempt) -> None:
    note = Note(message="x", at=NOW)
    recorded: list[int] = []
    live.hosts[0].send_command = lambda *_: recorded.append(len(read_journal(live.directory.journal)))  # type: ignore[method-assign]
    before = len(read_journal(live.directory.journal))
    await live.run.perform([Record(note), Send("1:node0", 0, END)])
    assert read_journal(live.directory.journal)[-1] == note
    assert recorded == [before + 1]
    await live.run.perform([Record(StateChanged(state=RunState.RUNNING, at=NOW))])
    assert live.state is RunState.RUNNING
    with pytest.raises(ValueError, match="does not become"):
        await live.run.perform([Record(StateChanged(state=RunState.PREFLIGHT, at=NOW))])


async def test_a_host_is_told_what_is_meant_for_it_alone(live: LiveAttempt) -> None:
    await live.run.perform(
        [
            Send("1:node1", 1, END),
            KillPrograms("1:node1"),
            RequestExitOutput("1:node1"),
            RequestProcesses("1:node1"),
        ]
    )
    first, second = live.hosts
    assert (second.commands, second.requests) == ([(1, END)], ["kill ranks", "exit output", "kill processes"])
    assert (first.commands, first.requests) == ([], [])


async def test_only_an_answer_to_a_kill_is_shown_as_processes(live: LiveAttempt) -> None:
    left = [Process(7, "python")]
    live.hosts[0].left = left
    assert (await live.run.observe()).hosts[0].processes is None
    seen = await after(live, RequestProcesses("1:node0"))
    assert [host.processes for host in seen.hosts] == [tuple(left), None]
    live.hosts[0].left = None
    assert (await live.run.observe()).hosts[0].processes is None


async def test_requests_are_news_once_and_their_files_go_when_they_are_recorded(live: LiveAttempt) -> None:
    request_abort(live.directory, by="cli")
    live.run.request_abort("signal TERM")
    seen = await live.run.observe()
    assert {request.by for request in seen.news if isinstance(request, RequestReceived)} == {"cli", "signal TERM"}
    assert (await live.run.observe()).news == seen.news, "a step that fails records none"
    assert len(list(live.directory.requests.iterdir())) == 1, "a supervisor that dies now leaves it for the next"
    await live.run.perform([Record(event.model_copy(update={"at": NOW})) for event in seen.news])
    assert list(live.directory.requests.iterdir()) == []
    assert (await live.run.observe()).news == ()


async def test_the_manifest_of_a_state_is_news_once_also_when_it_comes_at_the_very_end(live: LiveAttempt) -> None:
    entries = [("2.0", 64 * "a"), ("3.0@1.0", 64 * "b")]
    for state, manifest in entries:
        live.report(0, "checkpoint", phase="committed", iteration=3, state=state, manifest=manifest)
    seen = await after(live, Settle(("1:node0", "1:node1")))
    saved = [event for event in seen.news if isinstance(event, StateSaved)]
    assert [(event.rank, event.state, event.manifest) for event in saved] == [(0, *entry) for entry in entries]
    assert seen.finished == (Settled(("1:node0", "1:node1")),)
    await live.run.perform([Record(event) for event in seen.news])
    # Another supervisor reads the same files.
    again = await after(live, Connect(live.attempt))
    assert (again.news, live.recorder.history.manifests) == ((), {0: tuple(entries)})


async def test_what_a_host_has_used_is_news_once_at_the_end_of_the_attempt(live: LiveAttempt) -> None:
    for now in (0.0, 10.0):
        sample = {"system": "Linux", "nvidia": ["0, 10, 900, 50, 40, 1, 2"]}
        live.hosts[1].power.feed(json.dumps(sample).encode() + b"\n", now)
    for expected in ([EnergyMeasured(node="node1", joules=500.0, seconds=10.0)], []):
        seen = await after(live, Settle(("1:node0", "1:node1")))
        assert [event for event in seen.news if isinstance(event, EnergyMeasured)] == expected
        await live.run.perform([Record(event) for event in seen.news])


async def test_the_ends_and_the_last_events_of_settled_hosts_are_seen(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.start(0, 1)
    seen = await live.run.observe()
    sleeps: list[float] = []

    def end_meanwhile(seconds: float) -> None:
        sleeps.append(seconds)
        live.report(0, "step", iteration=9)
        live.exit(0, 0)

    monkeypatch.setattr(time, "sleep", end_meanwhile)
    seen = await after(live, Settle(("1:node0",)))
    assert (seen.ranks[0].end_known, seen.ranks[1].end_known, seen.progress.furthest) == (True, False, 9)
    assert len(sleeps) == 1, "rank 1, on a host that is not settled, is not waited for"


async def test_files_that_a_host_has_not_sent_are_missed_until_they_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_LATE_BYTES_S", 0.0)
    async with opened(tmp_path, ssh=(LOCAL, "ana@box")) as live:
        await live.run.perform([Connect(live.attempt)])
        log = live.hosts[1].file(live.files.log(1).name)
        assert not (await live.run.observe()).hosts[1].unsent, "it has not been settled"
        seen = await after(live, Settle(("1:node0",)))
        [settled] = seen.finished
        assert isinstance(settled, Settled) and settled.missing["rank1.log"] is None
        assert [host.unsent for host in seen.hosts] == [False, True]
        for file in (log, live.hosts[1].file(live.files.events(1).name)):
            file.settle(0)  # type: ignore[attr-defined]
        await live.run.observe()
        assert not (await live.run.observe()).hosts[1].unsent
        seen = await after(live, Settle(()))
        assert (seen.hosts[1].unsent, seen.finished) == (False, (Settled(()),))


async def test_the_verdict_is_on_the_standings_that_the_step_gives(live: LiveAttempt) -> None:
    live.start(0, 1)
    live.exit(0, 0)
    live.report(0, "end", completed=True)
    live.exit(1, 1)
    await live.run.observe()
    seen = await after(live, Judge(Trigger.RANK, STANDINGS))
    [judged] = seen.finished
    assert isinstance(judged, Judged)
    assert (judged.verdict.reason, judged.verdict.rank, judged.ends_known) == (Reason.RANK_FAILED, 1, 2)
    seen = await after(live, Judge(Trigger.ENDED, (Standing(), Standing(dispensable=True)), over=True))
    [judged] = seen.finished
    assert isinstance(judged, Judged) and judged.verdict.rank is None, "a rank that can be spared is no cause"


async def test_the_next_attempts_hosts_replace_all_but_those_that_are_kept(live: LiveAttempt) -> None:
    first = live.hosts
    await live.run.perform([RequestProcesses("1:node1")])
    first[1].left = [Process(7, "python")]
    following = live.attempt.model_copy(update={"number": 2})
    seen = await after(live, Record(AttemptPlanned(attempt=following)), Connect(following, ("1:node1",)))
    assert [(host.key, host.current) for host in seen.hosts] == [
        ("1:node1", False),
        ("2:node0", True),
        ("2:node1", True),
    ]
    assert [host.closed for host in (*first, *live.hosts)] == [True, False, False, False]
    assert seen.hosts[0].processes == (Process(7, "python"),)
    assert seen.host_of(1).key == "2:node1"
    await live.run.let_go()
    assert all(host.closed for host in live.connected)
    seen = await live.run.observe()
    assert (seen.hosts, seen.ranks) == ((), ())


async def test_an_earlier_attempt_is_ended_on_the_nodes_that_are_named_and_on_no_others(tmp_path: Path) -> None:
    async with opened(tmp_path, ssh=("ana@box", "bea@box")) as live:
        seen = await after(live, Reconnect(live.attempt, ("node1",)))
        assert [(host.key, host.current) for host in seen.hosts] == [("1:node1", False)]
        assert [host.commands for host in live.hosts] == [[], [(1, END)]]


async def test_a_check_ends_in_its_report_or_in_the_reason_why_there_is_none(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = PreflightReport(checks=[], overall_status=CheckStatus.PASS)
    results: list[Any] = [report, LaunchError("no node")]

    async def checks(*_: Any) -> PreflightReport:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[no-any-return]

    monkeypatch.setattr(preparation, "run_preflight", checks)
    assert await result_of(live, RunPreflight()) == Checked(report)
    assert await result_of(live, RunPreflight({"node1": "sync: it is stale"})) == Checked(error="no node")
    plan = json.loads(read_regular(live.directory.training_plan))
    assert plan["reason"] == "it is made again without node1"


@pytest.mark.parametrize("faster", [False, True])
async def test_a_check_that_is_cancelled_is_over_unless_it_was_faster(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch, faster: bool
) -> None:
    report = PreflightReport(checks=[], overall_status=CheckStatus.PASS)

    async def checks(*_: Any) -> PreflightReport:
        if not faster:
            await asyncio.Event().wait()
        return report

    monkeypatch.setattr(preparation, "run_preflight", checks)
    assert (await after(live, RunPreflight())).finished == ()
    await live.run.await_news(10.0 if faster else 0.0)
    seen = await after(live, Cancel())
    assert seen.finished == ((Checked(report),) if faster else (Cancelled(),))
    assert (await after(live, Cancel())).finished == (), "nothing is under way"


async def test_a_fault_that_nobody_expects_is_raised_by_the_next_observation(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "run_preflight", Mock(side_effect=RuntimeError("boom")))
    with pytest.raises(RuntimeError, match="boom"):
        await result_of(live, RunPreflight())


async def test_the_next_attempt_begins_at_the_end_of_the_last_ones_files(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ports(*_: Any) -> int:
        live.report(0, "report", iteration=3, train_loss=2.0)
        return 30_000

    monkeypatch.setattr(preparation, "fresh_ports", ports)
    planned = await result_of(live, PlanAttempt(("node0", "node1"), live.attempt))
    assert isinstance(planned, Planned) and planned.attempt is not None
    assert (planned.attempt.number, planned.attempt.starting_port, planned.attempt.nodes) == (
        2,
        30_000,
        ("node0", "node1"),
    )
    assert planned.attempt.event_bases[0] == live.directory.events(0).stat().st_size > 0
    # What comes now is of the next attempt.
    with live.directory.events(0).open("a") as file:
        file.write(json.dumps({"event": "report", "rank": 0, "iteration": 4}) + "\n")
    seen = await after(live, Settle(("1:node0",)))
    assert seen.finished == (Settled(("1:node0",)),)
    assert [json.loads(line)["iteration"] for line in live.directory.metrics.read_bytes().splitlines()] == [3]


async def test_what_a_host_has_not_sent_before_the_next_attempt_stays_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ports(*_: Any) -> int:
        return 30_000

    monkeypatch.setattr(preparation, "fresh_ports", ports)
    async with opened(tmp_path, ssh=(LOCAL, "ana@box")) as live:
        await live.run.perform([Connect(live.attempt)])
        await after(live, Settle(("1:node0",)))
        await live.run.perform([PlanAttempt(("node0", "node1"), live.attempt)])
        seen = await live.run.observe()
        while not seen.finished:
            await live.run.await_news(10.0)
            seen = await live.run.observe()
        [missing] = [event for event in seen.news if isinstance(event, LogsMissing)]
        assert missing == LogsMissing(attempt=1, files={"rank1.log": None, "rank1.events.jsonl": None})
        assert seen.hosts[1].unsent
        [settled] = (await after(live, Settle(()))).finished
        assert isinstance(settled, Settled) and settled.missing == missing.files


async def test_nodes_on_which_nothing_can_be_planned_are_no_plan(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "fresh_ports", Mock(side_effect=LaunchError("no port is free")))
    assert await result_of(live, PlanAttempt(("node0", "node1"), live.attempt)) == Planned(error="no port is free")
    live.start(0)
    assert (await live.run.observe()).ranks[0].started, "the last attempt is still watched"


class Launching:
    """`launch`, which ends as the test wants it to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: AttemptOrigin | Exception) -> None:
        self.nodes: tuple[str, ...] = ()
        self._result = result
        monkeypatch.setattr(driver, "launch", self)

    async def __call__(self, _run_dir: object, plan: Any, *_: object) -> AttemptOrigin:
        self.nodes = plan.nodes
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


async def test_a_launcher_that_was_started_is_watched_and_signalled(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = [True]
    launcher = Mock(pid=7, start="then", rank_ends=Mock(return_value=[(1, 3)]), alive=lambda **_: alive[0])
    launching = Launching(monkeypatch, AttemptOrigin(launcher))
    assert not (await live.run.observe()).launcher_alive
    assert await result_of(live, Start(live.attempt)) == Started(LauncherStarted(pid=7, start="then"))
    assert launching.nodes == ("node0", "node1")
    seen = await after(live, SignalLauncher(signal.SIGTERM), DropPipes())
    assert seen.launcher_alive and seen.ranks[1].refused
    launcher.signal_group.assert_called_once_with(signal.SIGTERM)
    launcher.drop_pipes.assert_called_once_with()
    alive[0] = False
    assert not (await live.run.observe()).launcher_alive


async def test_without_a_launcher_nothing_is_signalled(live: LiveAttempt, monkeypatch: pytest.MonkeyPatch) -> None:
    Launching(monkeypatch, AttemptOrigin())
    assert await result_of(live, Start(live.attempt)) == Started()
    await live.run.perform([SignalLauncher(signal.SIGTERM), DropPipes()])
    Launching(monkeypatch, LaunchError("its files could not be written"))
    assert await result_of(live, Start(live.attempt)) == Started(error="its files could not be written")


@pytest.mark.parametrize("rebooted", [False, True])
@pytest.mark.parametrize("started", [False, True])
async def test_what_an_earlier_supervisor_started_is_looked_for(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch, rebooted: bool, started: bool
) -> None:
    monkeypatch.setattr(attempt_hosts, "_POLL_S", 0.0)
    monkeypatch.setattr(processes, "same_boot", lambda *_: not rebooted)
    live.hosts[0].left = [Process(7, "sh start.sh")] if started else []
    found = await result_of(live, Find(live.attempt))
    assert found == Found(None, anything=started or rebooted)


async def test_an_earlier_supervisors_launcher_is_watched(live: LiveAttempt) -> None:
    await live.run.perform([Record(LauncherStarted(pid=2**22 + 7, start="then"))])
    assert await result_of(live, Find(live.attempt)) == Found(LauncherStarted(pid=2**22 + 7, start="then"))
    assert not (await live.run.observe()).launcher_alive


async def test_a_rank_that_starts_is_news_at_once(live: LiveAttempt) -> None:
    waiting = asyncio.create_task(live.run.await_news(60.0))
    await asyncio.sleep(0)
    live.hosts[0].on_news()
    await asyncio.wait_for(waiting, 10.0)
    await asyncio.wait_for(live.run.await_news(0.01), 10.0)


async def test_a_result_is_news_at_once(live: LiveAttempt) -> None:
    await live.run.perform([Settle(())])
    await asyncio.wait_for(live.run.await_news(60.0), 10.0)
    assert (await live.run.observe()).finished


async def test_what_trackers_fail_with_is_news_and_at_the_end_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = [TrackerFailed(tracker=name, why="no disk") for name in ("tensorboard", "wandb")]
    trackers = Mock(faults=Mock(side_effect=[iter(failed[:1]), iter(()), iter(failed[1:])]))
    monkeypatch.setattr(observer, "RunTrackers", Mock(return_value=trackers))
    live = LiveAttempt(tmp_path)
    live.run.start()
    seen = await after(live, EndTrackers())
    await live.close()
    assert seen.news == (failed[0],)
    assert [call[0] for call in trackers.method_calls] == ["start", "end", "faults", "faults", "close", "faults"]
    assert live.recorder.history.trackers_failed == {"tensorboard": "no disk", "wandb": "no disk"}


@pytest.mark.parametrize("shown", [False, True])
async def test_what_is_left_at_a_fault_is_let_go_and_what_was_said_is_recorded(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch, shown: bool
) -> None:
    cancelled: list[bool] = []

    async def checks(*_: Any) -> PreflightReport:
        try:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            cancelled.append(True)

    monkeypatch.setattr(preparation, "run_preflight", checks)
    await live.run.perform([RunPreflight()])
    await asyncio.sleep(0)
    request_abort(live.directory, by="cli")
    if shown:
        assert len((await live.run.observe()).news) == 1
    await live.run.let_go()
    assert cancelled == [True]
    assert live.recorder.history.abort is not None
    assert list(live.directory.requests.iterdir()) == []
    # It can be adopted by the same process.
    seen = await after(live, Connect(live.attempt))
    assert (len(seen.ranks), seen.finished) == (2, ())


async def test_a_run_can_be_let_go_when_its_journal_takes_nothing_more(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.recorder, "append", Mock(side_effect=OSError(28, "No space left on device")))
    live.run.request_abort("signal TERM")
    await live.run.let_go()
    assert all(host.closed for host in live.connected)


async def test_files_that_cannot_be_closed_keep_no_connection(
    live: LiveAttempt, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # A fault of reading them comes again when their rest is read.
    monkeypatch.setattr(watched_attempt.WatchedAttempt, "close", Mock(side_effect=RuntimeError("odd line")))
    await live.run.let_go()
    assert all(host.closed for host in live.connected)
    assert "odd line" in capfd.readouterr().err
