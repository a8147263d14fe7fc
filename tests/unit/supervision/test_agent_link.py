"""A link to a host, over real agents of this machine: what it sees through connections that break again and again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path, PurePath

import pytest
import pytest_asyncio

from engine.errors import NodeUnreachable
from engine.launch.place import Place
from engine.runs.layout import RunDir
from engine.runs.mirror import Gap, Mirror
from engine.supervision.links import agent_link
from engine.supervision.links.agent_link import AgentLink
from engine.transport.base import Channel
from engine.transport.local import LocalTransport
from engine.worker.agent import UNHEARD_BEATS
from engine.worker.frames import VERSION, Decoder, Message, encode
from engine.worker.processes import Process
from engine.worker.wire import END, STOP, NodeFiles
from tests.unit.worker.kept import Kept, keep

WORK = "import time\nfor n in range(100000): print('line', n, flush=True); time.sleep(0.002)"


class Road(LocalTransport):
    """The way to this machine, which can be closed."""

    closed = False
    opened = 0
    faults = 0
    """As many more openings end in what nobody has thought of."""

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        if self.closed:
            raise NodeUnreachable("no route", where="there")
        if self.faults:
            self.faults -= 1
            raise RuntimeError("a fault of ours")
        self.opened += 1
        return await super().open(argv, directory=directory)


class Host:
    """A kept rank and the link to its host."""

    def __init__(self, directory: Path, source: str) -> None:
        self.kept: Kept = keep(directory, [sys.executable, "-u", "-c", source], spec_fields={"lease_s": 60.0})
        bundle = str(directory / "bundle")
        place = Place("there", (0,), str(directory), str(directory / "node"), bundle, sys.executable)
        self.road = Road()
        self.link = AgentLink(place, self.kept.files, self.kept.nonce, self.road, names=["there"])

    async def agent(self) -> int:
        """The pid of the agent that runs now."""
        mine = f"--attempt\0{self.kept.files.directory}".encode()
        for _ in range(2000):
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit() and mine in (entry / "cmdline").read_bytes():
                        return int(entry.name)
                except OSError:
                    continue
            await asyncio.sleep(0.005)
        raise AssertionError("no agent")


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest_asyncio.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path, WORK)
    host.link.start()
    yield host
    await host.link.close()
    if host.kept.process.poll() is None:
        os.kill(host.kept.process.pid, signal.SIGKILL)
        host.kept.process.wait()
    host.kept.nothing_left()


async def test_it_sees_a_rank_start_and_end_with_its_last_words(host: Host) -> None:
    assert not host.link.state.heard
    await until(lambda: host.link.sight(0, thorough=True).identity is not None)
    assert host.link.state.answering and host.link.facts is not None
    assert abs(host.link.facts.clock_ahead_s) < 0.5
    await until(lambda: b"line" in host.kept.output())
    host.link.tell(0, STOP)
    await until(lambda: host.link.sight(0, thorough=True).record is not None)
    record = host.link.sight(0, thorough=True).record
    assert record is not None and record.stopped_by == "stop"
    assert host.link.words(0).log.startswith("line") or "line" in host.link.words(0).log
    host.link.ask_left(kill=True)
    await until(lambda: host.link.left() is not None)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the agent in /proc")
async def test_no_byte_is_lost_or_doubled_though_its_agents_are_killed(host: Host, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.path.mkdir()
    gaps: list[Gap] = []
    mirror = Mirror(run_dir, gaps.append)
    mirror.follow(0, 1, host.link.file("rank0.log"), 0)

    def copied() -> int:
        mirror.pump()
        return run_dir.log(0).stat().st_size if run_dir.log(0).exists() else 0

    for _ in range(3):
        before = copied()
        await until(lambda before=before: copied() > before)  # type: ignore[misc]
        os.kill(await host.agent(), signal.SIGKILL)
    host.link.tell(0, END)
    await until(lambda: host.link.sight(0, thorough=True).record is not None)
    host.kept.process.wait(20)
    host.link.ask_left(kill=True)
    await until(lambda: host.link.left() == [])
    await until(lambda: not mirror.behind() or mirror.pump() < 0)
    assert mirror.finish() and gaps == []
    assert run_dir.log(0).read_bytes() == host.kept.output()
    assert host.road.opened >= 3


async def test_a_word_that_nobody_could_hear_is_said_when_the_host_is_back(host: Host) -> None:
    await until(lambda: host.link.sight(0, thorough=True).identity is not None)
    host.road.closed = True
    os.kill(await host.agent(), signal.SIGKILL)
    await until(lambda: not host.link.state.connected and host.link.state.problem is not None)
    host.link.tell(0, END)
    # Without killing: the keeper is to have the time to write its record.
    host.link.ask_left(kill=False)
    assert host.link.left() is None
    await until(lambda: "no route" in str(host.link.state.problem))
    host.road.closed = False
    await until(lambda: host.link.sight(0, thorough=True).record is not None)
    await until(lambda: host.link.left() is not None)


async def test_an_agent_that_cannot_start_is_why_a_host_is_not_connected(tmp_path: Path) -> None:
    host = Host(tmp_path, "print('done')")
    host.kept.process.wait(20)
    place = Place("there", (0,), "/", "/", str(tmp_path / "bundle"), "/bin/false")
    link = AgentLink(place, host.kept.files, host.kept.nonce, host.road, names=["there"])
    link.start()
    await until(lambda: link.state.problem is not None)
    assert not link.state.heard
    await link.close()


async def test_a_fault_of_ours_does_not_end_the_beats(host: Host) -> None:
    await until(lambda: host.link.state.heard)
    host.road.faults = 2
    os.kill(await host.agent(), signal.SIGKILL)
    await until(lambda: "a fault of ours" in str(host.link.state.problem))
    await until(lambda: host.link.state.connected and host.link.state.problem is None)


class Line(Channel):
    """A connection whose other end is the test."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[bytes] = asyncio.Queue()
        self.decoder = Decoder()
        self.heard: list[Message] = []

    async def write(self, data: bytes) -> None:
        self.heard += [message for message, _ in self.decoder.feed(data)]

    async def read(self, size: int) -> bytes:
        return await self.said.get()

    async def close(self) -> int | None:
        return None

    @property
    def last_words(self) -> str:
        return ""

    def say(self, message: Message, body: bytes = b"") -> None:
        self.said.put_nowait(encode(message, body))

    def of(self, kind: str) -> list[Message]:
        return [message for message in self.heard if message["kind"] == kind]


