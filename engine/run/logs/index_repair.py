"""Finds which records of the line indices are true after a crash, and which are missing. Changes no file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.run.logs.line_index import HEADER, OFFSET_BITS, OFFSET_MASK, RECORD, IndexEntry

_RECORD_TYPE: Final = np.dtype([("place", "<u8"), ("at", "<u4")])

Records = npt.NDArray[Any]
"""A vector of _RECORD_TYPE."""


def sound_records(index: Path, source: int, log_size: int) -> tuple[int, IndexEntry | None]:
    """How many records, from the first on, are of this source, in order and inside its log; and the last of them."""
    records = _records(index)
    offsets = records["place"] & np.uint64(OFFSET_MASK)
    sound = (records["place"] >> np.uint64(OFFSET_BITS) == source) & (offsets < log_size)
    sound[1:] &= (offsets[1:] > offsets[:-1]) & (records["at"][1:] >= records["at"][:-1])
    count = records.size if sound.all() else int(np.argmin(sound))
    if not count:
        return 0, None
    return count, IndexEntry(source, int(offsets[count - 1]), int(records["at"][count - 1]))


def missing_records(merged: Path, sources: Sequence[Path]) -> bytes | None:
    """The sources' records that the merged index lacks at its end; None when it contradicts them."""
    added = _records(merged)
    kept = 0
    lacking: list[Records] = []
    sound = added.size == 0 or bool((added["at"][1:] >= added["at"][:-1]).all())
    for part in map(_records, sources):
        if not part.size:
            continue
        own = added[added["place"] >> np.uint64(OFFSET_BITS) == part["place"][0] >> np.uint64(OFFSET_BITS)]
        sound = sound and own.size <= part.size and bool((own == part[: own.size]).all())
        kept += own.size
        lacking.append(part[own.size :])
    missing = _by_arrival(lacking)
    if missing.size and added.size and missing["at"][0] < added["at"][-1]:
        sound = False
    return missing.tobytes() if sound and kept == added.size else None


def all_records(sources: Sequence[Path]) -> bytes:
    """The records of all sources, by time of arrival."""
    return _by_arrival([_records(source) for source in sources]).tobytes()


def _by_arrival(parts: list[Records]) -> Records:
    together = np.concatenate([np.empty(0, _RECORD_TYPE), *parts])
    return together[np.argsort(together["at"], kind="stable")]


def _records(index: Path) -> Records:
    count = (index.stat().st_size - HEADER.size) // RECORD.size
    if count <= 0:
        return np.empty(0, _RECORD_TYPE)
    return np.memmap(index, _RECORD_TYPE, "r", HEADER.size, (count,))
