"""A desk: all looks of a node over one program there; each ends by itself, and none outlives who asked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.errors import NodeUnreachable
from engine.launch.bundle import stage_bundle
from engine.preflight.desk import Desk
from engine.transport.local import LocalTransport
from engine.worker.processes import start_time


@pytest.fixture
def bundle(home: Path) -> Path:
    return stage_bundle(home)


@pytest_asyncio.fixture
async def desk(bundle: Path) -> AsyncIterator[Desk]:
    desk = Desk(LocalTransport(), sys.executable, str(bundle))
    yield desk
    await desk.close()


async def test_looks_are_answered_in_whatever_order_they_end_by_one_program(desk: Desk, tmp_path: Path) -> None:
    asked = [desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20) for _ in range(10)]
    asked.append(desk.ask("configuration", [str(tmp_path)], timeout_s=20))
    *own, lacking = await asyncio.gather(*asked)
    assert [json.loads(done.stdout) for done in own] == [{"problems": [None]}] * 10
    assert "config.json" in json.loads(lacking.stdout)["problem"]
    assert {done.code for done in own} == {0}


async def test_a_look_that_breaks_says_how_and_harms_no_other(desk: Desk) -> None:
    broken, no_look, good = await asyncio.gather(
        desk.ask("model", [], timeout_s=20),
        desk.ask("../keeper", [], timeout_s=20),
        desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20),
    )
    assert (broken.code, broken.last_words.startswith("IndexError")) == (1, True)
    assert (no_look.code, no_look.last_words) == (2, "there is no such look")
    assert good.code == 0


async def test_a_look_that_takes_too_long_is_ended_and_the_next_one_answered(desk: Desk, bundle: Path) -> None:
    pid_file = bundle / "pid"
    slow = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (bundle / "worker" / "looks" / "slow.py").write_text(slow)
    assert (await desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20)).code == 0
    assert (await desk.ask("slow", [], timeout_s=3)).code is None
    assert (await desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20)).code == 0
    assert start_time(int(pid_file.read_text())) is None


async def test_closing_leaves_nothing(desk: Desk, bundle: Path) -> None:
    pid_file = bundle / "pid"
    slow = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (bundle / "worker" / "looks" / "slow.py").write_text(slow)
    asking = asyncio.create_task(desk.ask("slow", [], timeout_s=60))
    while not pid_file.exists() or not pid_file.read_text():
        await asyncio.sleep(0.01)
    await desk.close()
    with pytest.raises(NodeUnreachable):
        await asking
    assert start_time(int(pid_file.read_text())) is None


async def test_when_the_program_there_is_killed_all_who_wait_are_told(desk: Desk, bundle: Path) -> None:
    pid_file = bundle / "pid"
    slow = f"import os, time\nopen({str(pid_file)!r}, 'w').write(str(os.getppid()))\ntime.sleep(600)\n"
    (bundle / "worker" / "looks" / "slow.py").write_text(slow)
    asking = asyncio.create_task(desk.ask("slow", [], timeout_s=60))
    while not pid_file.exists() or not pid_file.read_text():
        await asyncio.sleep(0.01)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    with pytest.raises(NodeUnreachable):
        await asyncio.wait_for(asking, 20)
    with pytest.raises(NodeUnreachable):
        await desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20)


async def test_an_interpreter_that_is_not_there_is_told_to_each_who_asks(bundle: Path) -> None:
    desk = Desk(LocalTransport(), "/no/such/python", str(bundle))
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            await desk.ask("addresses", ["own", "127.0.0.1"], timeout_s=20)
    await desk.close()
