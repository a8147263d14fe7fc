"""The best validation of a training so far, by which its weights are saved (`save_best`) and it is ended early
(`patience`). It is part of every checkpoint: a resumed training judges as one that was never interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class BestValidation:
    """Each validation counts once: a resumed training repeats the one that follows its checkpoint's update."""

    loss: float | None = None
    """None before the first that is finite."""
    iteration: int = 0
    since: int = 0
    """Validations since then, none of them better."""

    def add(self, iteration: int, loss: float) -> bool:
        """True when this validation is better than all before it. A loss that is not finite never is."""
        if math.isfinite(loss) and (self.loss is None or loss < self.loss):
            self.loss, self.iteration, self.since = loss, iteration, 0
            return True
        self.since += 1
        return False

    def is_over(self, patience: int | None) -> bool:
        """So many validations in a row were not better; never with None."""
        return patience is not None and self.since >= patience

    def early_stop(self, iteration: int) -> str:
        """Why the training ends at `iteration`, in one line."""
        best = f" (best {self.loss:.4f} at iteration {self.iteration})" if self.loss is not None else ""
        validations = "1 validation" if self.since == 1 else f"{self.since} validations"
        return f"stopped early at iteration {iteration}: the validation loss has not improved for {validations}{best}"

    def state(self) -> Mapping[str, Any]:
        """For a checkpoint; all finite."""
        return {name: value for name, value in asdict(self).items() if value is not None}
