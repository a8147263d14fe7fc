"""Messages come out as they went in, however the stream was cut; what is not such a stream is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.attempt import ExitRecord, Identity
from engine.protocol.events import ExitOutput
from engine.protocol.messages import (
    MAX_DATA_BYTES,
    MAX_LINE_BYTES,
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
    st.builds(ProcessList, NUMBER, st.lists(st.tuples(NUMBER, TEXT).map(list)), st.dictionaries(TEXT, NUMBER)),
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
