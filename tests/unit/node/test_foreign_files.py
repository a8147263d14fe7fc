"""A file that holds something else than JSON lines is recognised, whatever it is called."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.node.source_files import foreign_kind

ROWS = [{"text": "tower, hold"}, {"text": 'Ünd "so" \u2028 ü'}, {"text": "new\nline; 'x'"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def table(delimiter: str, **options: str) -> bytes:
    file = io.StringIO()
    writer = csv.DictWriter(file, ["text", "id"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows([{**row, "id": "7"} for row in ROWS])
    return file.getvalue().encode(**options)


def zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, LINES)
    return file.getvalue()


MADE: dict[str, bytes] = {
    "gzip": gzip.compress(LINES.encode()),
    "bzip2": bz2.compress(LINES.encode()),
    "xz": lzma.compress(LINES.encode()),
    "a zip archive": zipped("train.jsonl"),
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16 (little-endian)": LINES.encode("utf-16-le"),
    "UTF-16 (big-endian)": LINES.encode("utf-16-be"),
    "UTF-32": LINES.encode("utf-32"),
    "a JSON array": json.dumps(ROWS, indent=1).encode("utf-8-sig"),
    "JSON over several lines": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "CSV": table(","),
    "CSV with tabs": table("\t", encoding="utf-8-sig"),
    "CSV with semicolons": table(";"),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_file_of_another_kind_is_recognised(kind: str) -> None:
    assert foreign_kind(MADE[kind]) == kind


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"PAR1\x15\x04", "Parquet"),
        (b"\x28\xb5\x2f\xfd\x00", "Zstandard"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a Git LFS pointer (git lfs pull)"),
        (b"<!DOCTYPE html>\n<html>", "a web page"),
    ],
)
def test_others_are_recognised_by_their_first_bytes(head: bytes, kind: str) -> None:
    assert foreign_kind(head) == kind


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xef\xbb\xbf",
        b"[1, 2]\n{}\n",
        b'{"text": "cut\n{"text": "a"}\n',
        b'hello, world\n{"text": "a"}\n',
        b"{not json\n",
        b'{"text": "a"}\r{"text": "b"}',
    ],
)
def test_json_lines_with_bad_ones_among_them_stay_json_lines(raw: bytes) -> None:
    assert foreign_kind(raw) is None


values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda each: st.lists(each, max_size=3))


@given(rows=st.lists(st.dictionaries(st.text(), values, max_size=4), max_size=6), ascii_only=st.booleans())
def test_json_lines_are_never_taken_for_something_else(rows: list[dict[str, Any]], ascii_only: bool) -> None:
    text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    assert foreign_kind(text.encode("utf-8", errors="surrogatepass")) is None


@given(
    rows=st.lists(st.fixed_dictionaries({"text": st.text(min_size=1)}), min_size=2, max_size=5),
    indent=st.none() | st.just(2),
)
def test_arrays_and_other_encodings_are_recognised(rows: list[dict[str, str]], indent: int | None) -> None:
    array = json.dumps(rows, indent=indent)
    assert foreign_kind(array.encode()) == "a JSON array"
    lines = "\n".join(map(json.dumps, rows))
    assert foreign_kind(lines.encode("utf-16-le")) == "UTF-16 (little-endian)"
    assert foreign_kind(lines.encode("utf-16")) == "UTF-16"
