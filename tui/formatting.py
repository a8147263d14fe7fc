"""Figures as words, for the command line and the panes alike: durations, ages, sizes, and plain text tables."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

NOT_MEASURED = "-"
"""What is shown for None: "not measured", never a guess."""


def duration(seconds: float | None) -> str:
    """ "0:42", "41:12" or "26:03:07"; whole seconds, rounded down."""
    if seconds is None:
        return NOT_MEASURED
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(then: datetime | None, now: datetime) -> str:
    """How long ago, in its largest unit: "12 s", "3 min", "2 h", "5 d"; "now" below a second or in the future."""
    if then is None:
        return NOT_MEASURED
    seconds = (now - then).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def size(count: int | float | None) -> str:
    """Bytes with a decimal unit: "812 B", "1.5 MB", "512 GB"."""
    if count is None:
        return NOT_MEASURED
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or unit == "TB":
            return f"{amount:.0f} {unit}" if unit == "B" or abs(amount) >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")


def loss(value: float | None) -> str:
    """Four significant places: what mlx-lm prints, with room for small ones."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


def rate(value: float | None, unit: str = "tok/s") -> str:
    """A throughput: whole from 100 on, else with one decimal."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def throughput(examples_per_s: float | None) -> str:
    """Examples per second: two decimals below 10, where a large model's are."""
    if examples_per_s is None:
        return NOT_MEASURED
    return f"{examples_per_s:.2f} ex/s" if examples_per_s < 10 else rate(examples_per_s, "ex/s")


def latency(seconds: float | None) -> str:
    """ "48 µs", "1.2 ms", "0.42 s"."""
    if seconds is None:
        return NOT_MEASURED
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def bandwidth(bytes_per_s: float | None) -> str:
    """ "8.1 GB/s"."""
    return NOT_MEASURED if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def spread(variation: float | None) -> str:
    """A coefficient of variation: "±2 %"."""
    return NOT_MEASURED if variation is None else f"±{variation * 100:.0f} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, two spaces apart, no trailing blanks; the last column is never padded."""
    grid = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[column]) for row in grid) for column in range(len(headers))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid)
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` columns, its end replaced by "…" where it is longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
