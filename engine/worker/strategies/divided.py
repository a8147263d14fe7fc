"""What the strategies have in common whose state is divided: no rank has all of it."""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from ..collective import Collective
from ..feed import Feed
from ..job import Job
from ..streamed import Weights
from .parts import Held, Part, collected


class Divided(Part):
    """One rank's part: all of a Strategy but the forward and backward passes."""

    replicated = False

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        feed: Feed,
        *,
        collective: Collective,
        trained: Sequence[Held],
        whole: Sequence[Held],
    ) -> None:
        """`model` is what this rank holds; `trained` and `whole` name the parameters that are trained, and all
        of them, on whatever rank. Raises JobError for an optimizer that there is not."""
        super().__init__(job, model, trained, collective)
        self.model = model
        self.feed = feed
        self._whole = whole
        self._half = any(parameter.dtype == mx.float16 for parameter in trained)
        self._waited_s = 0.0
        """For other ranks, in the iteration under way."""

    def own_norm(self, tokens: int) -> None:
        """None: a rank's gradients are those of its own part of the model, not of its own examples."""

    def trained(self) -> Weights:
        return collected(self._trained, self.model, self._collective)

    def whole(self) -> Weights:
        return collected(self._whole, self.model, self._collective)
