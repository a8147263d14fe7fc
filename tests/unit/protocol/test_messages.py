"""Messages come out as they went in, however the stream was cut; what is not such a stream is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol.attempt import ExitRecord, Identity
from engine.protocol.events import ExitOutput
from engine.protocol.messages import (
    MAX_DATA_BYTES,
    MAX_LINE_BYTES,
    MAX_TEXT,
    CommandRequest,
    Decoder,
    FileData,
    Heartbeat,
    KillRanks,
    Message,
    ProcessList,
    RankEnded,
    RankStarted,
    ReadFile,
    RequestOutput,
    Watch,
    encode,
)

TEXT, NUMBER = st.text(max_size=20), st.integers(min_value=0, max_value=2**53)
IDENTITIES = st.builds(
    Identity, NUMBER, TEXT, NUMBER, TEXT, TEXT, NUMBER, TEXT, NUMBER, NUMBER, TEXT, st.floats(0, 2e9)
)
OUTPUTS = st.builds(ExitOutput, log=TEXT, keeper=TEXT, failure=st.none() | st.just({"a": 1}), end=st.none())
RECORDS = st.builds(ExitRecord, NUMBER, NUMBER, st.none() | NUMBER, st.none(), st.floats(0, 2e9), NUMBER)
MESSAGES = st.one_of(
    st.builds(Watch, TEXT, TEXT, st.lists(NUMBER, max_size=3), st.lists(IDENTITIES, max_size=2)),
    st.builds(Heartbeat, NUMBER, NUMBER),
    st.builds(ReadFile, TEXT, NUMBER, st.none() | NUMBER),
    st.builds(FileData, TEXT, NUMBER, st.booleans(), st.binary(max_size=200)),
    st.builds(RankEnded, NUMBER, st.none() | RECORDS, st.none() | NUMBER, OUTPUTS),
    st.builds(ProcessList, NUMBER, st.lists(st.tuples(NUMBER, TEXT)), st.dictionaries(TEXT, NUMBER)),
    st.builds(CommandRequest, NUMBER, st.lists(TEXT, max_size=3), st.none() | TEXT),
    st.builds(RequestOutput, NUMBER, st.binary(max_size=200)),
    st.just(KillRanks()),
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(min_value=1, max_value=64), min_size=1))
def test_a_stream_may_be_cut_anywhere(messages: list[Message], sizes: list[int]) -> None:
    stream = b"".join(map(encode, messages))
    decoder, received, position, turn = Decoder(), list[Message](), 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        received += list(decoder.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert received == messages


@pytest.mark.parametrize(
    "stream",
    [
        b"Welcome to this Mac.\n",
        b"[]\n",
        b'{"no": "kind"}\n',
        b'{"kind": 3}\n',
        b'{"kind": []}\n',
        b'{"kind": "no_such_kind"}\n',
        b'{"kind": "FileData", "bytes": -1}\n',
        b'{"kind": "FileData", "bytes": "9"}\n',
        b'{"kind": "FileData", "bytes": %d}\n' % (MAX_DATA_BYTES + 1),
        b"[" * 100_000 + b"\n",
        b"x" * (MAX_LINE_BYTES + 1),
    ],
)
def test_what_is_not_a_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):
        list(Decoder().feed(stream))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"number": 1},
        {"number": 1, "answered": "2"},
        {"number": True, "answered": 2},
        {"number": 1, "answered": 2, "more": 3},
        {"number": 10**400, "answered": 2},
    ],
)
def test_a_message_with_other_fields_or_types_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a message"):
        list(Decoder().feed(json.dumps({"kind": "Heartbeat", **fields}).encode() + b"\n"))


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("RankEnded", "record", {"code": "0"}),
        ("RankEnded", "record", {"ended_at": None}),
        ("RankEnded", "record", {"more": 1}),
        ("RankEnded", "record", {"ended_at": float("nan")}),
        ("RankStarted", "identity", {"started_at": 1e300}),
        ("RankStarted", "identity", {"started_at": 10**400}),
        ("RankStarted", "identity", {"trainer_pid": 10**400}),
        ("RankEnded", "output", {"log": 7}),
        ("RankEnded", "output", {"failure": ["a"]}),
        ("RankStarted", "identity", {"keeper_pid": "7"}),
    ],
)
def test_a_message_with_a_record_of_other_fields_or_types_is_refused(
    kind: str, field: str, value: dict[str, object]
) -> None:
    identity = Identity(0, "r", 1, "n", "b", 7, "s", 8, 8, "s", 1)
    good: dict[str, Message] = {
        "RankEnded": RankEnded(0, ExitRecord(0, 1, 0, None, 1.5, 0), None, ExitOutput(failure={"a": 1})),
        "RankStarted": RankStarted(0, identity),
    }
    line = encode(good[kind])
    assert list(Decoder().feed(line)) == [good[kind]]
    document = json.loads(line)
    document[field] |= value
    with pytest.raises(ValueError, match="not a message"):
        list(Decoder().feed(json.dumps(document).encode() + b"\n"))
    document[field] = [1]
    with pytest.raises(ValueError, match="not a message"):
        list(Decoder().feed(json.dumps(document).encode() + b"\n"))


KINDS: list[Any] = list(Message.__args__)  # type: ignore[attr-defined]
SAMPLES: dict[str, Any] = {
    "int": 1, "str": "text", "bool": True, "float": 1.5, "bytes": b"data", "list[int]": [1], "list[str]": ["a"],
    "list[Identity]": [{}], "Identity": {}, "ExitRecord": {}, "ExitOutput": {}, "dict[str, int]": {"rank0.log": 1},
    "dict[str, Any]": {"a": [1]}, "list[tuple[int, str]]": [[1, "python"]],
}  # fmt: skip
RECORDS_BY_NAME: dict[str, Any] = {"Identity": Identity, "ExitRecord": ExitRecord, "ExitOutput": ExitOutput}


def sample(kind: Any) -> dict[str, Any]:
    """A JSON document with a value of the declared type in every field."""
    document = {}
    for each in fields(kind):
        declared = str(each.type).removesuffix(" | None")
        value = copy.deepcopy(SAMPLES[declared])
        name = declared.removeprefix("list[").removesuffix("]")
        if name in RECORDS_BY_NAME:
            value = sample(RECORDS_BY_NAME[name])
            value = [value] if declared.startswith("list[") else value
        if declared != "bytes":
            document[each.name] = value
    return document


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value at every depth."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, value in inner:
        yield (*at, name)
        yield from places(value, (*at, name))


def well_typed(declared: str, value: Any) -> bool:
    """As `typing` would have it."""
    optional, declared = declared.endswith(" | None"), declared.removesuffix(" | None")
    if declared == "Any" or (optional and value is None):
        return True
    if declared in RECORDS_BY_NAME:
        typed = (well_typed(str(each.type), getattr(value, each.name)) for each in fields(RECORDS_BY_NAME[declared]))
        return isinstance(value, RECORDS_BY_NAME[declared]) and all(typed)
    outer, _, inner = declared.removesuffix("]").partition("[")
    if outer == "float":
        return type(value) in (int, float) and math.isfinite(value)
    items: list[tuple[str, Any]] = []
    if outer == "list":
        items = [(inner, item) for item in value]
    elif outer == "tuple":
        items = [*zip(inner.split(", "), value, strict=True)]
    elif outer == "dict":
        items = [(inner.partition(", ")[2], item) for item in value.values()]
    return type(value).__name__ == outer and all(well_typed(*item) for item in items)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(KINDS), st.data())
@settings(max_examples=400)
def test_a_hostile_value_anywhere_in_any_message_is_refused_or_well_typed(kind: Any, data: st.DataObject) -> None:
    document: Any = {"kind": kind.__name__, **sample(kind)}
    place = data.draw(st.sampled_from(list(places(document))))
    inside = document
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = data.draw(JSON)
    try:
        (message,) = Decoder().feed(json.dumps(document).encode() + b"\n")
    except ValueError:
        return
    assert all(well_typed(str(each.type), getattr(message, each.name)) for each in fields(message))


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_has_a_sample(kind: Any) -> None:
    (message,) = Decoder().feed(json.dumps({"kind": kind.__name__, **sample(kind)}).encode() + b"\n")
    assert type(message) is kind


def test_sizes_are_numbers_and_processes_pairs() -> None:
    """Both ended the supervisor: sizes with a TypeError, processes with a ValueError."""
    good = {"kind": "ProcessList", "number": 1, "processes": [[7, "python"]], "sizes": {"rank0.log": 12}}
    assert list(Decoder().feed(json.dumps(good).encode() + b"\n")) == [
        ProcessList(1, [(7, "python")], {"rank0.log": 12})
    ]
    for hostile in ({"sizes": {"rank0.log": "abc"}}, {"processes": [["7", "python"]]}, {"processes": [[7]]}):
        with pytest.raises(ValueError, match="not a message: ProcessList"):
            list(Decoder().feed(json.dumps(good | hostile).encode() + b"\n"))


def test_texts_of_an_agent_are_bounded_and_can_be_written() -> None:
    deep: Any = 1
    for _ in range(500):
        deep = {"a": deep}
    sent = RankEnded(
        0, ExitRecord(0, 1, 0, None, 1.5, 0, error="x" * 3_000_000), None, ExitOutput(log="a\ud800", end=deep)
    )
    (received,) = Decoder().feed(encode(sent))
    assert isinstance(received, RankEnded)
    assert received.record is not None
    assert received.record.error == "x" * MAX_TEXT
    assert received.output.log == "a\\ud800"
    assert len(json.dumps(received.output.end)) < 300


def test_paths_of_the_head_come_as_they_are() -> None:
    """One that is not UTF-8 has a lone surrogate."""
    command = CommandRequest(1, ["ls", "/\udcff"], "/\udcff")
    assert list(Decoder().feed(encode(command))) == [command]
