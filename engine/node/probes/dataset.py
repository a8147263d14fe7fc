"""The `jsonl` and `examples` probes: JSONL files, read as mlx-lm would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.node.probes import did_you_mean, reason_of
from engine.node.source_files import DataError
from engine.node.standard_data import standard_files
from engine.protocol.attempt import open_regular
from engine.protocol.jsonl import NOT_UTF8, content_of, fault_of, form_of, half_pair, is_blank, lines, parse

FAULT_LIMIT = 50
SHOWN = 60
"""Characters of a bad line."""
_COMPARED = 200_000
"""Most rows per file that are compared with others: their hashes take some 20 MB."""


def count(tally: dict[str, list[int]], what: str, number: int) -> int:
    """Add a row to a tally, what → [how many rows, the first one's line], which has the "rows" that were looked at and
    "more" if there are others; returns how many there are now."""
    tally.setdefault(what, [0, number])[0] += 1
    return tally[what][0]


class DataRow(NamedTuple):
    """One line that is not blank: of one with a fault, nothing but that and the line is known."""

    number: int
    line: bytes
    fault: str | None
    form: str | None
    row: dict[str, Any]
    content: Any
    """Its text or messages."""


def read_rows(file: Iterable[bytes], keys: Mapping[str, str]) -> Iterator[DataRow]:
    form: str | None = None
    for number, line in enumerate(lines(file), 1):
        if is_blank(line):
            continue
        try:
            row = parse(line)
        except ValueError as error:
            yield DataRow(number, line, str(error), form, {}, None)
            continue
        form = form or form_of(row, keys)
        fault = fault_of(row, form, keys)
        content = content_of(row, form, keys) if fault is None else None
        yield DataRow(number, line, fault or half_pair((content, row.get("tools")), line), form, row, content)


def _count(tally: dict[str, list[int]], row: DataRow, trained: set[int], in_file: set[int]) -> None:
    """`trained`, `in_file`: hashes of the rows of train.jsonl, and of this file's, which are added."""
    if row.form == "chat" and row.content[-1]["role"] != "assistant":
        count(tally, "last_turn", row.number)
    if row.form == "chat" and any(message.get("weight", 1) != 1 for message in row.content):
        count(tally, "weight", row.number)
    if len(in_file) == _COMPARED:
        tally["more"] = [1, row.number]
        return
    count(tally, "rows", row.number)
    seen = hash(json.dumps((row.content, row.row.get("tools")), sort_keys=True))
    if seen in in_file or seen in trained:
        count(tally, "repeated" if seen in in_file else "in_train", row.number)
    in_file.add(seen)


def read_lines(path: Path, keys: dict[str, str], trained: set[int] | None = None) -> dict[str, Any]:
    """A JsonlSummary of the head's: `lines` are counted as sed does, `examples` without blank ones, which the trainer
    skips, and a fault shows how its line begins. `trained`: hashes of the rows of train.jsonl, which fills it."""
    digest, tally = hashlib.sha256(), dict[str, list[int]]()
    faults: list[tuple[int, str]] = []
    number = examples = fault_count = size = 0
    form, kind, utf8 = None, None, set[bool]()
    trained = set() if trained is None else trained
    in_file = trained if path.name == "train.jsonl" else set()

    def hashed(file: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal number, size
        for number, line in enumerate(file, 1):  # noqa: B007
            digest.update(line)
            size += len(line)
            yield line

    with open_regular(path) as file:
        for row in read_rows(hashed(file), keys):
            examples, form = examples + 1, form or row.form
            kind = "lines that end in CR" if row.line.endswith(b"\r") else kind
            if not row.line.isascii():
                utf8.add(row.fault != NOT_UTF8)
            if row.fault is None:
                _count(tally, row, trained, in_file)
                continue
            fault_count += 1
            if len(faults) < FAULT_LIMIT:
                faults.append((row.number, f"{row.fault}: {row.line.decode('utf-8-sig', 'replace').strip()[:SHOWN]}"))
    return {
        "lines": number,
        "examples": examples,
        "sha256": digest.hexdigest(),
        "bytes": size,
        "form": form,
        "faults": faults,
        "fault_count": fault_count,
        "foreign": "Windows-1252" if utf8 == {False} else kind,
        "tally": tally,
    }


def place_problem(path: Path) -> str | None:
    """Why there is no folder for a file of examples."""
    folder = path.parent
    return None if folder.is_dir() else f"there is no {folder}{did_you_mean(folder, 'train.jsonl')}"


def check_file(path: Path, keys: dict[str, str], trained: set[int] | None = None) -> dict[str, Any]:
    """`read_lines`, or the `problem` that prevents it, and whether the file is `absent`."""
    try:
        if (problem := place_problem(path)) is not None:
            return {"problem": problem, "absent": False}
        if not path.exists():
            return {"problem": f"{path} is missing{did_you_mean(path)}", "absent": True}
        return read_lines(path, keys, trained)
    except OSError as error:
        return {"problem": f"{path} cannot be read: {reason_of(error, path)}", "absent": False}


def probe_jsonl(keys: str, *files: str) -> dict[str, Any]:
    """`files` in the order of the arguments, train.jsonl first, of the folder of what is called as theirs (its
    `conversion`). `keys` is JSON, the options of engine.node.standard_data."""
    options, trained = json.loads(keys), set[int]()
    try:
        paths, conversion = standard_files(files, options)
    except DataError as error:
        return {"files": [{"problem": str(error), "absent": False}] * len(files)}
    reports = [{**check_file(path, options, trained), "path": str(path)} for path in paths]
    return {"files": reports, "conversion": conversion}


def probe_examples(file: str, keys: str) -> dict[str, Any]:
    """`examples` (lines that are not blank), and `converted`, the name of the folder that is made of the data; or
    `problem`. Of standard files nothing is parsed: millions take a moment. `keys`: as for `probe_jsonl`."""
    try:
        (path,), about = standard_files([file], json.loads(keys))
        with open_regular(path) as opened:
            count = sum(1 for line in lines(opened) if not is_blank(line))
        return {"examples": count, "converted": path.parent.name if about is not None else None}
    except DataError as error:
        return {"problem": str(error)}
    except OSError as error:
        return {"problem": place_problem(Path(file)) or f"{file}: {reason_of(error, Path(file))}"}
