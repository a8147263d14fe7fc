"""What a visit to a GPU machine has shown: one JSON line for each figure, written at once, and the table of the newest.

`results.jsonl` is only appended to, so that a visit that is cut off leaves what it had, and a later one adds to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

RESULTS: Final = "results.jsonl"
RECORDINGS: Final = "recordings.jsonl"
TABLE: Final = str(Path(RESULTS).with_suffix(".md"))
LOG: Final = "log"
MOST_TEXT: Final = 200_000
"""Characters of one recording; of a longer text the beginning and the end are kept."""
MOST_BYTES: Final = 12 << 20
"""Of each file of a visit: what carries them back may take no more than 16 MiB of each."""


class Status(StrEnum):
    """How a figure or a part ended."""

    OK = "ok"
    FAILED = "failed"
    MEASURED = "measured"
    """A figure that has no target."""
    ENDED = "ended"
    """A part that ended by itself; its figures say the rest."""
    CANNOT = "cannot"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """A figure, or, with name "", how a part ended."""

    time: str
    visit: str
    part: str
    name: str
    status: str
    value: str | float | int = ""
    unit: str = ""
    target: str = ""
    note: str = ""
    what: str = ""
    dry: bool = False


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")


def append_line(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON line, on the disk when this returns. A file that is full takes no more (see MOST_BYTES); what a full
    disk does not take is printed, and the visit goes on."""
    line = (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode(errors="replace")
    try:
        with path.open("ab+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            # A line that a full disk has cut does not spoil the next one.
            cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            if size + len(line) <= MOST_BYTES:
                file.write(b"\n" * cut + line)
                os.fsync(file.fileno())
    except OSError as error:
        print(f"{path} does not take this ({error.strerror}): {line.decode()}", flush=True)


def append_row(out: Path, row: Row) -> None:
    append_line(out / RESULTS, asdict(row))


def read_rows(out: Path) -> list[Row]:
    """All rows, the oldest first; a torn line of a visit that was cut off is skipped."""
    rows = []
    for line in (
        (out / RESULTS).read_text(encoding="utf-8", errors="replace").split("\n") if (out / RESULTS).exists() else ()
    ):
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """The newest row of each name of each part, the parts in the order in which they first came."""
    kept: dict[tuple[str, str], Row] = {}
    for row in rows:
        kept[row.part, row.name] = row
    order = list(dict.fromkeys(part for part, _ in kept))
    return sorted(kept.values(), key=lambda row: order.index(row.part))


def is_failure(row: Row) -> bool:
    """A part that could not run, or did not, has proved nothing; on CPU builds (dry) that is no failure."""
    return row.status == Status.FAILED or (not row.dry and row.status in (Status.CANNOT, Status.NOT_RUN))


def shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def table(rows: Sequence[Row]) -> str:
    """The newest rows as a Markdown table; of a part that ended by itself its figures alone."""
    lines = ["| part | what | figure | target | verdict | when |", "|---|---|---|---|---|---|"]
    for row in newest(rows):
        if not row.part or (row.name == "" and row.status == Status.ENDED):
            continue
        figure = f"{shown(row.value)} {row.unit}".strip()
        verdict = f"{row.status}: {row.note}" if row.note else row.status
        cells = (row.part, row.name or row.what, figure, row.target, verdict, row.time[:16])
        lines.append("| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |")
    return "\n".join(lines)


def write_table(out: Path) -> str:
    """Write the table below one line for each visit: its time, command and machine. Returns the table."""
    rows = read_rows(out)
    visits = [
        f"{row.time}: `python -m tests.gpu {row.value}`{' (dry: CPU builds, no GPU)' if row.dry else ''}; {row.note}"
        for row in rows
        if not row.part
    ]
    text = table(rows)
    partial = out / f".{TABLE}"
    try:
        partial.write_text("\n\n".join([*visits, text, ""]), encoding="utf-8")
        partial.replace(out / TABLE)
    except OSError as error:
        print(f"{out / TABLE} is not written: {error.strerror}", flush=True)
    return text


def shortened(text: str) -> str:
    half = MOST_TEXT // 2
    return text if len(text) <= MOST_TEXT else f"{text[:half]}\n… {len(text) - 2 * half:,} characters …\n{text[-half:]}"
