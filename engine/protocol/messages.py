"""The messages between the head and the agent of a host, and their frames on one pair of pipes: a line of JSON with
the message's class in `kind`, its fields, and in `bytes` the length of `data`, which follows raw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Union

from engine.protocol.attempt import ExitRecord, Identity
from engine.protocol.events import ExitOutput

MAX_LINE_BYTES = 4 << 20
MAX_DATA_BYTES = 4 << 20
MAX_TEXT = 1 << 16
"""Characters of one text from the agent: what is longer is cut."""
_MAX_DEPTH = 20


# From the head.


@dataclass(frozen=True)
class Watch:
    """Watch the ranks of one attempt on this host: report their starts and ends, and pass heartbeats to their
    keepers."""

    attempt: str
    """The attempt's directory on the host."""
    nonce: str
    ranks: list[int]
    known: list[Identity]
    """Identities that the head knows already: a host that has lost its files would never miss their keepers."""


@dataclass(frozen=True)
class Heartbeat:
    number: int
    answered: int
    """The last heartbeat that had been sent when the head last received anything."""
    acknowledged: int = 0
    """The last heartbeat of which the head has the acknowledgement."""


@dataclass(frozen=True)
class RankCommand:
    rank: int
    command: str
    """ "stop", "end" or "emergency_checkpoint"."""


@dataclass(frozen=True)
class KillRanks:
    """KILL to the process groups of the ranks' programs."""


@dataclass(frozen=True)
class ReadFile:
    """Send a file of the attempt as it grows, up to the offset `until`."""

    file: str
    until: int
    begin: int | None = None
    """None goes on where the last ReadFile of the same file ended."""


@dataclass(frozen=True)
class ListProcesses:
    """List the attempt's processes and their families (engine.node.processes). With `kill`, fence the attempt first and
    kill what was listed."""

    number: int
    kill: bool


@dataclass(frozen=True)
class ExitOutputRequest:
    rank: int


@dataclass(frozen=True)
class ProbeRequest:
    """Run a probe of engine.node.probes."""

    request: int
    probe: str
    arguments: list[str]


@dataclass(frozen=True)
class CommandRequest:
    """Run a program in a session of its own, without input."""

    request: int
    argv: list[str]
    directory: str | None = None
    """None is the user's home."""


@dataclass(frozen=True)
class RequestInput:
    """More stdin for a probe that goes on."""

    request: int
    data: bytes


@dataclass(frozen=True)
class CancelRequest:
    request: int


# From the agent.


@dataclass(frozen=True)
class Hello:
    """The agent's first message."""

    boot_id: str
    memory_kills: int | None
    """Processes that the host has killed for lack of memory since it started."""
    at: float
    """Wall clock of the host."""


@dataclass(frozen=True)
class HeartbeatAck:
    number: int
    at: float


@dataclass(frozen=True)
class Watching:
    """Each rank that had started or ended when the watch began has been reported."""


@dataclass(frozen=True)
class RankStarted:
    rank: int
    identity: Identity


@dataclass(frozen=True)
class RankEnded:
    rank: int
    record: ExitRecord | None
    """None when its keeper is gone without one."""
    memory_kills: int | None
    output: ExitOutput


@dataclass(frozen=True)
class ExitOutputReply:
    rank: int
    output: ExitOutput


@dataclass(frozen=True)
class FileData:
    file: str
    begin: int
    end: bool
    """Nothing followed these bytes when they were read."""
    data: bytes = b""


@dataclass(frozen=True)
class FileError:
    file: str
    problem: str


@dataclass(frozen=True)
class ProcessList:
    number: int
    processes: list[tuple[int, str]]
    """(pid, command) each."""
    sizes: dict[str, int]
    """Bytes of each file that is being read, where that is known."""


@dataclass(frozen=True)
class RequestOutput:
    """The next part of a request's stdout."""

    request: int
    data: bytes


@dataclass(frozen=True)
class RequestEnded:
    request: int
    exit_code: int
    """Negative for a signal."""
    stderr: str
    """The end of it."""


_FromAgent = Union[  # noqa: UP007  (evaluated on nodes with python 3.9)
    Hello, HeartbeatAck, Watching, RankStarted, RankEnded, ExitOutputReply, FileData, FileError, ProcessList,
    RequestOutput, RequestEnded,
]  # fmt: skip
Message = Union[  # noqa: UP007
    Watch, Heartbeat, RankCommand, KillRanks, ReadFile, ListProcesses, ExitOutputRequest, ProbeRequest, CommandRequest,
    RequestInput, CancelRequest, _FromAgent,
]  # fmt: skip
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in Message.__args__}  # type: ignore[attr-defined]
_FROM_AGENT = _FromAgent.__args__  # type: ignore[attr-defined]
_NESTED: dict[str, Any] = {"Identity": Identity, "ExitRecord": ExitRecord, "ExitOutput": ExitOutput}
_LARGEST, _LATEST = 2**63, 253_402_300_799
"""Limits of whole numbers, and of those that are seconds: the year 9999 is the last that datetime knows."""
_PLAIN: dict[str, Any] = {
    "int": int, "str": str, "bool": bool, "float": (int, float), "dict": dict, "list": list, "tuple": list
}  # fmt: skip


