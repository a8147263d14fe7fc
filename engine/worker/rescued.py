"""Whether the states that an attempt's ranks have rescued of one update still are replicas of one another.

Between two comparisons of the replicas a parameter may have been corrupted; what was rescued then tells of it. States
of different attempts may differ: another number of ranks sums in another order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .checkpoint.manifest import Manifest
from .replicas import differing

_DIGEST_BYTES = 8


class Author(NamedTuple):
    """Who has rescued a state."""

    attempt: int
    rank: int
    """In that attempt: the ranks of this one may be others."""


@dataclass(frozen=True)
class Verdict:
    """Of the states of one attempt that differ."""

    attempt: int
    ranks: tuple[int, ...]
    """Those that a majority outvotes, or all where there is none."""
    certain: bool
    """Whether there is a majority."""


def digest(manifest: Manifest) -> int:
    """Of all its files' hashes."""
    said = "".join(sorted(f"{entry.name} {entry.sha256}\n" for entry in manifest.files))
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=_DIGEST_BYTES).digest(), "little")


def judged(states: Iterable[tuple[Author, int]]) -> list[Verdict]:
    """Of each attempt whose `states` (author, digest) of one update differ. One that is told twice, as by two ranks of
    one node, counts once."""
    attempts: dict[int, dict[int, int]] = {}
    for author, said in states:
        attempts.setdefault(author.attempt, {})[author.rank] = said
    verdicts = []
    for attempt, told in sorted(attempts.items()):
        ranks = sorted(told)
        if (found := differing([[told[rank]] for rank in ranks], None)) is not None:
            verdicts.append(Verdict(attempt, tuple(ranks[place] for place in found.ranks), found.certain))
    return verdicts
