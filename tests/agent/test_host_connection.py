"""The connection to a host's agent, and the files that it sends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from engine.cluster import host_connection
from engine.cluster.host_connection import WINDOW_BYTES, AgentFile, AttemptOnHost, HostConnection, LocalFile
from engine.cluster.transport.base import Channel
from engine.cluster.transport.local import LocalTransport
from engine.config.models import NodeConfig
from engine.errors import NodeUnreachable
from engine.node.attempt_watch import MAX_UNANSWERED_HEARTBEATS
from engine.node.processes import Process
from engine.protocol.attempt import END, STOP, ExitRecord, Identity, NodeFiles
from engine.protocol.events import ExitOutput
from engine.protocol.messages import (
    ExitOutputReply,
    FileData,
    Heartbeat,
    Hello,
    ListProcesses,
    Message,
    ProcessList,
    RankEnded,
    RankStarted,
    ReadFile,
    Watching,
    encode,
)
from engine.run.logs.mirror import Gap, Mirror
from engine.store.layout import RunDir
from tests.agent.keeper_runner import RunningKeeper, start_keeper
from tests.unit.cluster.fake_agent import FakeChannel, hello
from tests.waiting import until


def test_what_comes_twice_is_taken_once_and_what_is_behind_it_is_not_lost() -> None:
    orders: list[tuple[int | None, int]] = []
    file = AgentFile("rank0.log", lambda order: orders.append((order.begin, order.until)))
    assert file.read_from(0, 100) == b""
    assert orders == [(0, WINDOW_BYTES)]
    file.take(0, b"one two", end=True)
    # The order was given twice, at a reconnect: the agent began again, and the file had grown by then.
    file.take(0, b"one two three", end=True)
    assert file.read_from(0, 100) == b"one two three"
    file.take(20, b"not next", end=True)
    file.take(2, b"e two", end=True)
    assert file.read_from(0, 100) == b"one two three"


def test_the_size_of_a_file_that_cannot_be_looked_at_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("one")
    sizes = [LocalFile(tmp_path / name).size() for name in ("log", "none", "log/below")]
    assert sizes == [3, 0, None]


WORK = "import time\nfor n in range(100000): print('line', n, flush=True); time.sleep(0.002)"


THERE = NodeConfig(name="there", ssh="there", python=sys.executable, workdir="/")
Kind = TypeVar("Kind")


class Road(LocalTransport):
    """The way to this machine, which can be closed."""

    closed = False
    opened = 0
    faults = 0
    """As many more openings end in what nobody has thought of."""

    async def open(self, argv: Sequence[str]) -> Channel:
        if self.closed:
            raise NodeUnreachable("no route", where="there")
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault of ours")
        self.opened += 1
        return await super().open(argv)


class LocalHost:
    """A kept rank and the link to its host."""

    def __init__(self, directory: Path, source: str) -> None:
        self.kept: RunningKeeper = start_keeper(
            directory, [sys.executable, "-u", "-c", source], spec_fields={"lease_s": 60.0}
        )
        self.road = Road()
        self.link = HostConnection(THERE, self.road, AttemptOnHost(self.kept.files, self.kept.nonce, {0: "there"}))

    async def agent(self) -> int:
        """The pid of the agent that runs now."""
        children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
        for _ in range(2000):
            for pid in map(int, children.read_text().split()):
                with contextlib.suppress(OSError):
                    if b"engine.node.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return pid
            await asyncio.sleep(0.005)
        raise AssertionError("no agent")


@pytest_asyncio.fixture
async def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalHost]:
    monkeypatch.setattr(host_connection, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(host_connection, "LAST_RETRY_S", 0.2)
    host = LocalHost(tmp_path, WORK)
    host.link.start()
    yield host
    await host.link.close()
    if host.kept.process.poll() is None:
        os.kill(host.kept.process.pid, signal.SIGKILL)
        host.kept.process.wait()
    host.kept.nothing_left()


async def test_it_sees_a_rank_start_and_end_with_its_exit_output(host: LocalHost) -> None:
    assert not host.link.state.answered
    await until(lambda: host.link.observe(0).identity is not None)
    assert host.link.state.answering and host.link.facts is not None
    assert abs(host.link.facts.clock_ahead_s) < 10
    await until(lambda: b"line" in host.kept.output())
    host.link.send_command(0, STOP)
    await until(lambda: host.link.observe(0).record is not None)
    record = host.link.observe(0).record
    assert record is not None and record.stopped_by == "stop"
    assert host.link.exit_output(0).log.startswith("line") or "line" in host.link.exit_output(0).log
    host.link.request_processes(kill=True)
    await until(lambda: host.link.processes() is not None)


@pytest.mark.needs("linux")
async def test_no_byte_is_lost_or_doubled_though_its_agents_are_killed(host: LocalHost, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    gaps: list[Gap] = []
    mirror = Mirror(run_dir, gaps.append)
    mirror.follow(0, host.link.file("rank0.log"), 0)

    def copied() -> int:
        mirror.pump()
        return run_dir.log(0).stat().st_size if run_dir.log(0).exists() else 0

    for _ in range(3):
        before = copied()
        await until(lambda before=before: copied() > before)  # type: ignore[misc]
        os.kill(await host.agent(), signal.SIGKILL)
    host.link.send_command(0, END)
    await until(lambda: host.link.observe(0).record is not None)
    host.kept.process.wait(20)
    host.link.request_processes(kill=True)
    await until(lambda: host.link.processes() == [])
    await until(lambda: not mirror.missing() or mirror.pump() < 0)
    assert mirror.settle() == {} and gaps == []
    assert run_dir.log(0).read_bytes() == host.kept.output()
    assert host.road.opened >= 3


async def test_a_command_that_reached_nobody_is_sent_when_the_host_is_back(host: LocalHost) -> None:
    await until(lambda: host.link.observe(0).identity is not None)
    host.road.closed = True
    os.kill(await host.agent(), signal.SIGKILL)
    await until(lambda: host.link.state.problem is not None)
    host.link.send_command(0, END)
    # Without killing: the keeper is to have the time to write its record.
    host.link.request_processes(kill=False)
    assert host.link.processes() is None
    await until(lambda: "no route" in str(host.link.state.problem))
    host.road.closed = False
    await until(lambda: host.link.observe(0).record is not None)
    await until(lambda: host.link.processes() is not None)


async def test_an_agent_that_cannot_start_is_why_a_host_is_not_connected(tmp_path: Path) -> None:
    host = LocalHost(tmp_path, "print('done')")
    host.kept.process.wait(20)
    node = THERE.model_copy(update={"python": "/bin/false"})
    link = HostConnection(node, host.road, AttemptOnHost(host.kept.files, host.kept.nonce, {0: "there"}))
    link.start()
    await until(lambda: link.state.problem is not None)
    assert not link.state.answered
    await link.close()


async def test_a_fault_of_ours_does_not_end_the_heartbeats(host: LocalHost) -> None:
    await until(lambda: host.link.state.answered)
    host.road.faults = 2
    os.kill(await host.agent(), signal.SIGKILL)
    await until(lambda: "a fault of ours" in str(host.link.state.problem))
    await until(lambda: host.link.state.problem is None)


@pytest.mark.needs("linux")
async def test_the_power_of_a_host_with_a_sensor_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connection, "_POWER_EVERY_S", 0.05)
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nwhile echo '0, 10, 900, 250, 40, 1000, 81559'; do sleep 0.05; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    link = HostConnection(THERE, LocalTransport(), AttemptOnHost(NodeFiles(tmp_path), "nonce", {0: "there"}))
    link.start()
    measured: list[tuple[float, float]] = []

    def is_measured() -> bool:
        measured.append(link.power.take())
        return sum(seconds for _, seconds in measured) > 0.2

    await until(is_measured)
    await link.close()
    assert all(joules == pytest.approx(250 * seconds) for joules, seconds in measured)
    assert link.power.samples[-1]["gpu_power_w"] == 250


class LineTransport(LocalTransport):
    """The way to a connection whose other end is the test."""

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []
        self.greeting = STARTED + encode(hello()) + encode(Watching())

    async def open(self, argv: Sequence[str]) -> Channel:
        self.channels.append(FakeChannel(lambda request: [], self.greeting, acknowledges=False))
        return self.channels[-1]


class Line:
    """The newest connection, and all that was received over any."""

    def __init__(self) -> None:
        self.transport = LineTransport()

    @property
    def received(self) -> list[Message]:
        return [message for channel in self.transport.channels for message in channel.received]

    def send(self, message: Message) -> None:
        self.transport.channels[-1].send(message)

    def of(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.received if isinstance(message, kind)]


STARTED = b'{"kind": "bootstrap", "home": "/home/ana", "missing": false}\n'


@pytest_asyncio.fixture
async def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Line, HostConnection]]:
    monkeypatch.setattr(host_connection, "HEARTBEAT_INTERVAL_S", 0.01)
    line = Line()
    link = HostConnection(THERE, line.transport, AttemptOnHost(NodeFiles(tmp_path), "nonce", {0: "there"}))
    link.start()
    await until(lambda: link.state.answered)
    yield line, link
    await link.close()


IDENTITY = Identity(0, "run", 1, "nonce", "boot", 10, "1", 11, 11, "2", 1000.0)


async def test_a_rank_whose_keeper_is_gone_without_a_record_has_vanished(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    agent.send(RankStarted(0, IDENTITY))
    await until(lambda: link.observe(0).identity == IDENTITY)
    assert not link.observe(0).vanished
    agent.send(RankEnded(0, None, 0, ExitOutput("its last line")))
    await until(lambda: link.observe(0).vanished)
    assert (link.observe(0).record, link.observe(0).restarted) == (None, False)
    assert link.exit_output(0).log == "its last line"


async def test_a_restart_of_the_host_is_known_from_its_boot_id(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    agent.send(RankStarted(0, IDENTITY))
    await until(lambda: link.observe(0).identity == IDENTITY)
    agent.send(Hello("another boot", 0, time.time()))
    await until(lambda: link.observe(0).restarted)
    assert not link.observe(0).vanished, "it may have ended, and left its record, before"


async def test_a_restart_of_the_host_is_known_of_a_rank_that_is_only_then_reported(
    line: tuple[Line, HostConnection],
) -> None:
    agent, link = line
    agent.send(Hello("another boot", 0, time.time()))
    agent.send(RankStarted(0, IDENTITY))
    await until(lambda: link.observe(0).restarted)


async def test_before_an_agent_has_reported_its_ranks_it_has_not_answered(
    line: tuple[Line, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has not been reported yet has not failed to start."""
    agent, link = line
    silent = STARTED + encode(hello())
    monkeypatch.setattr(agent.transport, "greeting", silent)
    agent.transport.channels[-1].end()
    await until(lambda: len(agent.transport.channels) == 2)
    await until(lambda: len(agent.transport.channels[-1].received) > 1 and link.state.silent_s > 0.2)
    agent.send(Watching())
    await until(lambda: link.state.silent_s < 0.2)


