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
from engine.supervision.links.agent_link import AgentLink
from engine.transport.base import Channel
from engine.transport.local import LocalTransport
from engine.worker.wire import END, STOP
from tests.unit.worker.kept import Kept, keep

WORK = "import time\nfor n in range(100000): print('line', n, flush=True); time.sleep(0.002)"


class Road(LocalTransport):
    """The way to this machine, which can be closed."""

    closed = False
    opened = 0

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        if self.closed:
            raise NodeUnreachable("no route", where="there")
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

    for _ in range(5):
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
    assert host.road.opened >= 5


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