def encode(message: Message) -> bytes:
    """One frame."""
    document = {"kind": type(message).__name__, **_document(message)}
    data = document.pop("data", b"")
    if data:
        document["bytes"] = len(data)
    return json.dumps(document, separators=(",", ":")).encode() + b"\n" + bytes(data)


def _document(value: Any) -> Any:
    """As dataclasses.asdict, which copies the bytes and every list's items deeply."""
    if is_dataclass(value):
        return {part.name: _document(getattr(value, part.name)) for part in fields(value)}
    return [_document(item) for item in value] if isinstance(value, list) else value


class Decoder:
    """Takes a stream of frames apart, however it is cut into pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._header: dict[str, Any] | None = None

    def feed(self, received: bytes) -> Iterator[Message]:
        """The messages that `received` completes. Raises ValueError for what is not such a stream."""
        self._pending += received
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        if self._header is None:
            end = self._pending.find(b"\n")
            if end < 0:
                if len(self._pending) > MAX_LINE_BYTES:
                    raise ValueError("a line without an end")
                return None
            self._header = _parse_header(bytes(self._pending[:end]))
            del self._pending[: end + 1]
        size = self._header.get("bytes", 0)
        if len(self._pending) < size:
            return None
        header, data = self._header, bytes(memoryview(self._pending)[:size])
        del self._pending[:size]
        self._header = None
        return _message(header, data)


def _parse_header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"not a message: {line[:200]!r}") from None
    if not isinstance(header, dict) or not isinstance(header.get("kind"), str) or header["kind"] not in _TYPES:
        raise ValueError(f"not a message: {line[:200]!r}")
    size = header.get("bytes", 0)
    if type(size) is not int or not 0 <= size <= MAX_DATA_BYTES:
        raise ValueError(f"{size!r} bytes cannot follow a message")
    return header


def _message(header: dict[str, Any], data: bytes) -> Message:
    kind = _TYPES[header["kind"]]
    values = {name: value for name, value in header.items() if name not in ("kind", "bytes")}
    if kind in _FROM_AGENT:
        values = _bounded(values)
    if any(part.name == "data" for part in fields(kind)):
        values["data"] = data
    try:
        message: Message = _record(kind, values)
    except TypeError as error:
        raise ValueError(f"not a message: {header['kind']}: {error}") from None
    return message


def _record(kind: Any, values: dict[str, Any]) -> Any:
    """Raises TypeError for other fields or types."""
    declared = {part.name: str(part.type) for part in fields(kind)}
    return kind(**{name: _value(declared.get(name, ""), value) for name, value in values.items()})


def _bounded(value: Any, depth: int = 0) -> Any:
    """A JSON value whose texts are short enough and can be written as UTF-8; None for what is nested too deeply, and
    for numbers that are not finite."""
    if isinstance(value, str):
        return value[:MAX_TEXT].encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if not isinstance(value, (dict, list)):
        return value
    if depth == _MAX_DEPTH:
        return None
    if isinstance(value, list):
        return [_bounded(item, depth + 1) for item in value]
    return {_bounded(name): _bounded(item, depth + 1) for name, item in value.items()}


def _value(declared: str, value: Any) -> Any:
    """A JSON value as the field's declared type. Raises TypeError for another type."""
    optional, declared = declared.endswith(" | None"), declared.removesuffix(" | None")
    if declared == "Any" or (optional and value is None):
        return value
    if declared in _NESTED:
        return _record(_NESTED[declared], dict(**value))
    outer, _, inner = declared.removesuffix("]").partition("[")
    expected = _PLAIN.get(outer)
    if expected is not None and (not isinstance(value, expected) or isinstance(value, bool) != (outer == "bool")):
        raise TypeError(f"{value!r:.80} is not {declared}")
    if isinstance(value, (int, float)) and not abs(value) <= (_LATEST if declared == "float" else _LARGEST):
        raise TypeError(f"{value!r:.80} is too large")
    return _items(outer, inner, value) if inner else value


def _items(outer: str, inner: str, value: Any) -> Any:
    """The items of a list, dict or tuple, likewise."""
    if outer == "list":
        return [_value(inner, item) for item in value]
    if outer == "dict":
        return {name: _value(inner.partition(", ")[2], item) for name, item in value.items()}
    kinds = inner.split(", ")
    if len(value) != len(kinds):
        raise TypeError(f"{value!r:.80} is not {len(kinds)} values")
    return tuple(map(_value, kinds, value))