async def test_a_silence_at_which_nobody_looked_is_known_afterwards(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    session = link._agent.session
    assert session is not None and link.state.longest_silence_s < 50.0
    link._agent._answered_at -= 50.0
    session.heartbeats.received_at -= 50.0
    agent.send(Watching())
    await until(lambda: link.state.silent_s < 50.0)
    assert link.state.longest_silence_s >= 50.0


async def test_a_flood_that_holds_up_the_acknowledgements_is_an_answer(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    log = link.file("rank0.log")
    await until(lambda: len(agent.of(Heartbeat)) > MAX_UNANSWERED_HEARTBEATS)
    agent.send(FileData("rank0.log", 0, False, b"x" * 1000))
    assert log.read_from(0, 10) == b""
    before = len(agent.of(Heartbeat))
    await until(lambda: any(each.answered > MAX_UNANSWERED_HEARTBEATS for each in agent.of(Heartbeat)[before:]))
    assert link.state.answering


async def test_an_answer_that_comes_after_the_request_was_repeated_is_taken(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    link.request_processes(kill=True)
    link.request_processes(kill=True)
    await until(lambda: len(agent.of(ListProcesses)) == 2)
    first = agent.of(ListProcesses)[0].number
    agent.send(ProcessList(first, [], {}))
    await until(lambda: link.processes() == [])
    link.request_processes(kill=True)
    agent.send(ProcessList(first, [], {}))
    agent.send(ProcessList(first + 1, [(7, "late")], {}))
    await until(lambda: link.processes() is not None)
    assert link.processes() == [Process(7, "late")], "an answer to an earlier request is none to a new one"


async def test_after_a_break_the_files_are_requested_before_the_open_request(
    line: tuple[Line, HostConnection],
) -> None:
    agent, link = line
    log = link.file("rank0.log")
    assert log.read_from(0, 10) == b""
    link.request_processes(kill=False)
    await until(lambda: agent.of(ListProcesses) and agent.of(ReadFile))
    before = len(agent.received)
    agent.transport.channels[-1].end()
    await until(lambda: ListProcesses in [type(message) for message in agent.received[before:]])
    kinds = [type(message) for message in agent.received[before:]]
    assert kinds.index(ReadFile) < kinds.index(ListProcesses), "with its answer the agent reports the files' sizes"


async def test_what_an_agent_sends_unasked_ends_its_connection_and_nothing_else(
    line: tuple[Line, HostConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of a file than the head has room for, and ranks that it does not have: each would fill the memory."""
    agent, link = line
    log = link.file("rank0.log")
    assert log.read_from(0, 10) == b""
    half = b"x" * (WINDOW_BYTES // 2)
    hostile: list[list[Message]] = [
        [FileData("rank0.log", number * len(half), False, half) for number in range(3)],
        [RankEnded(7, None, 0, ExitOutput("x"))],
        [ExitOutputReply(-1, ExitOutput("x"))],
    ]
    for messages in hostile:
        count = len(agent.transport.channels)
        for message in messages:
            agent.send(message)
        await until(lambda: len(agent.transport.channels) > count and link.state.answered)  # noqa: B023
    assert len(log.read_from(0, 10 * WINDOW_BYTES)) == WINDOW_BYTES
    assert link.exit_output(7) == ExitOutput()


async def test_an_exit_record_is_bounded_and_safe_to_show(line: tuple[Line, HostConnection]) -> None:
    agent, link = line
    record = ExitRecord(0, 1, None, None, 1.5, 0, stopped_by="\x1b[2J", error="no\nsuch " + "x" * 3_000_000)
    agent.send(RankEnded(0, record, 0, ExitOutput()))
    await until(lambda: link.observe(0).record is not None)
    found = link.observe(0).record
    assert found is not None and found.error is not None
    assert (len(found.error) <= 500, found.error.startswith("no such x"), found.stopped_by) == (True, True, "")
