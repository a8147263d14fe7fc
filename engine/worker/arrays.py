"""MLX arrays as Python numbers, with types: mlx's own `item` and `tolist` promise anything."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def floats(array: mx.array) -> list[float]:
    """All elements in order."""
    values: list[float] = np.asarray(array, dtype=np.float64).reshape(-1).tolist()
    return values


def number(array: mx.array) -> float:
    """The only element."""
    (value,) = floats(array)
    return value
