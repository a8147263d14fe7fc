"""Every line of a growing file is read once and whole, whatever a kill or a full disk did to its end."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from engine.run.json_lines import LineTail


def test_a_missing_file_has_no_lines_yet(tmp_path: Path) -> None:
    tail = LineTail(tmp_path / "x")
    assert list(tail.lines()) == []
    (tmp_path / "x").write_bytes(b"a\n")
    assert list(tail.lines()) == [b"a"]


@given(content=st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=20), data=st.data())
def test_lines_come_once_however_the_bytes_arrive(
    tmp_path_factory: object, content: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tail") / "x"  # type: ignore[attr-defined]
    whole = b"".join(line + b"\n" for line in content)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    tail, seen = LineTail(path), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        with path.open("ab") as file:
            file.write(whole[start:end])
        seen += list(tail.lines())
    assert seen == content


def test_a_torn_line_that_is_cut_off_and_written_anew_is_read_as_it_is_then(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": 1}\n{"b"')
    tail = LineTail(path)
    assert list(tail.objects()) == [{"a": 1}]
    path.write_bytes(b'{"a": 1}\n{"c": 3}\n')
    assert list(tail.objects()) == [{"c": 3}]


def test_a_line_longer_than_a_block_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * (9 << 20) + b"\nshort\n")
    assert [len(line) for line in LineTail(path).lines()] == [9 << 20, 5]


def test_what_is_no_object_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b'{"a": 1}\nnot json\n[1]\n\xff\n\n{"b": 2}\n')
    assert list(LineTail(path).objects()) == [{"a": 1}, {"b": 2}]
