"""The rule of worker consistency, apart from where the hashes come from: who agrees, with what, and what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Hashes = Mapping[str, str | None]
"""Item → its SHA-256; None where there is no such item. An item that is not in it is not known."""


class Decision(Enum):
    """What follows for a launch."""

    AGREE = "agree"
    TOLERATE = "tolerate"
    """Some differ, and no more than the threshold allows: a warning."""
    EXCLUDE = "exclude"
    """The divergent are left out and the plan is made again."""
    BLOCK = "block"


@dataclass(frozen=True)
class Agreement:
    """How far the workers agree."""

    reference: dict[str, str | None] | None
    """None when it could not be found: as many workers have one thing as another."""
    source: Literal["head", "plurality"] | None
    agreeing: tuple[str, ...]
    divergent: tuple[str, ...]

    @property
    def workers(self) -> int:
        return len(self.agreeing) + len(self.divergent)

    @property
    def ratio(self) -> float:
        """Agreeing over all, 0 to 1."""
        return len(self.agreeing) / self.workers


def agreement(workers: Mapping[str, Hashes], head: Hashes) -> Agreement:
    """Compare what the workers have with what the head has; where the head has none, with what most workers have
    together, the plurality. Raises ValueError when there are no workers."""
    if not workers:
        raise ValueError("there are no workers to compare")
    items = sorted({item for hashes in (*workers.values(), head) for item in hashes})
    unknown = [item for item in items if item not in head]
    reference = {item: head[item] for item in items if item in head}
    if unknown:
        most = _plurality([tuple(hashes.get(item) for item in unknown) for hashes in workers.values()])
        if most is None:
            return Agreement(None, None, (), tuple(workers))
        reference |= dict(zip(unknown, most, strict=True))
    agreeing = tuple(
        name for name, hashes in workers.items() if all(hashes.get(item) == reference[item] for item in items)
    )
    divergent = tuple(name for name in workers if name not in agreeing)
    return Agreement(reference, "plurality" if unknown else "head", agreeing, divergent)


def decide(found: Agreement, threshold: float, *, exclude_divergent: bool) -> Decision:
    """`threshold` is inclusive. More than half divergent always blocks, as does a reference that cannot be found."""
    if not found.divergent:
        return Decision.AGREE
    if found.reference is None or 2 * len(found.divergent) > found.workers:
        return Decision.BLOCK
    if exclude_divergent:
        return Decision.EXCLUDE
    return Decision.TOLERATE if found.ratio >= threshold else Decision.BLOCK


def _plurality(held: list[tuple[str | None, ...]]) -> tuple[str | None, ...] | None:
    """What more workers have than have any other thing; None when there is no such."""
    (most, count), *others = Counter(held).most_common(2)
    return None if others and others[0][1] == count else most
