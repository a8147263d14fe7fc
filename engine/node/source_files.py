"""Files of examples as people have them, also compressed and in UTF-16, as a stream of rows: JSON lines, JSON, CSV,
TSV, Parquet, Arrow and text; and what else a file holds, by its first bytes, whatever it is called."""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from engine.protocol.attempt import open_regular
from engine.protocol.jsonl import BLANK, is_blank, lines, parse

HEAD_BYTES = 64 << 10
_DELIMITERS = {b",": "CSV", b"\t": "CSV with tabs", b";": "CSV with semicolons"}
WAYS = {
    "Zstandard": "zstd -dc",
    "a zip archive": "funzip",
    "Windows-1252": "iconv -f WINDOWS-1252 -t UTF-8",
    "lines that end in CR": "perl -pe 's/\\r\\n?/\\n/g'",
}
"""Content of a file that is not read → a filter that makes of it what is."""
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow with a footer",
    b"FEA1\0": "Feather of version 1",
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"version https://git-lfs": "a Git LFS pointer (git lfs pull)",
    b"<!": "a web page",
    b"<html": "a web page",
}
_COMPRESSED: dict[str, Any] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_ENCODINGS = {"UTF-16": "utf-16", "UTF-16 (little-endian)": "utf-16-le", "UTF-16 (big-endian)": "utf-16-be"}
_ENCODINGS["UTF-32"] = "utf-32"
_TABLES = (".csv", ".tsv")
TEXTS = (".txt", ".md")
OF_ROWS = (".jsonl", ".ndjson", ".json", *_TABLES, ".parquet", ".arrow", ".feather")
SUFFIXES = (*OF_ROWS, *TEXTS)
_WRAPPERS = "data|rows|examples|items|records|instances|dataset|train"
_WRAPPED = re.compile(
    rf'\s*\{{\s*(?:"[^"]*"\s*:\s*(?:"[^"]*"|[\d.]+|null|true|false)\s*,\s*)*"(?:{_WRAPPERS})"\s*:\s*\[\s*(?=\{{)'
)
"""The beginning of an object that holds the rows in a list."""
_END = re.compile(r'\]?\s*(?:,\s*"[^"]*"\s*:\s*(?:"[^"]*"|[\d.]+|null|true|false)\s*)*\}?\s*')
"""Text that may follow the rows."""
_LONGEST_SIGN = 16
"""Characters of a literal or an escape, which the end of a block may cut."""
_SEPARATORS = re.compile(r"[\s,]*")
_BLOCK = 1 << 16
"""Characters."""
_LONGEST_HEADER = 4
"""Words of a column's name."""
_ROWS = 256
"""Rows of a columnar file that are Python's values at a time."""


class DataError(ValueError):
    """Data that cannot be read: one line with the file, the row and the reason."""


class SourceRow(NamedTuple):
    place: str
    """For example "line 3"."""
    values: dict[str, Any]
    fault: str | None = None


def suffix_of(path: Path) -> str:
    """That of what is compressed, for a compressed file."""
    name = path.name.lower()
    return Path(name[: name.rindex(".")] if name.endswith((".gz", ".bz2", ".xz")) else name).suffix


def read_source(path: Path, piece: int) -> Iterator[SourceRow]:
    """The rows of a file, blank ones left out. `piece`: most characters of a text's row. Raises DataError, OSError."""
    try:
        with _opened(path) as (file, text, kind):
            if suffix_of(path) in TEXTS:
                yield from _texts(text, piece)
            elif kind in ("Parquet", "Arrow", "Arrow with a footer"):
                yield from _columns(path, file, kind)
            elif kind in MAGIC.values():
                raise DataError(foreign_problem(path, str(kind)))
            elif suffix_of(path) in _TABLES or (kind or "").startswith("CSV"):
                yield from _table(text)
            else:
                yield from _json_rows(file, text, kind)
    except UnicodeDecodeError as error:
        todo = f"if it is Windows-1252, `{WAYS['Windows-1252']}` converts it"
        raise DataError(f"{path} is not {error.encoding.upper()}: {todo}") from error
    except (EOFError, lzma.LZMAError, zlib.error, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def foreign_problem(path: Path, kind: str) -> str:
    way = WAYS.get(kind)
    return f"{path} is {kind}, which is not read" + (f": `{way}` converts it" if way else "")


def foreign_kind(head: bytes) -> str | None:
    """The content by the first HEAD_BYTES of a file: None for JSON lines, good or bad."""
    kind = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)
    zeros = [byte == 0 for byte in head[:4]]
    if kind is None and zeros in ([True, False] * 2, [False, True] * 2):
        return "UTF-16 (big-endian)" if zeros[0] else "UTF-16 (little-endian)"
    rows = [line.strip(BLANK) for line in lines(head.split(b"\n")) if not is_blank(line)]
    if kind is not None or not rows:
        return kind
    first, others = rows[0], rows[1:]
    if first[:1] == b"[":
        # A whole array in a line among others is a bad line.
        return None if others and first[-1:] == b"]" else "a JSON array"
    if first[:1] == b"{" and first[-1:] != b"}" and others and others[0][:1] in b'"}':
        return "JSON over several lines"
    delimiter = max(_DELIMITERS, key=first.count)
    table = delimiter in first and any(delimiter in row for row in others) and not any(row[:1] == b"{" for row in rows)
    return _DELIMITERS[delimiter] if table else None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, io.TextIOWrapper, str | None]]:
    """The file, decompressed, and decoded with its line ends as they are, and what it holds."""
    with open_regular(path) as raw, contextlib.ExitStack() as stack:
        file: BinaryIO = raw
        head = raw.read(HEAD_BYTES)
        kind = foreign_kind(head)
        if kind in _COMPRESSED:
            raw.seek(0)
            file = stack.enter_context(_COMPRESSED[kind](raw))
            head = file.read(HEAD_BYTES)
            kind = foreign_kind(head)
        encoding = _ENCODINGS.get(kind or "", "utf-8-sig")
        if kind in _ENCODINGS:
            kind = foreign_kind(head.decode(encoding, "ignore").lstrip("\ufeff").encode("utf-8", "replace"))
        if suffix_of(path) == ".arrow" and kind not in MAGIC.values():
            kind = "Arrow"
        file.seek(0)
        yield file, stack.enter_context(io.TextIOWrapper(file, encoding, newline="")), kind


