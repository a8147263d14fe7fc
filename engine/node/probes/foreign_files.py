"""Files that hold something else than JSON lines, by their first bytes, whatever they are called."""

from __future__ import annotations

from pathlib import Path

from engine.protocol.jsonl import BLANK, is_blank, lines

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
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"version https://git-lfs": "a Git LFS pointer (git lfs pull)",
    b"<!": "a web page",
    b"<html": "a web page",
}


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
