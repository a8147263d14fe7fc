"""A node whose agent answers what a test gives it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.cluster.transport.base import Channel
from engine.cluster.transport.fleet import Fleet
from engine.cluster.transport.local import LocalTransport
from engine.protocol.messages import (
    Decoder,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    ProbeRequest,
    RequestEnded,
    RequestOutput,
    encode,
)

Answer = Callable[[ProbeRequest], Sequence[Message]]


class FakeChannel(Channel):
    """A connection to an agent whose part the test plays. `started` is what its bootstrap and its agent print first."""

    def __init__(self, answer: Answer, started: bytes, *, acknowledges: bool = True) -> None:
        self.received: list[Message] = []
        self._answer = answer
        self.acknowledges = acknowledges
        self._decoder = Decoder()
        self._output: asyncio.Queue[bytes] = asyncio.Queue()
        self._output.put_nowait(started)

    async def write(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self.received.append(message)
            if isinstance(message, Heartbeat) and self.acknowledges:
                self.send(HeartbeatAck(message.number, time.time()))
            elif isinstance(message, ProbeRequest):
                for reply in self._answer(message):
                    self.send(reply)

    async def read(self, size: int) -> bytes:
        return await self._output.get()

    async def close(self) -> int | None:
        return None

    @property
    def exit_output(self) -> str:
        return ""

    def send(self, message: Message) -> None:
        self._output.put_nowait(encode(message))

    def end(self) -> None:
        """Close its stdout."""
        self._output.put_nowait(b"")


def hello() -> Hello:
    return Hello("boot", 0, time.time())


def reply(request: ProbeRequest, document: Any) -> list[Message]:
    """The messages of a probe that printed one document."""
    return [
        RequestOutput(request.request, json.dumps(document).encode() + b"\n"),
        RequestEnded(request.request, 0, ""),
    ]


class FakeNode(LocalTransport):
    """The transport to it. `document` is what every probe prints; an exception is raised at each connection."""

    def __init__(self, document: Any = None, *, banner: bytes = b"noise of a .bashrc\n\n") -> None:
        self.document = document
        self.banner = banner
        self.home: object = "/home/ana"
        self.channels: list[FakeChannel] = []

    @property
    def probes(self) -> list[ProbeRequest]:
        """Those that were requested so far."""
        received = [message for channel in self.channels for message in channel.received]
        return [message for message in received if isinstance(message, ProbeRequest)]

    async def open(self, argv: Sequence[str]) -> Channel:
        if isinstance(self.document, Exception):
            raise self.document
        line = json.dumps({"kind": "bootstrap", "home": self.home, "missing": False}).encode()
        started = self.banner + line + b"\n" + encode(hello())
        self.channels.append(FakeChannel(lambda request: reply(request, self.document), started))
        return self.channels[-1]


class FakeFleet(Fleet):
    """Hosts by their names in `ssh`."""

    def __init__(self, **transports: LocalTransport) -> None:
        super().__init__(Path("/nonexistent"))
        self._transports.update(transports)
