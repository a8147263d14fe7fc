"""Copies a file of a node to this machine by its agent: from the offset that an earlier copy has reached, and verified
by its SHA-256."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.cluster.agent_client import AgentClient, InterpreterBroken
from engine.errors import FlightDeckError, HostKeyChanged, HostKeyUnknown, LaunchError, LoginRefused, NodeUnreachable
from engine.node.probes.files import READ_BYTES
from engine.protocol.attempt import sync_file
from engine.protocol.messages import RequestEnded
from engine.security.sanitise import json_object, json_or_none, plain
from engine.snapshots import ResultFile

_UNDER_WAY = 16
"""Pieces of READ_BYTES that a node may be ahead of this machine's disk: the limit in memory."""
_SILENCE_S = 60.0
"""For a node's disk to be read."""
_RETRY_S = 1.0
_LASTING = (HostKeyUnknown, HostKeyChanged, LoginRefused, InterpreterBroken)


class FileDiffers(FlightDeckError):
    """A file on a node is not the one that was saved there, or cannot be read."""


@dataclass(frozen=True)
class FileCopy:
    agent: AgentClient
    source: ResultFile
    part: Path
    """Where its content is collected; what an earlier copy has left there is not sent again."""
    patience_s: float
    """For how long a connection that is lost is opened anew, since anything came."""
    on_bytes: Callable[[int], None]
    """Told how much has come; less than 0 for what is dropped."""
    on_away: Callable[[str], None]

    async def run(self) -> None:
        """Returns when the file is in `part`, on the disk and verified. Raises FileDiffers, `part` removed;
        NodeUnreachable, LaunchError, OSError, `part` kept for the next time."""
        with self.part.open("ab+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A second time from the beginning: after a power cut there may be holes.
                while await self._receive(file) > 0:
                    file.truncate(0)
                    self.on_bytes(-self.source.bytes)
                await asyncio.to_thread(sync_file, file.fileno())
            except BlockingIOError:
                raise LaunchError("another fetch writes it", where=str(self.part)) from None
            except FileDiffers:
                self.part.unlink()
                raise

    async def _receive(self, file: BinaryIO) -> int:
        """0 when the file is as it was saved, or how many bytes of it, which is not, an earlier copy had left."""
        source, digest = self.source, await asyncio.to_thread(_hash_start, file, self.source.bytes)
        kept, came_at = file.tell(), time.monotonic()

        def keep(data: bytes) -> None:
            file.write(data)
            file.flush()
            digest.update(data)

        while file.tell() < source.bytes:
            try:
                async with contextlib.aclosing(self._pieces(file.tell())) as pieces:
                    async for data in pieces:
                        await asyncio.to_thread(keep, data)
                        self.on_bytes(len(data))
                        came_at = time.monotonic()
            except (NodeUnreachable, LaunchError) as error:
                left_s = came_at + self.patience_s - time.monotonic()
                if isinstance(error, _LASTING) or left_s <= 0:
                    raise
                self.on_away(f"{source.node} is away, tried again for {left_s:.0f} s")
                await asyncio.sleep(min(_RETRY_S, left_s))
        if digest.hexdigest() != source.sha256 and not kept:
            why = f"SHA-256 {digest.hexdigest()[:12]}…, and the run recorded {source.sha256[:12]}…"
            raise self._differs(f"it is damaged or was replaced since: {why}")
        return kept if digest.hexdigest() != source.sha256 else 0

    async def _pieces(self, offset: int) -> AsyncGenerator[bytes, None]:
        """The file from `offset` on. Raises FileDiffers, NodeUnreachable, LaunchError."""
        source, received = self.source, 0
        with contextlib.closing(await self.agent.start_probe("read", source.path, str(offset))) as request:
            line = await request.next_line(_SILENCE_S)
            report = json_object(json_or_none(line)) if isinstance(line, bytes) else {}
            if (problem := report.get("problem")) is not None:
                raise self._differs(plain(problem, 200))
            if report.get("size", source.bytes) != source.bytes:
                raise self._differs(f"it has {plain(report['size'], 20)} bytes, and had {source.bytes:,}")
            request.send(b"." * _UNDER_WAY)
            while (left := source.bytes - offset - received) > 0:
                data = await request.next_data(_SILENCE_S)
                if not isinstance(data, bytes):
                    why = plain(data.stderr if isinstance(data, RequestEnded) else data, 200)
                    raise LaunchError(f"{source.path} could not be read to its end", where=source.node, why=why)
                if len(data) > left:
                    raise self._differs("more came than it has")
                yield data
                request.send(b"." * ((received + len(data)) // READ_BYTES - received // READ_BYTES))
                received += len(data)

    def _differs(self, why: str) -> FileDiffers:
        return FileDiffers(f"{self.source.path} is not what was saved", where=self.source.node, why=why)


def _hash_start(file: BinaryIO, size: int) -> hashlib._Hash:
    """The hash of what is there, dropped when it is too long; at the end of the file afterwards."""
    digest = hashlib.sha256()
    if file.seek(0, 2) > size:
        file.truncate(0)
    file.seek(0)
    while data := file.read(READ_BYTES):
        digest.update(data)
    return digest
