"""Programs that are left running on a node, with their stdin and stdout in our hands."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import time
import uuid

import pytest

from engine.cluster.transport.base import Channel, Transport
from engine.cluster.transport.local import LocalTransport
from engine.errors import NodeUnreachable
from tests.ssh.bench import SshBench, Sshd, marked
from tests.waiting import until

MEGABYTES = 24
STREAM = [sys.executable, "-c", f"import sys\nfor n in range({MEGABYTES}): sys.stdout.buffer.write(bytes([n]) * 2**20)"]


@pytest.fixture
def sshd(bench: SshBench) -> Sshd:
    return bench.sshd()


@pytest.fixture(params=["ssh", "local"])
def transport(request: pytest.FixtureRequest, bench: SshBench, sshd: Sshd) -> Transport:
    return bench.to(sshd) if request.param == "ssh" else LocalTransport()


async def read_all(channel: Channel, limit: int = 1 << 62) -> bytes:
    data = b""
    while len(data) < limit and (block := await channel.read(min(1 << 16, limit - len(data)))):
        data += block
    return data


async def test_what_is_written_is_read_and_the_exit_output_is_kept(transport: Transport) -> None:
    channel = await transport.open(["/bin/sh", "-c", "echo warning >&2; cat; echo 'the end' >&2; exit 4"])
    sent = os.urandom(300_000)
    await channel.write(sent[:10])
    assert await read_all(channel, 10) == sent[:10]
    writing = asyncio.create_task(channel.write(sent[10:]))
    assert await read_all(channel, len(sent) - 10) == sent[10:]
    await writing
    assert await channel.close() == 4
    assert channel.exit_output == "the end"
    assert await channel.close() == 4


async def test_a_big_stream_arrives_as_it_is_at_the_readers_pace(transport: Transport) -> None:
    channel = await transport.open(STREAM)
    digest, size = hashlib.sha256(), 0
    while block := await channel.read(1 << 18):
        digest.update(block)
        size += len(block)
    expected = hashlib.sha256(b"".join(bytes([n]) * (1 << 20) for n in range(MEGABYTES)))
    assert size == MEGABYTES << 20
    assert digest.hexdigest() == expected.hexdigest()
    assert await channel.close() == 0


@pytest.mark.usefixtures("killed_soon")
async def test_a_reader_that_stops_reading_stops_the_program(bench: SshBench, sshd: Sshd) -> None:
    script = (
        "import sys\nfor n in range(10**9): print(n, 'x' * 60_000, flush=True); print(n, file=sys.stderr, flush=True)"
    )
    channel = await bench.to(sshd).open([sys.executable, "-c", script])
    await channel.read(1)
    await until(lambda: channel.exit_output)
    before = ""
    async with asyncio.timeout(10):
        while before != channel.exit_output:
            before = channel.exit_output
            await asyncio.sleep(0.2)
    assert int(before) * 60_000 < 16_000_000
    await channel.close()


@pytest.mark.usefixtures("killed_soon")
async def test_a_writer_waits_for_a_program_that_does_not_read(bench: SshBench, sshd: Sshd) -> None:
    channel = await bench.to(sshd).open(["sleep", "600"])

    async def flood() -> None:
        for _ in range(64):
            await channel.write(bytes(1 << 20))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(flood(), 0.5)
    assert await channel.close() == -9


@pytest.mark.usefixtures("killed_soon")
async def test_a_program_that_does_not_leave_is_ended_with_its_children(bench: SshBench, sshd: Sshd) -> None:
    nonce = uuid.uuid4().hex
    script = "trap '' HUP TERM; sleep 600 & while :; do sleep 600; done"
    channel = await bench.to(sshd).open(marked(nonce, script))
    await until(lambda: len(sshd.processes(FLIGHTDECK_NONCE=nonce)) == 3)
    assert await channel.close() == -9
    assert sshd.processes(FLIGHTDECK_NONCE=nonce) == []


async def test_a_program_that_says_much_and_is_not_heard_is_closed_at_once(bench: SshBench, sshd: Sshd) -> None:
    channel = await bench.to(sshd).open(["/bin/sh", "-c", "head -c 30000000 /dev/zero; exit 5"])
    assert await channel.close() == 5


async def test_a_program_that_has_left_is_told_to_who_writes(transport: Transport) -> None:
    channel = await transport.open(["/bin/sh", "-c", "echo gone >&2; exit 3"])
    assert await read_all(channel) == b""
    with pytest.raises(NodeUnreachable) as raised:
        async with asyncio.timeout(10):
            while True:
                await channel.write(b"hello?")
                await asyncio.sleep(0.01)
    assert "the program has left" in str(raised.value)
    assert "gone" in str(raised.value)
    assert await channel.close() == 3


async def test_a_lost_connection_is_told_at_once_to_who_reads_and_writes(
    bench: SshBench, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.cluster.transport.ssh_config.KEEPALIVE_S", 60)
    transport = bench.to(sshd)
    reading, writing = await transport.open(["sleep", "600"]), await transport.open(["sleep", "600"])
    began = time.monotonic()
    waiting = asyncio.create_task(reading.read(1))
    await asyncio.sleep(0)
    sshd.drop_connections()
    with pytest.raises(NodeUnreachable) as raised:
        await waiting
    assert "connection lost" in str(raised.value)
    with pytest.raises(NodeUnreachable):
        async with asyncio.timeout(60):
            while True:
                await writing.write(b"x")
                await asyncio.sleep(0.01)
    assert time.monotonic() - began < 60, "the keepalive would have needed 180 s"
    assert await reading.close() is None
    assert await writing.close() is None
    again = await transport.open(["cat"])
    await again.write(b"x")
    assert await again.read(1) == b"x"
    await again.close()


async def test_a_black_hole_is_seen_by_the_keepalive(
    bench: SshBench, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 1 s × 3 in place of 5 s × 3.
    monkeypatch.setattr("engine.cluster.transport.ssh_config.KEEPALIVE_S", 1.0)
    transport = bench.to(sshd)
    channel = await transport.open(["cat"])
    await channel.write(b"x")
    assert await channel.read(1) == b"x"
    began = time.monotonic()
    sshd.freeze()
    monkeypatch.setattr("engine.cluster.transport.ssh_config.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(NodeUnreachable) as raised:
        await channel.read(1)
    assert 2.0 < time.monotonic() - began < 60
    assert "keepalive" in str(raised.value)
    with pytest.raises(NodeUnreachable, match="cannot be reached"):
        await transport.run(["true"], timeout_s=5)
    assert await channel.close() is None


async def test_a_quiet_connection_lives_on(bench: SshBench, sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.cluster.transport.ssh_config.KEEPALIVE_S", 1.0)
    channel = await bench.to(sshd).open(["cat"])
    # Longer than three keepalives without an answer would take.
    await asyncio.sleep(3.5)
    await channel.write(b"x")
    assert await channel.read(1) == b"x"
    await channel.close()


@pytest.mark.usefixtures("killed_soon")
async def test_opening_that_is_cancelled_leaves_nothing(bench: SshBench, sshd: Sshd) -> None:
    transport = bench.to(sshd)
    await transport.run(["true"], timeout_s=10)
    nonce = uuid.uuid4().hex
    for number in range(12):
        opening = asyncio.create_task(transport.open(marked(nonce, "sleep 600")))
        await asyncio.sleep(number * 0.001)
        opening.cancel()
        (opened,) = await asyncio.gather(opening, return_exceptions=True)
        if not isinstance(opened, BaseException):
            await opened.close()
    await until(lambda: not sshd.processes(FLIGHTDECK_NONCE=nonce))


async def test_all_programs_share_one_connection_which_is_closed_with_the_transport(
    bench: SshBench, sshd: Sshd
) -> None:
    transport = bench.to(sshd)
    first, second = await asyncio.gather(transport.open(["cat"]), transport.open(["cat"]))
    assert await first.close() == 0
    await second.write(b"x")
    assert await second.read(1) == b"x"
    assert await second.close() == 0
    assert sshd.connections() == 1
    await transport.close()
    await until(lambda: not sshd.connections())


async def test_a_session_that_is_not_opened_in_time_is_not_left_behind(
    bench: SshBench, sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = bench.to(sshd)
    await transport.run(["true"], timeout_s=10)
    sshd.freeze()
    with monkeypatch.context() as soon, pytest.raises(NodeUnreachable, match="no answer within"):
        soon.setattr("engine.cluster.transport.ssh_config.CONNECT_TIMEOUT_S", 0.3)
        await transport.run(["touch", "~/late"], timeout_s=10)
    sshd.thaw()
    await until(lambda: not sshd.connections())
    assert (await transport.run(["true"], timeout_s=10)).code == 0
    assert not (sshd.home / "late").exists()
    assert sshd.connections() == 1
