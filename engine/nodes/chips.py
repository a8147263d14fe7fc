"""What is known of Apple's chips apart from what a machine says itself; what a machine says wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    memory_gb_s: Mapping[int, float]
    """Number of GPU cores → memory bandwidth, GB/s (10^9): one entry for each variant sold."""
    thunderbolt: int
    """Generation of the ports of Macs with it; RDMA needs 5."""

    @property
    def gpu_cores(self) -> int | None:
        """Where all variants have the same number."""
        return next(iter(self.memory_gb_s)) if len(self.memory_gb_s) == 1 else None


# Apple's technical specifications of the Macs with each chip (support.apple.com, "Tech Specs"), as sold until mid-2026.
# Thunderbolt: the M3 Ultra has 5 while the other M3's have 4 and less; base chips have 4 at most.
CHIPS: Mapping[str, Chip] = {
    "Apple M1": Chip({7: 68, 8: 68}, 3),
    "Apple M1 Pro": Chip({14: 200, 16: 200}, 4),
    "Apple M1 Max": Chip({24: 400, 32: 400}, 4),
    "Apple M1 Ultra": Chip({48: 800, 64: 800}, 4),
    "Apple M2": Chip({8: 100, 10: 100}, 4),
    "Apple M2 Pro": Chip({16: 200, 19: 200}, 4),
    "Apple M2 Max": Chip({30: 400, 38: 400}, 4),
    "Apple M2 Ultra": Chip({60: 800, 76: 800}, 4),
    "Apple M3": Chip({8: 100, 10: 100}, 4),
    "Apple M3 Pro": Chip({14: 150, 18: 150}, 4),
    "Apple M3 Max": Chip({30: 300, 40: 400}, 4),
    "Apple M3 Ultra": Chip({60: 819, 80: 819}, 5),
    "Apple M4": Chip({8: 120, 10: 120}, 4),
    "Apple M4 Pro": Chip({16: 273, 20: 273}, 5),
    "Apple M4 Max": Chip({32: 410, 40: 546}, 5),
    "Apple M5": Chip({8: 153, 10: 153}, 4),
    "Apple M5 Pro": Chip({16: 307, 20: 307}, 5),
    "Apple M5 Max": Chip({32: 460, 40: 614}, 5),
}

# The port next to Ethernet: https://github.com/exo-explore/exo/pull/1551. By model: M4 Max and M3 Ultra Mac Studio.
_WITHOUT_RDMA = {"Mac16,9": "en2", "Mac15,14": "en2"}


def chip(name: str | None) -> Chip | None:
    """By the name that sysctl gives, "Apple M3 Ultra"."""
    return CHIPS.get(name or "")


def port_without_rdma(model: str | None) -> str | None:
    """The interface of the one Thunderbolt 5 port of this model that does no RDMA."""
    return _WITHOUT_RDMA.get(model or "")
