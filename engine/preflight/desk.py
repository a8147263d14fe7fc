"""The looks of one node over one channel: `worker.looks` there answers them all, each by its number.

A look costs one line each way instead of a session and an interpreter, and there are a dozen on each node.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated

from pydantic import Field, ValidationError

from engine.errors import NodeUnreachable
from engine.preflight.answers import Answer
from engine.transport.base import Channel, Completed, Transport

_LINE_LIMIT = 1 << 26
"""A tree's answer may have a hundred thousand names."""
_BLOCK = 1 << 18


class _Said(Answer):
    """One line of worker.looks."""

    id: int
    code: int
    out: str
    err: Annotated[str, Field(max_length=10_000)]


class Desk:
    """To be closed."""

    def __init__(self, transport: Transport, python: str, bundle: str) -> None:
        self._transport = transport
        self._argv = [python, "-m", "worker.looks"]
        self._bundle = PurePosixPath(bundle)
        self._opening: asyncio.Task[Channel] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Completed]] = {}
        self._writing = asyncio.Lock()
        self._gone: NodeUnreachable | None = None

    async def ask(self, look: str, arguments: Sequence[str], *, timeout_s: float) -> Completed:
        """How `python -m worker.looks.<look>` would have ended there, code None after `timeout_s` seconds. Raises
        OSError when its python cannot be run, NodeUnreachable."""
        channel = await self._channel()
        if self._gone is not None:
            raise self._gone
        number = next(self._numbers)
        answer: asyncio.Future[Completed] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(channel, {"id": number, "look": look, "arguments": list(arguments)})
                return await answer
        except TimeoutError:
            return Completed(None, b"", b"")
        finally:
            self._waiting.pop(number, None)
            if not answer.done() or answer.cancelled():
                with contextlib.suppress(NodeUnreachable, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await self._write(channel, {"end": number})

    async def close(self) -> None:
        """End what is still looked for there."""
        for task in (self._reading, self._opening):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._opening is not None and not self._opening.cancelled() and self._opening.exception() is None:
            with contextlib.suppress(NodeUnreachable):
                await self._opening.result().close()
        self._tell(NodeUnreachable("nothing is looked at any more", where=str(self._transport.target)))

    async def _channel(self) -> Channel:
        """The one that all looks share, opened by the first; why there is none is told to all."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Channel:
        channel = await self._transport.open(self._argv, directory=self._bundle)
        self._reading = asyncio.create_task(self._read(channel), name=f"looks of {self._transport.target}")
        return channel

    async def _write(self, channel: Channel, asked: dict[str, object]) -> None:
        async with self._writing:
            await channel.write(json.dumps(asked).encode() + b"\n")

    async def _read(self, channel: Channel) -> None:
        """Until it ends; whoever still waits then is told."""
        unread = bytearray()
        try:
            while block := await channel.read(_BLOCK):
                unread += block
                if b"\n" in block:
                    *lines, rest = bytes(unread).split(b"\n")
                    unread = bytearray(rest)
                    for line in lines:
                        self._settle(line)
                if len(unread) > _LINE_LIMIT:
                    break
            words = channel.last_words or "it has left"
            self._tell(NodeUnreachable("nothing can be looked at", where=str(self._transport.target), why=words))
        except NodeUnreachable as error:
            self._tell(error)

    def _tell(self, gone: NodeUnreachable) -> None:
        """All who wait, and all who come."""
        self._gone = gone
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(gone)

    def _settle(self, line: bytes) -> None:
        try:
            said = _Said.model_validate_json(line)
        except ValidationError:
            # A login shell's say.
            return
        answer = self._waiting.get(said.id)
        if answer is not None and not answer.done():
            out, err = said.out.encode(errors="replace"), said.err.encode(errors="replace")
            answer.set_result(Completed(said.code, out, err))
