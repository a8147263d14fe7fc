"""A file called .jsonl that holds something else is recognised, and the command named for it makes JSON lines of it."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checks.dataset import DataFile, _corrected_copy
from engine.cluster.probe_results import JsonlSummary
from engine.node.probes.dataset import check_file
from engine.node.probes.foreign_files import foreign_kind

KEYS = {"prompt": "prompt", "completion": "completion", "chat": "messages", "text": "text"}
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


MADE: dict[str, tuple[bytes, str | None]] = {
    "gzip": (gzip.compress(LINES.encode()), "gunzip"),
    "bzip2": (bz2.compress(LINES.encode()), "bunzip2"),
    "xz": (lzma.compress(LINES.encode()), "xz"),
    "a zip archive": (zipped("train.jsonl"), "funzip"),
    "UTF-16": (LINES.encode("utf-16"), "iconv"),
    "UTF-16 (little-endian)": (LINES.encode("utf-16-le"), "iconv"),
    "UTF-16 (big-endian)": (LINES.encode("utf-16-be"), "iconv"),
    "UTF-32": (LINES.encode("utf-32"), "iconv"),
    "a JSON array": (json.dumps(ROWS, indent=1).encode("utf-8-sig"), None),
    "JSON over several lines": ("\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), None),
    "CSV": (table(","), None),
    "CSV with tabs": (table("\t", encoding="utf-8-sig"), None),
    "CSV with semicolons": (table(";"), None),
}


def fixed(path: Path, keys: dict[str, str] = KEYS) -> list[dict[str, Any]]:
    """The rows of the copy that the fix makes, which is read without a fault; the file itself stays as it was."""
    before = path.read_bytes()
    report = check_file(path, keys)
    summary = JsonlSummary.model_validate(report)
    fix = _corrected_copy(
        [DataFile(PurePath(path), summary, summary.problem or "bad lines")], keys["chat"], sys.executable
    )
    assert fix is not None
    subprocess.run(fix.command, shell=True, check=True)
    copy = Path(f"{path.parent}-corrected") / path.name
    again = check_file(copy, keys)
    assert again["faults"] == [] and path.read_bytes() == before
    return [json.loads(line) for line in copy.read_bytes().splitlines()]


@pytest.mark.parametrize("kind", MADE)
def test_a_file_of_another_kind_is_named_and_its_fix_makes_json_lines(tmp_path: Path, kind: str) -> None:
    raw, tool = MADE[kind]
    if tool is not None and shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    path = tmp_path / "data" / "train.jsonl"
    path.parent.mkdir()
    path.write_bytes(raw)
    report = check_file(path, KEYS)
    assert report["foreign"] == kind and report["problem"].startswith(f"{path} is {kind}, no JSON lines: ")
    assert tool is None or tool in report["problem"]
    assert [{"text": row["text"]} for row in fixed(path)] == ROWS


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


def cp1252(path: Path) -> None:
    path.write_bytes("".join(f'{{"text": "caf{letter} {letter}"}}\n' for letter in "éüa").encode("cp1252"))


def sharegpt(path: Path) -> None:
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "it's"}, {"from": "gpt", "value": "b"}]
    path.write_text(json.dumps({"conversations": turns, "id": 1}) + "\n\n")


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (cp1252, {"text": "café é"}),
        (
            sharegpt,
            {
                "messages": [
                    {"from": "system", "value": "s", "role": "system", "content": "s"},
                    {"from": "human", "value": "it's", "role": "user", "content": "it's"},
                    {"from": "gpt", "value": "b", "role": "assistant", "content": "b"},
                ]
            },
        ),
    ],
)
def test_rows_of_another_form_are_converted_and_none_is_lost(
    tmp_path: Path, write: Callable[[Path], None], expected: dict[str, Any]
) -> None:
    path = tmp_path / "it's here" / "train.jsonl"
    path.parent.mkdir()
    write(path)
    count = sum(1 for line in path.read_bytes().splitlines() if line.strip())
    first, *others = fixed(path)
    assert {key: first[key] for key in expected} == expected and 1 + len(others) == count
