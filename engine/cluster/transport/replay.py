"""Record and replay of a node's session: ReplayTransport answers from a recording, with its delays and failures;
Recorder makes one.

For tests with many nodes, and for the benchmarks. A recording is one JSON document.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from engine.cluster.transport.base import Channel, Completed, Transport
from engine.errors import NodeUnreachable
from engine.security.identifiers import SshTarget


def _from_json(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    return base64.b64decode(value["base64"], validate=True) if isinstance(value, dict) else value


def _to_json(data: bytes) -> str | dict[str, str]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


_Found = TypeVar("_Found")
Data = Annotated[bytes, BeforeValidator(_from_json), PlainSerializer(_to_json)]
"""Bytes: as text where they are UTF-8, else `{"base64": …}`."""


class _RecordingModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RecordedRun(_RecordingModel):
    """One command and its end."""

    argv: list[str]
    stdin_sha: str | None = None
    """SHA-256 of its stdin; None answers whatever it is given."""
    code: int | None = 0
    stdout: Data = b""
    stderr: Data = b""
    delay_s: float = Field(default=0.0, ge=0)
    unreachable: str | None = None
    """Why the node could not be reached, in place of an answer."""


class RecordedBlock(_RecordingModel):
    """Output of a program in one piece, `delay_s` after the piece before it."""

    data: Data
    delay_s: float = Field(default=0.0, ge=0)


class RecordedChannel(_RecordingModel):
    """One program that was left running."""

    argv: list[str]
    blocks: list[RecordedBlock] = []
    ended: bool = False
    """It closed its stdout after the last block; else it is silent from then on, until it is closed."""
    code: int | None = None


class Recording(_RecordingModel):
    """A session with one node. Of equal runs the first is the first answer, and the last answers from then on."""

    target: str
    runs: list[RecordedRun] = []
    channels: list[RecordedChannel] = []
    files: dict[str, Data] = {}
    round_trip_s: float | None = None


class ReplayTransport:
    """The Transport of a node of which there is only a recording."""

    def __init__(self, recording: Recording, *, target: SshTarget | None = None, pace: float = 1.0) -> None:
        """`pace` times the recorded delays; 0 answers at once."""
        self._recording = recording
        self._target = target or SshTarget.parse(recording.target)
        self._pace = pace
        self._asked: dict[tuple[Any, ...], int] = {}
        self.files = dict(recording.files)
        """The recorded files, and those put since."""

    @property
    def target(self) -> SshTarget:
        return self._target

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        sha = hashlib.sha256(stdin).hexdigest()
        fitting = [run for run in self._recording.runs if run.argv == list(argv) and run.stdin_sha in (None, sha)]
        found = self._next(fitting, ("run", *argv, sha))
        if found is None:
            raise self._unknown(argv)
        delay_s = found.delay_s * self._pace
        await asyncio.sleep(min(delay_s, timeout_s))
        if found.unreachable is not None:
            raise NodeUnreachable("cannot be reached", where=str(self._target), why=found.unreachable)
        if delay_s > timeout_s:
            return Completed(None, b"", b"")
        return Completed(found.code, found.stdout, found.stderr)

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        fitting = [channel for channel in self._recording.channels if channel.argv == list(argv)]
        found = self._next(fitting, ("open", *argv))
        if found is None:
            raise self._unknown(argv)
        return ReplayChannel(found, self._pace)

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        if str(path) not in self.files:
            raise FileNotFoundError(f"{path} is not recorded on {self._target}")
        return self.files[str(path)][offset : offset + size]

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        self.files[str(path)] = content

    async def put_tree(self, path: PurePath, files: dict[str, bytes]) -> None:
        if any(name.startswith(f"{path}/") for name in self.files):
            raise FileExistsError(f"{path} is there already")
        self.files |= {f"{path}/{name}": content for name, content in files.items()}

    async def round_trip_s(self) -> float | None:
        return self._recording.round_trip_s

    async def close(self) -> None:
        return

    def _next(self, fitting: list[_Found], key: tuple[Any, ...]) -> _Found | None:
        asked = self._asked.get(key, 0)
        self._asked[key] = asked + 1
        return fitting[min(asked, len(fitting) - 1)] if fitting else None

    def _unknown(self, argv: Sequence[str]) -> NodeUnreachable:
        return NodeUnreachable("nothing is recorded", where=str(self._target), why=" ".join(argv)[:200])


class ReplayChannel:
    """The Channel to a recorded program: it replays the recorded output, whatever it receives."""

    def __init__(self, recorded: RecordedChannel, pace: float) -> None:
        self._blocks = list(recorded.blocks)
        self._ended, self._code = recorded.ended, recorded.code
        self._pace = pace
        self._pending = b""
        self._closed = asyncio.Event()
        self.written = b""

    async def write(self, data: bytes) -> None:
        if self._closed.is_set():
            raise NodeUnreachable("the program has left")
        self.written += data

    async def read(self, size: int) -> bytes:
        if not self._pending and self._blocks:
            if await self._closes_within(self._blocks[0].delay_s * self._pace):
                return b""
            self._pending = self._blocks.pop(0).data
        elif not self._pending and not self._ended:
            await self._closed.wait()
        data, self._pending = self._pending[:size], self._pending[size:]
        return data

    async def close(self) -> int | None:
        self._closed.set()
        return self._code

    @property
    def exit_output(self) -> str:
        return ""

    async def _closes_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        return self._closed.is_set()


class Recorder:
    """Any Transport, and a recording of what it answers: `recorder.recording`, to be written by `model_dump_json`."""

    def __init__(self, transport: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._transport = transport
        self._clock = clock
        self.recording = Recording(target=str(transport.target))

    @property
    def target(self) -> SshTarget:
        return self._transport.target

    async def run(
        self, argv: Sequence[str], *, timeout_s: float, stdin: bytes = b"", directory: PurePath | None = None
    ) -> Completed:
        began = self._clock()
        entry = RecordedRun(argv=list(argv), stdin_sha=hashlib.sha256(stdin).hexdigest())
        try:
            done = await self._transport.run(argv, timeout_s=timeout_s, stdin=stdin, directory=directory)
            entry.code, entry.stdout, entry.stderr = done.code, done.stdout, done.stderr
        except NodeUnreachable as error:
            entry.unreachable = error.why or error.what
            raise
        finally:
            entry.delay_s = self._clock() - began
            self.recording.runs.append(entry)
        return done

    async def open(self, argv: Sequence[str], *, directory: PurePath | None = None) -> Channel:
        channel = await self._transport.open(argv, directory=directory)
        recorded = RecordedChannel(argv=list(argv))
        self.recording.channels.append(recorded)
        return _RecordingChannel(channel, recorded, self._clock)

    async def read_from(self, path: PurePath, offset: int, size: int) -> bytes:
        data = await self._transport.read_from(path, offset, size)
        before = self.recording.files.get(str(path), b"")
        if offset <= len(before):
            self.recording.files[str(path)] = before[:offset] + data + before[offset + len(data) :]
        return data

    async def put(self, path: PurePath, content: bytes, *, mode: int = 0o600) -> None:
        await self._transport.put(path, content, mode=mode)

    async def put_tree(self, path: PurePath, files: dict[str, bytes]) -> None:
        await self._transport.put_tree(path, files)

    async def round_trip_s(self) -> float | None:
        self.recording.round_trip_s = await self._transport.round_trip_s()
        return self.recording.round_trip_s

    async def close(self) -> None:
        await self._transport.close()


class _RecordingChannel:
    def __init__(self, channel: Channel, recorded: RecordedChannel, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._recorded = recorded
        self._clock = clock
        self._last = clock()

    async def write(self, data: bytes) -> None:
        await self._channel.write(data)

    async def read(self, size: int) -> bytes:
        data = await self._channel.read(size)
        now = self._clock()
        self._recorded.ended = not data
        if data:
            self._recorded.blocks.append(RecordedBlock(data=data, delay_s=now - self._last))
        self._last = now
        return data

    async def close(self) -> int | None:
        self._recorded.code = await self._channel.close()
        return self._recorded.code

    @property
    def exit_output(self) -> str:
        return self._channel.exit_output
