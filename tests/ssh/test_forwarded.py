"""Ports of a node, reached through its SSH connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engine.errors import NodeUnreachable
from tests.ssh.bench import SshBench


@pytest_asyncio.fixture
async def echo() -> AsyncIterator[int]:
    """The port of a server on the node that answers each line with itself."""

    writers = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                writer.write(line)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
    for writer in writers:
        await closed(writer)


async def echoed(place: tuple[str, int], text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(text)
    line = await reader.readline()
    await closed(writer)
    return line


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_nodes_port_is_reached_until_the_block_ends(bench: SshBench, echo: int) -> None:
    transport = bench.to(bench.sshd())
    async with transport.forwarded("127.0.0.1", echo) as place:
        assert place != ("127.0.0.1", echo)
        lines = await asyncio.gather(*(echoed(place, b"%d\n" % number) for number in range(8)))
        assert lines == [b"%d\n" % number for number in range(8)]
    with pytest.raises(OSError, match=r"111|refused"):
        await echoed(place, b"x\n")


async def test_a_cut_connection_ends_what_goes_through_it_and_the_next_block_has_another(
    bench: SshBench, echo: int
) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    async with asyncio.timeout(60):
        async with transport.forwarded("127.0.0.1", echo) as place:
            reader, writer = await asyncio.open_connection(*place)
            writer.write(b"x\n")
            assert await reader.readline() == b"x\n"
            sshd.drop_connections()
            assert await reader.read() == b""
            await closed(writer)
        async with transport.forwarded("127.0.0.1", echo) as place:
            assert await echoed(place, b"y\n") == b"y\n"


async def test_a_node_that_is_away_is_said_to_be(bench: SshBench, echo: int) -> None:
    sshd = bench.sshd()
    transport = bench.to(sshd)
    sshd.stop()
    with pytest.raises(NodeUnreachable):
        async with transport.forwarded("127.0.0.1", echo):
            pass
