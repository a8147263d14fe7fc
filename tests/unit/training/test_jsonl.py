"""Lines found by an index on disk: which there are, which are bad, and that a file must stay as it was."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol.job import JobError
from engine.training import jsonl
from engine.training.jsonl import JsonlIndex, has_examples

pieces = st.lists(st.sampled_from(["", "  ", "\r", '{"text": "a"}', '{"text": "bé"} ', '{"n": 1}\r']), max_size=40)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def texts(index: JsonlIndex, indices: list[int]) -> list[str]:
    return [row["text"] for row in index.rows(indices)]


@given(lines=pieces, ends=st.booleans())
def test_the_index_finds_what_reading_all_would(
    tmp_path_factory: pytest.TempPathFactory, *, lines: list[str], ends: bool
) -> None:
    directory = tmp_path_factory.mktemp("data")
    raw = ("\n".join(lines) + "\n" * ends).encode()
    (directory / "train.jsonl").write_bytes(raw)
    expected = [json.loads(line) for line in raw.split(b"\n") if line.strip()]
    index = JsonlIndex.of(directory / "train.jsonl", directory / "index")
    assert len(index) == len(expected)
    assert index.rows(list(range(len(expected)))) == expected
    assert index.checksum == zlib.crc32(raw)
    assert has_examples(directory / "train.jsonl", max(1, len(expected))) == bool(expected)
    assert not has_examples(directory / "train.jsonl", len(expected) + 1)


def test_examples_and_lengths_by_number(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [str(number) for number in range(100)])
    index = JsonlIndex.of(path, tmp_path / "index")
    assert texts(index, [99, 0, 50, 7, 6]) == ["99", "0", "50", "7", "6"]


def test_what_is_counted_of_examples_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_COUNTED", 40)
    index = JsonlIndex.of(write(tmp_path / "train.jsonl", [str(number) for number in range(100)]), tmp_path / "index")
    asked: list[range] = []

    def count(examples: range) -> list[int]:
        asked.append(examples)
        return [7 * example for example in examples]

    for _ in range(2):
        assert index.counts(5, 95, 1, count).tolist() == [7 * number for number in range(5, 95)]
    assert asked == [range(5, 45), range(45, 85), range(85, 95)]
    index.counts(5, 95, 2, count)
    assert len(asked) == 6, "by another tokenizer they are counted again"
    (kept,) = (tmp_path / "index").glob("*-00000001.counts")
    for left in (80, 83):
        os.truncate(kept, left)
        assert index.counts(5, 95, 1, count).tolist() == [7 * number for number in range(5, 95)]
    assert len(asked) == 12


@pytest.mark.parametrize(
    ("line", "why"), [("{text}", "is no JSON: Expecting property name"), ("[1]", "is no JSON object")]
)
def test_a_bad_line_is_named_before_anything_is_trained(tmp_path: Path, line: str, why: str) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    path.write_text(f"{path.read_text()}\n\n{line}\n")
    with pytest.raises(JobError, match=f"train.jsonl, line 5 {why}"):
        JsonlIndex.of(path, tmp_path / "index")
    assert list((tmp_path / "index").iterdir()) == []


def test_the_next_attempt_reads_the_index_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b", "c"])
    first = JsonlIndex.of(path, tmp_path / "index")

    def never(*_: object) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(jsonl, "_write_offsets", never)
    again = JsonlIndex.of(path, tmp_path / "index")
    assert (len(again), again.checksum, texts(again, [2])) == (3, first.checksum, ["c"])


@pytest.mark.parametrize(
    "damage", ["offsets cut", "offsets changed", "offsets gone", "document torn", "document alien"]
)
def test_a_damaged_index_is_made_anew(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b", "c"])
    JsonlIndex.of(path, tmp_path / "index")
    (offsets,), (document,) = ((tmp_path / "index").glob(pattern) for pattern in ("*.offsets", "*.json"))
    match damage:
        case "offsets cut":
            offsets.write_bytes(offsets.read_bytes()[:-8])
        case "offsets changed":
            offsets.write_bytes(offsets.read_bytes()[:-1] + b"\x01")
        case "offsets gone":
            offsets.unlink()
        case "document torn":
            document.write_bytes(document.read_bytes()[:-9])
        case _:
            document.write_text('{"version": 1, "offsets": 7, "stamp": []}')
    index = JsonlIndex.of(path, tmp_path / "index")
    assert texts(index, [0, 1, 2]) == ["a", "b", "c"]


def test_a_changed_file_is_indexed_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    before = JsonlIndex.of(path, tmp_path / "index")
    write(path, ["a", "b", "c"])
    after = JsonlIndex.of(path, tmp_path / "index")
    assert (len(before), len(after)) == (2, 3)
    assert before.checksum != after.checksum


def later(path: Path) -> None:
    """Give `path` another time, as a clock would."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


@pytest.mark.parametrize("change", ["same size", "appended", "replaced"])
def test_a_file_that_changes_under_a_training_is_noticed(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    index = JsonlIndex.of(path, tmp_path / "index")
    match change:
        case "same size":
            write(path, ["a", "c"])
        case "appended":
            write(path, ["a", "b", "c"])
        case _:
            os.replace(write(tmp_path / "other", ["x", "y"]), path)
    later(path)
    with pytest.raises(JobError, match=r"train\.jsonl has changed since its examples were indexed"):
        index.rows([0])


def test_the_same_bytes_are_no_change(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    index = JsonlIndex.of(path, tmp_path / "index")
    os.replace(write(tmp_path / "other", ["a", "b"]), path)
    later(path)
    assert texts(index, [1]) == ["b"]


def test_a_file_that_goes_away_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    index = JsonlIndex.of(path, tmp_path / "index")
    path.unlink()
    with pytest.raises(JobError, match=r"train\.jsonl can no longer be read: .*No such file"):
        index.rows([0])


@pytest.mark.parametrize("kept", [16, 13])
def test_offsets_that_are_cut_under_a_training_are_noticed(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path / "train.jsonl", ["a", "b"])
    index = JsonlIndex.of(path, tmp_path / "index")
    (offsets,) = (tmp_path / "index").glob("*.offsets")
    os.truncate(offsets, kept)
    with pytest.raises(JobError, match="can no longer be read: 1 offsets instead of 2"):
        index.rows([kept // 16])


def test_a_line_that_cannot_be_read_later_is_named(tmp_path: Path) -> None:
    """Between the look at the file and the reading, or on a disk that lies."""
    path = write(tmp_path / "train.jsonl", ["a", "b", "c"])
    index = JsonlIndex.of(path, tmp_path / "index")
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"b('))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert texts(index, [0]) == ["a"]
    with pytest.raises(JobError, match=r"train\.jsonl, line 2 is no JSON"):
        index.rows([1])


def test_an_index_that_cannot_be_kept_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", ["a"])
    (tmp_path / "index").write_text("in the way")
    with pytest.raises(JobError, match=r"train\.jsonl could not be indexed in .*index"):
        JsonlIndex.of(path, tmp_path / "index")
