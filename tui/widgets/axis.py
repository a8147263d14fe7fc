"""Round numbers for an axis, and where a value lies on it, linear or logarithmic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` (low < high; both > 0 when logarithmic) on `dots` dots, 0 at `low`."""

    low: float
    high: float
    dots: int
    logarithmic: bool = False

    @classmethod
    def of(cls, values: Sequence[float], dots: int, *, logarithmic: bool = False) -> Axis:
        """The axis on which all `values` (finite, at least one) fit; never of no height."""
        low, high = min(values), max(values)
        logarithmic = logarithmic and low > 0
        if high - low < 1e-9 * max(1.0, abs(high)):
            margin = abs(high) * 0.05 or 0.5
            low, high = low - margin, high + margin
        return cls(low, high, max(1, dots), logarithmic)

    def position(self, value: float) -> int:
        """The dot of `value`; values outside are clamped to the ends."""
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(max(0.0, min(1.0, share)) * (self.dots - 1))

    def ticks(self, count: int) -> list[float]:
        """About `count` round values within the axis, ascending."""
        if self.logarithmic and self.high / self.low > 20:
            first = math.floor(math.log10(self.low))
            last = math.ceil(math.log10(self.high))
            multiples = (1, 2, 5) if (last - first) * 2 <= count else (1,)
            found = [m * 10.0**power for power in range(first, last + 1) for m in multiples]
        else:
            step = step_of((self.high - self.low) / max(1, count))
            start = math.ceil(self.low / step - 1e-9)
            found = [index * step for index in range(start, math.floor(self.high / step + 1e-9) + 1)]
        return [value for value in found if self.low <= value <= self.high]


def step_of(rough: float) -> float:
    """The next of 1, 2, 5 × a power of ten that is at least `rough` (> 0)."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(multiple * power for multiple in (1, 2, 5, 10) if multiple * power >= rough * (1 - 1e-9))


def tick_text(value: float, step: float) -> str:
    """A tick's label, with as many decimals as tell neighbours `step` apart from each other."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(decimals, 6)}f}"
