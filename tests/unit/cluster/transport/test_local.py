"""This machine as a node: commands end within their limit with all their children, files are read and put whole."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.cluster.transport import local as local_transport
from engine.cluster.transport.base import Transport
from engine.cluster.transport.local import LocalTransport
from engine.node.processes import with_nonce
from tests.machine import WATCHED


@pytest.fixture
def local() -> Transport:
    return LocalTransport()


async def gone(nonce: str) -> None:
    """Returns when no process of that nonce is left: a killed one takes a moment to go."""
    async with asyncio.timeout(10):
        while with_nonce(nonce):
            await asyncio.sleep(0.01)


async def test_both_streams_and_the_code_come_back_and_nothing_goes_through_a_shell(local: Transport) -> None:
    program = "import sys; print(sys.argv[1]); print('err', file=sys.stderr); sys.exit(3)"
    done = await local.run([sys.executable, "-c", program, "$(id); *"], timeout_s=30)
    assert (done.code, done.stdout, done.stderr) == (3, b"$(id); *\n", b"err\n")
    assert done.exit_output == "err"


async def test_a_program_that_is_not_there_is_an_oserror(local: Transport) -> None:
    with pytest.raises(FileNotFoundError):
        await local.run(["/nonexistent/python"], timeout_s=5)


async def test_the_time_limit_ends_the_program_and_its_children(local: Transport, nonce: str) -> None:
    argv = ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "/bin/sh", "-c", "sleep 600 & sleep 600", WATCHED]
    began = time.monotonic()
    done = await local.run(argv, timeout_s=0.3)
    assert done.code is None
    assert time.monotonic() - began < 10
    await gone(nonce)


async def test_a_cancelled_call_ends_the_program_too(local: Transport, nonce: str) -> None:
    argv = ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "/bin/sh", "-c", "sleep 600; true", WATCHED]
    running = asyncio.create_task(local.run(argv, timeout_s=600))
    while not with_nonce(nonce):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await gone(nonce)


async def test_a_call_cancelled_at_any_moment_of_its_start_leaves_nothing(
    local: Transport, nonce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where nobody reaps a program's orphans, its end takes as long as these two.
    monkeypatch.setattr(local_transport, "_TERM_GRACE_S", 0.02)
    monkeypatch.setattr(local_transport, "_KILL_WAIT_S", 0.03)
    argv = ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "/bin/sh", "-c", "sleep 600; true", WATCHED]
    for turns in range(25):
        running = asyncio.create_task(local.run(argv, timeout_s=600))
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    await gone(nonce)


async def test_a_channel_whose_closing_is_given_up_leaves_no_program(local: Transport, nonce: str) -> None:
    # It hears neither the end of its input nor a polite word.
    channel = await local.open(
        ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "sh", "-c", "echo up; exec sleep 1000", WATCHED]
    )
    assert await channel.read(100) == b"up\n"
    closing = asyncio.create_task(channel.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not with_nonce(nonce)
    assert channel.exit_output == ""


class LateLeaver:
    """A program that asyncio sees leave only when it is let go, though it is killed before: what it has started in a
    session of its own keeps its output open."""

    def __init__(self, fifo: Path, nonce: str) -> None:
        os.mkfifo(fifo)
        self._nonce = nonce
        self._fifo = os.open(fifo, os.O_RDWR)
        script = f"setsid sh -c 'echo up; read _ <{fifo}' & exec sleep 1000"
        self.argv = ["/usr/bin/env", f"FLIGHTDECK_NONCE={nonce}", "sh", "-c", script, WATCHED]

    async def both_run(self) -> None:
        async with asyncio.timeout(20):
            while not {"sleep", "sh -c echo"} <= self._running():
                await asyncio.sleep(0.01)

    async def is_killed(self) -> None:
        """Returns when it is, and what it has started runs."""
        async with asyncio.timeout(20):
            while self._running() != {"sh -c echo"}:
                await asyncio.sleep(0.01)

    def let_go(self) -> None:
        os.write(self._fifo, b"\n")

    def close(self) -> None:
        """The end of its input lets it go, too."""
        os.close(self._fifo)

    def _running(self) -> set[str]:
        commands = [process.command for process in with_nonce(self._nonce)]
        return {name for name in ("sleep", "sh -c echo") if any(command.startswith(name) for command in commands)}


@pytest.fixture
def late(tmp_path: Path, nonce: str) -> Iterator[LateLeaver]:
    late = LateLeaver(tmp_path / "fifo", nonce)
    yield late
    late.close()


async def some_turns() -> None:
    """Enough for whatever a cancellation ends."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_closing_that_is_given_up_ends_when_the_killed_program_has_left(
    local: Transport, nonce: str, late: LateLeaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.local._LEAVES_S", 0.1)
    channel = await local.open(late.argv)
    assert await channel.read(100) == b"up\n"
    await late.both_run()
    closing = asyncio.create_task(channel.close())
    await late.is_killed()
    closing.cancel()
    await some_turns()
    assert not closing.done()
    late.let_go()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not with_nonce(nonce)
    assert await channel.close() == -9


async def test_a_command_that_is_cancelled_twice_is_killed_and_waits_for_no_child_of_another_session(
    local: Transport, late: LateLeaver
) -> None:
    running = asyncio.create_task(local.run(late.argv, timeout_s=600))
    await late.both_run()
    for _ in range(2):
        running.cancel()
        await some_turns()
    with pytest.raises(asyncio.CancelledError):
        await running
    await late.is_killed()


async def test_a_killed_program_that_does_not_leave_is_not_waited_for_without_end(
    local: Transport, nonce: str, late: LateLeaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = await local.open(late.argv)
    assert await channel.read(100) == b"up\n"
    with monkeypatch.context() as soon:
        soon.setattr("engine.cluster.transport.local._REAP_LIMIT_S", 0.2)
        closing = asyncio.create_task(channel.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing}, timeout=20)
    ended, left = closing.done(), with_nonce(nonce)
    # Before any assertion: otherwise a closing that still waits would never end.
    late.let_go()
    assert ended and closing.cancelled() and left
    assert await channel.close() == -9


class Leaving:
    """A process that ends when `left` is set."""

    pid, returncode = 2**22 + 5, 0
    stdin = SimpleNamespace(close=lambda: None)

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.stdout = cast(Any, SimpleNamespace(read=self.read))

    async def read(self, size: int) -> bytes:
        await self.left.wait()
        return b""

    async def wait(self) -> None:
        await self.left.wait()


@pytest.mark.parametrize("call", ["run", "close"])
async def test_a_cancellation_in_the_moment_of_the_end_is_not_lost(
    local: Transport, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.local.kill_group", lambda group, number: True)
    for turns in range(20):
        process = Leaving()

        async def start(*arguments: object, process: Leaving = process, **options: object) -> Leaving:
            return process

        monkeypatch.setattr("engine.cluster.transport.local._start", start)
        channel = await local.open(["true"])
        running = asyncio.create_task(local.run(["true"], timeout_s=60) if call == "run" else channel.close())
        for _ in range(5):
            await asyncio.sleep(0)
        process.left.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        if running.cancel():
            with pytest.raises(asyncio.CancelledError):
                await running
        await channel.close()
    assert running.done() and not running.cancelled(), "the last one came too late"


async def test_a_command_has_no_input() -> None:
    assert (await LocalTransport().run(["cat"], timeout_s=20)).code == 0
