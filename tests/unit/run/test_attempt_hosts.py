"""An attempt of which the journal has nothing: it is ended wherever it may be, and has succeeded when the ranks that it
needed have."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from engine.cluster.host_connection import AttemptOnHost, HostConnection
from engine.cluster.transport.base import Transport
from engine.cluster.transport.fleet import Fleet
from engine.config.models import NodeConfig
from engine.models import CheckStatus, PreflightReport, Reason, RunRecord, RunState
from engine.protocol.attempt import END, ExitRecord, NodeFiles, write_atomic
from engine.protocol.job import Strategy
from engine.run import attempt_hosts, driver, preparation
from engine.run.attempt_hosts import UnknownAttempt
from engine.run.driver import LiveRun
from engine.run.effects import ConnectUnknown, Effect, RequestProcesses
from engine.run.events import CleanupConfirmed, NodesExcluded, RunReopened, StateChanged, Verdict
from engine.run.journal import RunRecorder, read_journal
from engine.run.observation import Observation
from engine.run.run_context import RunContext
from engine.run.state import Phase, State
from engine.run.step import begin, step
from engine.security.identifiers import LOCAL
from tests.unit.run.file_host import FileHost
from tests.unit.run.run_maker import MadeRun


class Unknown:
    """A run whose newest attempt is not in its journal."""

    def __init__(self, home: Path, strategy: Strategy = "data", ssh: dict[str, str] | None = None) -> None:
        """`ssh`: of its nodes by their names; by default there are two on this machine."""
        self.run = MadeRun(home, strategy=strategy).attempt(1).state("preflight", "launching", "running").close()
        self.files = NodeFiles.for_attempt(home / "node", self.run.id, 2)
        self.files.directory.mkdir(parents=True)
        self.folder = self.run.directory.attempt(2)
        self.folder.mkdir(parents=True)
        plan = self.run.plan
        if ssh is not None:
            nodes = tuple(NodeConfig(name=name, ssh=host, python="python", workdir="/") for name, host in ssh.items())
            plan = plan.model_copy(update={"config": plan.config.model_copy(update={"nodes": nodes})})
        self.recorder = RunRecorder(self.run.directory.journal, plan, lambda _record: None)
        fleet = Fleet(home)
        self.context = RunContext(self.run.directory, plan, self.recorder, fleet, home / "node")

    def hosts(self, *hosts: str) -> Unknown:
        (self.folder / "hostfile.json").write_text(json.dumps({"hosts": [{"ssh": host} for host in hosts]}))
        return self

    def exits(self, *codes: int) -> Unknown:
        for rank, code in enumerate(codes):
            record = ExitRecord(rank, 2, code, None, 0.0, 0)
            write_atomic(self.files.exit(rank), json.dumps(asdict(record)))
            self.files.events(rank).write_text(json.dumps({"event": "end", "completed": code == 0}) + "\n")
        return self


@pytest.fixture(autouse=True)
def without_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a host with ranks are read where the test writes them."""

    def connection(node: NodeConfig, transport: Transport, part: AttemptOnHost) -> HostConnection:
        if not part.nodes:
            return HostConnection(node, transport, part)
        return FileHost(part.files, tuple(part.nodes), tuple(part.nodes.values()), ssh=node.ssh)

    monkeypatch.setattr(attempt_hosts, "HostConnection", connection)


@pytest.mark.parametrize(
    ("strategy", "hosts", "codes", "whose"),
    [
        ("data", 2, (0, 0), "every rank"),
        ("data", 2, (0,), None),
        ("data", 1, (0,), "every rank"),
        ("data", 0, (0,), None),
        ("local", 2, (0, 1), "rank 0"),
        ("local", 2, (1, 0), None),
    ],
)
def test_it_has_succeeded_when_the_ranks_that_it_needed_have(
    tmp_path: Path, strategy: Strategy, hosts: int, codes: tuple[int, ...], whose: str | None
) -> None:
    """`hosts`: in its hostfile; 0 without one."""
    unknown = Unknown(tmp_path, strategy).exits(*codes)
    if hosts:
        unknown.hosts(*[LOCAL] * hosts)
    verdict = UnknownAttempt(unknown.context).verdict()
    assert (verdict is not None and verdict.state is RunState.SUCCEEDED) is (whose is not None)
    cause = verdict.cause if verdict is not None else None
    assert cause == (whose and f"attempt 2 is not in journal.jsonl; the exit record of {whose} shows that it completed")
    unknown.recorder.close()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (("ana", "cia@c.local"), ["ana", "cia", "bea"]),
        (("cia@c.local",), ["cia", "ana", "bea"]),
        ((), ["ana", "bea", "cia"]),
        (("nobody",), ["ana", "bea", "cia"]),
    ],
)
def test_its_ranks_are_numbered_by_its_hostfile(tmp_path: Path, hosts: tuple[str, ...], expected: list[str]) -> None:
    unknown = Unknown(tmp_path, ssh={"ana": "ana", "bea": "bea", "cia": "cia@c.local"}).hosts(*hosts)
    connections = UnknownAttempt(unknown.context).connections
    assert [connections.to(rank).names[0] for rank in range(3)] == expected
    assert [connection.local for connection in connections] == [False, False, False, True]
    unknown.recorder.close()


