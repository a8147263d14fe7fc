"""A recorded session answers as the node did, with its pauses and its failures."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path, PurePosixPath

import pytest

from engine.cluster.transport.base import Transport
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.cluster.transport.replay import RecordedRun, Recorder, Recording, ReplayTransport
from engine.config.models import NodeConfig
from engine.errors import NodeUnreachable
from engine.security.identifiers import SshTarget

ECHO = [sys.executable, "-c", "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read() + b'\\xff'); sys.exit(3)"]
TICKS = ["/bin/sh", "-c", "for n in 1 2 3; do echo $n; sleep 0.1; done"]


async def session(transport: Transport, file: Path) -> list[object]:
    """What one and the same session gives."""
    seen: list[object] = [await transport.run(ECHO, timeout_s=10, stdin=stdin) for stdin in (b"one", b"two")]
    with pytest.raises(FileNotFoundError):
        await transport.read_from(PurePosixPath("/none"), 0, 1)
    seen += [await transport.read_from(file, 0, 4), await transport.read_from(file, 4, 100)]
    channel = await transport.open(TICKS)
    ticks = b""
    while block := await channel.read(100):
        ticks += block
    seen.append(ticks)
    await channel.close()
    return seen


def _slowed(recording: Recording) -> Recording:
    """With pauses that nobody would wait for."""
    pause = {"delay_s": 3600.0}
    runs = [run.model_copy(update=pause) for run in recording.runs]
    channels = [
        channel.model_copy(update={"blocks": [block.model_copy(update=pause) for block in channel.blocks]})
        for channel in recording.channels
    ]
    return recording.model_copy(update={"runs": runs, "channels": channels})


async def test_a_recording_goes_through_json_and_answers_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\x00\xffbytes")
    recorder = Recorder(LocalTransport())
    real = await session(recorder, file)
    recording = Recording.model_validate_json(recorder.recording.model_dump_json())
    began = time.monotonic()
    assert await session(ReplayTransport(_slowed(recording), pace=0), file) == real
    assert time.monotonic() - began < 60
    began = time.monotonic()
    assert await session(ReplayTransport(recording), file) == real
    assert time.monotonic() - began > 0.2


async def test_delays_limits_and_failures() -> None:
    runs = [
        RecordedRun(argv=["slow"], delay_s=60),
        RecordedRun(argv=["ask"], stdout=b"first"),
        RecordedRun(argv=["ask"], stdout=b"then"),
        RecordedRun(argv=["gone"], unreachable="no route to it"),
    ]
    node = ReplayTransport(Recording(target="ana", runs=runs), target=SshTarget("node17"))
    assert (await node.run(["slow"], timeout_s=0.01)).code is None
    assert [(await node.run(["ask"], timeout_s=1)).stdout for _ in range(3)] == [b"first", b"then", b"then"]
    with pytest.raises(NodeUnreachable, match="node17: cannot be reached: no route to it"):
        await node.run(["gone"], timeout_s=1)
    with pytest.raises(NodeUnreachable, match="nothing is recorded"):
        await node.run(["other"], timeout_s=1)


async def test_what_is_put_is_there() -> None:
    node = ReplayTransport(Recording(target="ana"))
    await node.put(PurePosixPath("~/a"), b"x")
    await node.put_tree(PurePosixPath("~/b"), {"c/d": b"y"})
    assert await node.read_from(PurePosixPath("~/b/c/d"), 0, 9) == b"y"
    with pytest.raises(FileExistsError):
        await node.put_tree(PurePosixPath("~/b"), {})


async def test_a_channel_held_open_ends_when_it_is_closed() -> None:
    recording = Recording.model_validate(
        {"target": "ana", "channels": [{"argv": ["watch"], "blocks": [{"data": "x"}]}]}
    )
    channel = await ReplayTransport(recording).open(["watch"])
    assert await channel.read(9) == b"x"
    reading = asyncio.create_task(channel.read(9))
    await asyncio.sleep(0)
    await channel.close()
    assert await reading == b""


async def test_a_fleet_of_recordings(tmp_path: Path) -> None:
    nodes = [NodeConfig(name=f"n{number}", ssh=f"n{number}", python="python3", workdir="~") for number in range(64)]
    recording = Recording(target="ana", runs=[RecordedRun(argv=["pwd"], stdout=b"/home\n")])
    async with Fleet(nodes, tmp_path) as fleet:
        for node in nodes:
            fleet.answer(node.ssh, ReplayTransport(recording, target=SshTarget.parse(node.ssh)))
        done = await asyncio.gather(*(fleet.to(node).run(["pwd"], timeout_s=1) for node in nodes))
    assert {one.stdout for one in done} == {b"/home\n"}
