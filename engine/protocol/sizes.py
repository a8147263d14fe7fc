"""Sizes on disks and networks, in powers of 1000, as head and nodes write them."""

from __future__ import annotations

_SPARE_BYTES = 64 * 10**6


def size_text(count: float) -> str:
    """Bytes in the unit that fits: "812 B", "1.5 MB", "512 GB"."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        # Below, it would be rounded to 1000.
        if abs(amount) >= 999.5:
            amount, unit = amount / 1000, larger
    return f"{amount:,.0f} {unit}" if unit == "B" or abs(amount) >= 99.95 else f"{amount:.1f} {unit}"


def room_fault(need: int, free: int) -> str | None:
    """Why `need` more bytes are not written to a disk of which `free` are free; None where they are."""
    if need == 0 or need + _SPARE_BYTES <= free:
        return None
    missing = size_text(need + _SPARE_BYTES - free)
    return f"it takes {size_text(need)}, and {size_text(_SPARE_BYTES)} in reserve: {missing} more than are free"