async def test_all_of_it_is_ended_and_what_comes_of_it_is_seen(tmp_path: Path) -> None:
    unknown = Unknown(tmp_path)
    live = LiveRun(unknown.context)
    await live.perform([ConnectUnknown(), RequestProcesses("unknown:node0")])
    seen = await live.observe()
    [host] = seen.hosts
    assert (host.key, host.names, host.current, host.processes) == ("unknown:node0", ("node0", "node1"), False, ())
    connection = live._observer.hosts["unknown:node0"].connection
    assert isinstance(connection, FileHost) and connection.commands == [(0, END), (1, END)]
    assert (seen.unknown, seen.ranks) == (None, ())
    unknown.exits(0, 0)
    seen = await live.observe()
    assert seen.unknown is not None and seen.unknown.state is RunState.SUCCEEDED
    await live.close()
    unknown.recorder.close()


async def test_a_known_attempt_does_not_hide_the_success_of_a_later_one_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def passes(*_: Any) -> PreflightReport:
        return PreflightReport(checks=[], overall_status=CheckStatus.PASS)

    monkeypatch.setattr(preparation, "run_preflight", passes)
    unknown = Unknown(tmp_path).hosts(LOCAL, LOCAL).exits(0, 0)
    lost = Verdict(RunState.FAILED, Reason.NODE_LOST, "no answer")
    unknown.recorder.append(StateChanged(state=RunState.FINISHING))
    unknown.recorder.append(StateChanged(state=RunState.FAILED, verdict=lost))
    unknown.recorder.append(RunReopened())
    record = await driven(unknown.context, newest_attempt=2, adopting=False)
    assert record.state is RunState.SUCCEEDED
    assert "attempt 2 is not in journal.jsonl" in (record.cause or "")


async def test_an_attempt_on_a_node_that_preflight_has_excluded_since_is_proved_to_be_gone(tmp_path: Path) -> None:
    run = MadeRun(tmp_path).attempt().state("preflight")
    run.append(NodesExcluded(nodes=("node0",), why="it differs", world_size=1))
    run.state("failed", reason="node_lost", unconfirmed=("node0", "node1")).close()
    recorder = RunRecorder(run.directory.journal, run.plan, lambda _record: None)
    fleet = Fleet(tmp_path)
    context = RunContext(run.directory, run.plan, recorder, fleet, tmp_path / "node")
    record = await driven(context, newest_attempt=1, adopting=True)
    assert (record.state, record.unconfirmed) == (RunState.FAILED, [])
    confirmed = [event.node for event in read_journal(run.directory.journal) if isinstance(event, CleanupConfirmed)]
    assert confirmed == ["node0", "node1"]


async def test_a_phase_begins_as_soon_as_the_one_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases, waited = list[Phase](), list[tuple[bool, bool]]()
    wait = LiveRun.await_news

    def watched(state: State, seen: Observation) -> tuple[State, list[Effect]]:
        after, wanted = step(state, seen)
        phases[:] = state.phase, after.phase
        return after, wanted

    async def await_news(live: LiveRun, limit_s: float) -> None:
        waited.append((phases[0] is phases[1], limit_s > 0))
        await wait(live, limit_s)

    monkeypatch.setattr(driver, "step", watched)
    monkeypatch.setattr(LiveRun, "await_news", await_news)
    await driven(Unknown(tmp_path).exits(0, 0).context, newest_attempt=2, adopting=True)
    assert set(waited) == {(False, False), (True, True)}


async def driven(run: RunContext, *, newest_attempt: int, adopting: bool) -> RunRecord:
    """Its record once nothing is left to do."""
    live = LiveRun(run)
    await live.drive(begin(run.whole_plan, run.history, newest_attempt, adopting=adopting))
    await live.close()
    run.recorder.close()
    return run.history.record
