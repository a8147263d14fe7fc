"""Files called .jsonl that hold something else than JSON lines: known by their first bytes, converted by a command."""

from __future__ import annotations

from pathlib import Path

from engine.protocol.jsonl import BLANK, is_blank, lines

HEAD_BYTES = 64 << 10
PYTHON = "python -c "
_CSV = (
    f"{PYTHON}import csv,io,json,sys; csv.field_size_limit(2**31-1); "
    '[print(json.dumps(row)) for row in csv.DictReader(io.TextIOWrapper(sys.stdin.buffer, "utf-8-sig", newline=""), '
    "delimiter=DELIMITER)]"
)
_DELIMITERS = {b",": "CSV", b"\t": "CSV with tabs", b";": "CSV with semicolons"}
WAYS = {
    "gzip": "gunzip -c",
    "bzip2": "bunzip2 -c",
    "xz": "xz -dc",
    "Zstandard": "zstd -dc",
    "a zip archive": "funzip",
    "UTF-16": "iconv -f UTF-16 -t UTF-8",
    "UTF-16 (little-endian)": "iconv -f UTF-16LE -t UTF-8",
    "UTF-16 (big-endian)": "iconv -f UTF-16BE -t UTF-8",
    "UTF-32": "iconv -f UTF-32 -t UTF-8",
    "Windows-1252": "iconv -f WINDOWS-1252 -t UTF-8",
    "a JSON array": f"{PYTHON}import json,sys; [print(json.dumps(row)) for row in json.load(sys.stdin.buffer)]",
    "JSON over several lines": f"{PYTHON}import json,re,sys; "
    'text = "[" + re.sub(r"\\n\\}\\s*,?\\s*\\{", "\\n},{", sys.stdin.buffer.read().decode("utf-8-sig")) + "]"; '
    "[print(json.dumps(row)) for row in json.loads(text)]",
    **{kind: _CSV.replace("DELIMITER", f'"{mark.decode()}"') for mark, kind in _DELIMITERS.items()},
    "Parquet": "uv run --no-project --with pyarrow python -c 'import json,sys; from pyarrow import parquet; "
    "[print(json.dumps(row, default=str)) for part in parquet.ParquetFile(sys.stdin.buffer).iter_batches() "
    "for row in part.to_pylist()]'",
    "lines that end in CR": "perl -pe 's/\\r\\n?/\\n/g'",
    "ShareGPT": f"{PYTHON}import json,sys; role = {{'human': 'user', 'user': 'user', 'system': 'system'}}; "
    "[print(json.dumps({**row, CHAT: [{**each, 'role': role.get(each['from'], 'assistant'), 'content': each['value']} "
    "for each in next(value for value in row.values() if isinstance(value, list))]})) "
    "for row in map(json.loads, filter(bytes.strip, sys.stdin.buffer.read().splitlines()))]",
}
"""Content of a file → a filter that makes JSON lines of it; after PYTHON code for the node's own, with CHAT for the key
of messages as JSON."""
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
    return f"{path} is {kind}, no JSON lines" + (f": `{way.split(' -c ')[0]}` converts it" if way else "")


def foreign_kind(head: bytes) -> str | None:
    """The content by the first HEAD_BYTES of a file: most often a key of WAYS; None for JSON lines, good or bad."""
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