class LineRoad(LocalTransport):
    """The way to it."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        return self.line


@pytest_asyncio.fixture
async def line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Line, AgentLink]]:
    monkeypatch.setattr(agent_link, "BEAT_EVERY_S", 0.01)
    line = Line()
    place = Place("there", (0,), "/", "/", "/", "/python")
    link = AgentLink(place, NodeFiles(tmp_path), "nonce", LineRoad(line), names=["there"])
    link.start()
    line.say({"kind": "hello", "version": VERSION, "boot_id": "b", "memory_kills": 0, "at": time.time()})
    await until(lambda: link.state.heard)
    yield line, link
    await link.close()


async def test_a_flood_that_holds_up_the_pongs_is_an_answer(line: tuple[Line, AgentLink]) -> None:
    agent, link = line
    log = link.file("rank0.log")
    await until(lambda: len(agent.of("beat")) > UNHEARD_BEATS)
    agent.say({"kind": "data", "file": "rank0.log", "from": 0, "end": False}, b"x" * 1000)
    assert log.read_from(0, 10) == b""
    before = len(agent.of("beat"))
    await until(lambda: any(beat["heard"] > UNHEARD_BEATS for beat in agent.of("beat")[before:]))
    assert link.state.answering


async def test_an_answer_that_comes_after_it_was_asked_again_is_taken(line: tuple[Line, AgentLink]) -> None:
    agent, link = line
    link.ask_left(kill=True)
    link.ask_left(kill=True)
    await until(lambda: len(agent.of("list")) == 2)
    first = agent.of("list")[0]
    agent.say({"kind": "listed", "n": first["n"], "left": [], "sizes": {}})
    await until(lambda: link.left() == [])
    link.ask_left(kill=True)
    agent.say({"kind": "listed", "n": first["n"], "left": [], "sizes": {}})
    agent.say({"kind": "listed", "n": first["n"] + 1, "left": [[7, "late"]], "sizes": {}})
    await until(lambda: link.left() is not None)
    assert link.left() == [Process(7, "late")], "an answer to an earlier question is none to a new one"


async def test_after_a_break_the_files_are_asked_for_before_the_standing_question(line: tuple[Line, AgentLink]) -> None:
    agent, link = line
    log = link.file("rank0.log")
    assert log.read_from(0, 10) == b""
    link.ask_left(kill=False)
    await until(lambda: agent.of("list") and agent.of("send"))
    before = len(agent.heard)
    agent.say({"kind": "bye"})
    agent.said.put_nowait(b"")
    agent.say({"kind": "hello", "version": VERSION, "boot_id": "b", "memory_kills": 0, "at": time.time()})
    await until(lambda: "list" in [message["kind"] for message in agent.heard[before:]])
    kinds = [message["kind"] for message in agent.heard[before:]]
    assert kinds.index("send") < kinds.index("list"), "with its answer the agent says how long the files are"
