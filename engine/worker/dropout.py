"""Random numbers of the training: a function of what is trained, so that none have to be kept."""

from __future__ import annotations

import hashlib


def dropout_seed(seed: int, iteration: int, rank: int) -> int:
    """64 bits, of which everything random in that rank's iteration follows: no state of a generator has to be kept or
    passed on, and what is resumed draws what it would have drawn."""
    digest = hashlib.blake2b(f"{seed} {iteration} {rank}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
