"""A detour on which every byte takes longer: what `netem` would do, for one TCP port, in a process of its own.

Run as `python -m tests.cluster.detour LISTEN_HOST HOST PORT SECONDS`; it says its port, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

CHUNK = 65536
IN_FLIGHT = 256
"""Chunks on their way at most: a slow reader slows its writer."""


class Detour:
    """A running detour; `host` and `port` are where it begins."""

    def __init__(self, listen_host: str, host: str, port: int, seconds: float) -> None:
        self.host = listen_host
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.detour", listen_host, host, str(port), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def close(self) -> None:
        """End it, with its connections."""
        self._process.kill()
        self._process.communicate()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
    """Hand on what `reader` gets, and its end, each chunk `seconds` after it came, however many are on their way."""
    loop = asyncio.get_running_loop()
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(IN_FLIGHT)

    async def take() -> None:
        chunk = b"first"
        while chunk:
            chunk = await reader.read(CHUNK)
            await under_way.put((loop.time() + seconds, chunk))

    taking = asyncio.create_task(take())
    try:
        while True:
            due, chunk = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not chunk:
                break
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()
    finally:
        taking.cancel()


async def serve(listen_host: str, host: str, port: int, seconds: float) -> None:
    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(carry(reader, far_writer, seconds), carry(far_reader, writer, seconds))
        except OSError:
            pass  # a reset on one side: the other is closed, as by a cable
        finally:
            writer.close()
            far_writer.close()

    server = await asyncio.start_server(lead, listen_host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
