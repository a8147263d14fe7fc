"""Strategy "sharded": every rank owns a part of the tensors, with their gradients and moments, and computes its share
of each global batch, section by section.

A section's tensors are gathered when it runs, forward and again backward, and forgotten after it: what is kept between
is each section's input (as with gradient checkpointing). Its gradients are summed at once, and each rank keeps those of
what it owns. Nothing communicates while something computes, so that no GPU waits for a peer in a command buffer.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten

from ..arrays import number
from ..collective import Collective
from ..data import Split
from ..feed import Feed
from ..job import Job
from ..reporting import Reporter
from ..sampler import Indices
from .divided import Divided
from .passes import Rows, forward, forward_backward
from .sections import check
from .shards import Shards
from .strategy import Share


class Sharded(Divided):
    """One rank's part (a Strategy)."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        train: Split,
        *,
        collective: Collective,
        shares: list[float],
        reporter: Reporter,
    ) -> None:
        """`model` is whole and has not been evaluated: what other ranks own never is. Raises JobError."""
        check(model, "sharded")
        # Before anything is loaded: a batch that cannot be is told at once.
        feed = Feed(train, job, shares, collective.rank, reporter)
        self._shards = shards = Shards(model, collective)
        super().__init__(
            job,
            model,
            feed,
            collective=collective,
            trained=shards.held(trained=True),
            whole=shards.held(trained=False),
        )
        self._first_trained = min(number for number in range(len(shards.sections)) if shards.trained_in(number))

    def accumulate(self, position: int) -> Share:
        begun = time.perf_counter()
        batch = self.feed.batch(position)
        ready, self._waited_s = time.perf_counter(), 0.0
        loss = self._forward_backward(Rows.of(batch, half=self._half))
        seconds = time.perf_counter() - ready
        return Share(loss, batch.targets, ready - begun, seconds - self._waited_s, self._waited_s)

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        mine = self.feed.mine(indices)
        batch = examples.batch(mine) if len(mine) else None
        rows = Rows.of(batch) if batch else None
        hidden = None
        for number_ in range(len(self._shards.sections)):
            hidden = self._forward(number_, rows, hidden)
        return (number(hidden), batch.targets) if batch and hidden is not None else (0.0, 0)

    def _forward_backward(self, rows: Rows) -> float:
        """Add the gradients of `rows`; their sum of cross-entropies."""
        shards = self._shards
        last = len(shards.sections) - 1
        # Of dropout: a section runs twice, and must draw the same both times.
        seeds = np.asarray(mx.random.randint(0, 2**31 - 1, (last + 1,))).tolist()
        inputs: list[mx.array | None] = [None]
        for section in range(last):
            mx.random.seed(seeds[section])
            inputs.append(self._forward(section, rows, inputs[-1]))
        loss, cotangent = 0.0, mx.array(1.0)
        for section in range(last, self._first_trained - 1, -1):
            mx.random.seed(seeds[section])
            parameters = self._gathered(section)
            trained = {name: parameters[name] for name in shards.trained_in(section)}
            output, gradients, below = forward_backward(
                shards.sections[section],
                trained,
                rows,
                inputs.pop(),
                cotangent,
                below=section > self._first_trained,
            )
            mx.eval(gradients, [] if below is None else below, *([output] if section == last else []))
            if section == last:
                loss = number(output) / rows.scale
            del output, parameters, trained
            shards.release(section)
            begun = time.perf_counter()
            reduced = shards.reduce(section, gradients)
            self._waited_s += time.perf_counter() - begun
            del gradients
            self.add(reduced)
            if below is not None:
                cotangent = below
        return loss

    def _forward(self, section: int, rows: Rows | None, hidden: mx.array | None) -> mx.array | None:
        """None without rows: then only what others need of this rank is done."""
        self._gathered(section)
        output = None
        if rows is not None:
            output = forward(self._shards.sections[section], rows, hidden)
            mx.eval(output)
        self._shards.release(section)
        return output

    def _gathered(self, section: int) -> dict[str, mx.array]:
        begun = time.perf_counter()
        parameters = self._shards.gather(section)
        self._shards.sections[section].model.update(tree_unflatten(list(parameters.items())))
        self._waited_s += time.perf_counter() - begun
        return parameters
