"""The states that lie on the ranks' disks, as far as their manifests can be believed, and which of them are whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .checkpoint.errors import Refused
from .rescued import Author

MOST_PARTS = 1000


@dataclass(frozen=True)
class Facts:
    """What a manifest says of the training, as far as it can be believed."""

    iteration: int
    part: int
    parts: int
    window: dict[str, Any]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Facts:
        """Raises Refused for what no training of ours has written."""
        iteration, part, parts, window = (state.get(key) for key in ("iteration", "part", "parts", "window"))
        if not (type(iteration) is type(part) is type(parts) is int and isinstance(window, dict)):
            raise Refused("its manifest does not say of which iteration it is")
        if not (iteration >= 0 and 0 <= part < parts <= MOST_PARTS):
            raise Refused(f"its manifest says iteration {iteration}, part {part} of {parts}")
        if not all(isinstance(value, int | float) for value in window.values()):
            raise Refused("its manifest counts what is no number")
        return cls(iteration, part, parts, window)


@dataclass(frozen=True)
class Candidate:
    """A state, or a part of one, that is whole as far as names and sizes tell."""

    source: str
    path: Path
    update: int
    facts: Facts
    author: Author | None
    digest: int

    @property
    def row(self) -> Row:
        facts = self.facts
        return Row(
            self.update, facts.parts, facts.part, self.source, facts.iteration, facts.window, self.author, self.digest
        )


class Row(NamedTuple):
    """What the other ranks are told of a candidate, as a list of JSON values."""

    update: int
    parts: int
    part: int
    source: str
    iteration: int
    window: dict[str, Any]
    author: Author | None
    digest: int

    @classmethod
    def told(cls, values: Sequence[Any]) -> Row:
        """As JSON gives it back."""
        row = cls(*values)
        return row if row.author is None else row._replace(author=Author(*row.author))


Holder = tuple[int, int]
"""A rank, and which of its rows."""


@dataclass(frozen=True)
class Whole:
    """A state of which every part lies somewhere."""

    update: int
    holders: tuple[tuple[Holder, ...], ...]
    """Of each part: all who have it, the rank of its number first."""


def wholes(rows: Sequence[Sequence[Row]]) -> list[Whole]:
    """All whole states in `rows` (every rank's candidates), newest first; of one update, that in the fewest parts."""
    found: dict[tuple[int, int], dict[int, list[Holder]]] = {}
    for rank, candidates in enumerate(rows):
        for place, row in enumerate(candidates):
            found.setdefault((row.update, row.parts), {}).setdefault(row.part, []).append((rank, place))
    return [
        Whole(update, tuple(tuple(sorted(held[part], key=lambda one: (one[0] != part, one))) for part in range(parts)))
        for (update, parts), held in sorted(found.items(), key=lambda entry: (-entry[0][0], entry[0][1]))
        if len(held) == parts
    ]
