"""Lines, rows and their forms are those that mlx-lm reads (mlx_lm/tuner/datasets.py, load_local_dataset)."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.node.probes.dataset import probe_examples, read_lines
from engine.node.source_files import foreign_kind
from engine.protocol.jsonl import fault_of, form_of, half_pair, is_blank, lines, parse
from engine.training.jsonl import JsonlIndex, has_examples, line_number

KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
rows = st.lists(st.fixed_dictionaries({"text": texts}, optional={"id": st.integers(), "note": texts}), max_size=12)
BOM = b"\xef\xbb\xbf"


def encoded(rows: list[dict[str, Any]], end: str, *, ascii_only: bool = False, closed: bool = True) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=ascii_only) + end for row in rows)[
        : None if closed else -len(end)
    ].encode()


@given(rows=rows, end=st.sampled_from(["\n", "\r\n", "\r"]), ascii_only=st.booleans(), closed=st.booleans())
def test_what_mlx_lm_reads_is_read_the_same(
    tmp_path_factory: pytest.TempPathFactory, *, rows: list[Any], end: str, ascii_only: bool, closed: bool
) -> None:
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    path.write_bytes(encoded(rows, end, ascii_only=ascii_only, closed=closed or not rows))
    with path.open(encoding="utf-8") as file:
        theirs = [json.loads(line) for line in file]
    assert theirs == rows
    with path.open("rb") as raw:
        assert [parse(line) for line in lines(raw)] == rows
    index = JsonlIndex.of(path, path.parent / "index")
    assert index.rows(list(range(len(index)))) == rows
    report = read_lines(path, KEYS)
    assert (report["examples"], report["faults"]) == (len(rows), [])
    assert probe_examples(str(path), json.dumps(KEYS)) == {"examples": len(rows), "converted": None}
    assert has_examples(path, max(1, len(rows))) == bool(rows)
    assert [line_number(path, number) for number in range(len(rows))] == list(range(1, len(rows) + 1))


@given(rows=rows, end=st.sampled_from(["\n", "\r\n", "\r"]), blanks=st.lists(st.integers(0, 12), max_size=4))
def test_a_byte_order_mark_and_blank_lines_lose_no_row(rows: list[Any], end: str, blanks: list[int]) -> None:
    pieces = [json.dumps(row) for row in rows]
    for place in blanks:
        pieces.insert(min(place, len(pieces)), "  ")
    raw = BOM + end.join(pieces).encode()
    assert foreign_kind(raw) is None
    assert [parse(line) for line in lines(io.BytesIO(raw)) if not is_blank(line)] == rows


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{text}", "is no JSON: Expecting property name"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"[1]", "is no JSON object"),
        (b"[" * 100_000, "is nested too deep"),
    ],
)
def test_a_line_that_is_no_row_says_why(line: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(line)


@given(text=st.text(st.characters(), max_size=20))
def test_half_of_a_surrogate_pair_is_what_utf_8_cannot_hold(text: str) -> None:
    halves = any("\ud800" <= character <= "\udfff" for character in text)
    assert (half_pair([text]) is not None) is halves
    # json joins both halves of a pair that follow one another.
    line = json.dumps({"text": text}).encode()
    assert half_pair(parse(line)["text"], line) == half_pair(json.loads(line)["text"])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"document": "a", "summary": "b"}, "it has document, summary; say what they are in [data] columns"),
        ({"a\r\x1b[2J": 1, "b": 2}, "it has a\\r\\u001b[2J, b"),
        ({}, "it has no key"),
    ],
)
def test_rows_of_another_form_name_their_keys(row: dict[str, Any], named: str) -> None:
    fault = fault_of(row, form_of(row, KEYS), KEYS)
    assert fault is not None and named in fault and fault.isprintable()