def _texts(file: io.TextIOWrapper, piece: int) -> Iterator[SourceRow]:
    """A document, cut at the ends of paragraphs, or of lines where one is longer."""
    part, begin = "", 1
    for number, line in enumerate(file, 1):
        ends = not line.strip()
        if len(part) + len(line) > piece or (ends and len(part) > piece * 3 // 4):
            if part.strip():
                yield SourceRow(f"line {begin}", {"text": part.strip()})
            part, begin = "", number
        part += f"{line.rstrip()}\n"
    if part.strip():
        yield SourceRow(f"line {begin}", {"text": part.strip()})


def _table(file: io.TextIOWrapper) -> Iterator[SourceRow]:
    csv.field_size_limit(2**31 - 1)
    header = file.readline()
    file.seek(0)
    reader = csv.reader(file, delimiter=max(",\t;|", key=header.count), strict=True)
    names = [name.strip() for name in next(reader, [])]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise csv.Error(f"its header has {twice} twice")
    if len(names) == 1 and len(names[0].split()) > _LONGEST_HEADER:
        raise csv.Error("its first line is a text, where the header is to be")
    number = reader.line_num + 1
    try:
        for cells in reader:
            place, number = f"line {number}", reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            fault = None if len(cells) == len(names) else f"has {len(cells)} fields, and the header has {len(names)}"
            yield SourceRow(place, {} if fault else dict(zip(names, cells)), fault)  # noqa: B905  (Python 3.9)
    except csv.Error as error:
        raise csv.Error(f"line {number}: {error}") from error


def _columns(path: Path, file: BinaryIO, kind: str) -> Iterator[SourceRow]:
    try:
        import pyarrow  # noqa: PLC0415  (which may be missing)
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        todo = f"`uv pip install --python {sys.executable} pyarrow`"
        raise DataError(f"{path} is {kind}, for which pyarrow is missing: {todo}") from None
    try:
        if kind == "Parquet":
            batches = parquet.ParquetFile(file).iter_batches(batch_size=_ROWS)
        elif kind == "Arrow":
            batches = iter(pyarrow.ipc.open_stream(file))
        else:
            arrow = pyarrow.ipc.open_file(file)
            batches = map(arrow.get_batch, range(arrow.num_record_batches))
        number = 0
        for batch in batches:
            for start in range(0, batch.num_rows, _ROWS):
                for row in batch.slice(start, _ROWS).to_pylist():
                    number += 1
                    yield SourceRow(f"row {number}", row)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error


def _json_rows(file: BinaryIO, text: io.TextIOWrapper, kind: str | None) -> Iterator[SourceRow]:
    start = file.read(HEAD_BYTES).decode(text.encoding, "ignore")
    file.seek(0)
    wrapper = _WRAPPED.match(start)
    if wrapper or (kind or "").endswith(("array", "several lines")):
        yield from _values(text, wrapper.end() if wrapper else 0)
        return
    source = file if text.encoding == "utf-8-sig" else (line.encode() for line in text)
    for number, line in enumerate(lines(source), 1):
        if is_blank(line):
            continue
        try:
            yield SourceRow(f"line {number}", parse(line))
        except ValueError as error:
            yield SourceRow(f"line {number}", {}, str(error))


def _values(file: io.TextIOWrapper, skipped: int) -> Iterator[SourceRow]:
    """The objects of an array or one after the other, of which one block of text is kept at a time. `skipped`:
    characters before the first one."""
    decoder, number = json.JSONDecoder(), 0
    file.read(skipped)
    text = file.read(_BLOCK).lstrip("\ufeff \t\r\n")
    position = int(text.startswith("["))
    while True:
        while match := _SEPARATORS.match(text, position):
            position = match.end()
            if position < len(text) or not (block := file.read(_BLOCK)):
                break
            text, position = block, 0
        if position == len(text) or text[position] == "]":
            end = text[position:] + file.read(_BLOCK)
            if not _END.fullmatch(end):
                yield SourceRow(f"row {number + 1}", {}, f"is no object, but {end.lstrip('], ')[:40]!r}")
            return
        try:
            values, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            cut = isinstance(error, json.JSONDecodeError) and (
                error.msg.startswith("Unterminated") or error.pos > len(text) - _LONGEST_SIGN
            )
            if cut and (block := file.read(max(_BLOCK, len(text) - position))):
                text, position = text[position:] + block, 0
                continue
            why = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deep"
            yield SourceRow(f"row {number + 1}", {}, f"is no JSON, nor what follows: {why}")
            return
        number += 1
        if isinstance(values, dict):
            yield SourceRow(f"row {number}", values["row"] if {"row_idx", "row"} <= {*values} else values)
        else:
            yield SourceRow(f"row {number}", {}, "is no JSON object")
