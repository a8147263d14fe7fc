"""Frames come out as they went in, however the stream was cut; what is no such stream is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.frames import LONGEST_LINE, MOST_BYTES, Decoder, Message, encode

NAMES = st.text(min_size=1, max_size=8).filter(lambda name: name not in ("kind", "bytes"))
FIELDS = st.dictionaries(NAMES, st.one_of(st.integers(), st.text(max_size=20), st.none(), st.booleans()), max_size=4)
FRAMES = st.lists(st.tuples(FIELDS, st.binary(max_size=200)), max_size=6)


@given(FRAMES, st.lists(st.integers(min_value=1, max_value=64), min_size=1))
def test_a_stream_may_be_cut_anywhere(frames: list[tuple[Message, bytes]], sizes: list[int]) -> None:
    said = [({"kind": "data", **fields}, body) for fields, body in frames]
    stream = b"".join(encode(message, body) for message, body in said)
    decoder, heard, position, turn = Decoder(), [], 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        heard += list(decoder.feed(stream[position : position + size]))
        position, turn = position + size, turn + 1
    assert [({k: v for k, v in message.items() if k != "bytes"}, body) for message, body in heard] == said


@pytest.mark.parametrize(
    "stream",
    [
        b"Welcome to this Mac.\n",
        b"[]\n",
        b'{"no": "kind"}\n',
        b'{"kind": 3}\n',
        b'{"kind": "data", "bytes": -1}\n',
        b'{"kind": "data", "bytes": "9"}\n',
        b'{"kind": "data", "bytes": %d}\n' % (MOST_BYTES + 1),
        b"[" * 100_000 + b"\n",
        b"x" * (LONGEST_LINE + 1),
    ],
)
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):
        list(Decoder().feed(stream))
