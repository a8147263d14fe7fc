"""How a global batch is divided over the ranks. The standard library only: the plan divides by it, too."""

from __future__ import annotations

from collections.abc import Sequence


def share_counts(total: int, shares: Sequence[float]) -> list[int]:
    """`total` examples divided over ranks as `shares` ask, by largest remainder (Hamilton's method), at least 1 each;
    they sum to `total`.

    Raises ValueError for a share that is not above 0, or fewer examples than ranks.
    """
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise ValueError(f"shares must be above 0: {list(shares)}")
    if total < len(shares):
        raise ValueError(f"a batch of {total} is too small for {len(shares)} ranks: batch_size must be at least that")
    whole = sum(shares)
    quotas = [total * share / whole for share in shares]
    counts = [max(1, int(quota)) for quota in quotas]
    while sum(counts) < total:
        counts[max(range(len(counts)), key=lambda rank: (quotas[rank] - counts[rank], -rank))] += 1
    while sum(counts) > total:
        able = [rank for rank in range(len(counts)) if counts[rank] > 1]
        counts[max(able, key=lambda rank: (counts[rank] - quotas[rank], rank))] -= 1
    return counts


def share_slice(length: int, counts: Sequence[int], rank: int) -> slice:
    """Rank's slice of a batch of `length`, which may be shorter than the counts' sum (the last one of a validation)."""
    start = sum(counts[:rank])
    return slice(min(start, length), min(start + counts[rank], length))
