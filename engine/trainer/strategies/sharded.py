"""Strategy "sharded": every rank owns a part of the tensors, with their gradients and moments, and computes its
share of each global batch, section by section.

A section's tensors are gathered when it runs, forward and again backward, and released afterwards; in between only
each section's input is kept (as with gradient checkpointing). Its gradients are summed at once, and each rank keeps
those of the tensors it owns. Communication and computation never overlap, so that no GPU waits for a peer in a
command buffer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.job import Job
from engine.trainer.collective import Collective, as_words, from_words
from engine.trainer.data import Batch, DataLoader, Split
from engine.trainer.sampler import Indices
from engine.trainer.strategies.base import PartitionedStrategy, PlacedParameter
from engine.trainer.strategies.loss import Rows
from engine.trainer.strategies.sections import Section, check_splittable
from engine.trainer.weights import scalar

_TRAINED_BYTES = 12
"""State per trained element beside the element itself: two float32 moments and its gradient's sum."""


class Shards:
    """A model's sections over the ranks. gather and reduce are called by all ranks, in the same order."""

    def __init__(self, model: nn.Module, collective: Collective) -> None:
        """`model`: whole, not evaluated; from now on it holds only this rank's tensors, and trains those not frozen."""
        self._collective = collective
        layers = len(model.layers)
        self.sections = [
            Section(model, 0, 0, first=True, last=False),
            *(Section(model, layer, layer + 1, first=False, last=False) for layer in range(layers)),
            Section(model, layers, layers, first=False, last=True),
        ]
        trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
        values = [dict(tree_flatten(section.model.parameters())) for section in self.sections]
        costs = [
            {name: value.nbytes + _TRAINED_BYTES * value.size * (name in trained) for name, value in section.items()}
            for section in values
        ]
        owners = assign_owners(costs, collective.size)
        self._tensors = [
            {
                name: PlacedParameter(v.shape, v.dtype, name, (owners[name],), name in trained)
                for name, v in section.items()
            }
            for section in values
        ]
        self._owned = [
            [{name: v for name, v in section.items() if owner in v.ranks} for owner in range(collective.size)]
            for section in self._tensors
        ]
        """The tensors of each rank, by section."""
        self._widths = [[sum(v.words for v in own.values()) for own in owned] for owned in self._owned]
        self._before_gather: dict[str, mx.array] = {}
        _keep_owned(model, {name for name, owner in owners.items() if owner == collective.rank})

    @property
    def placed(self) -> list[PlacedParameter]:
        """All parameters, on all ranks."""
        return list({name: tensor for section in self._tensors for name, tensor in section.items()}.values())

    def trained_in(self, section: int) -> list[str]:
        return [name for name, tensor in self._tensors[section].items() if tensor.trained]

    def gather(self, section: int) -> dict[str, mx.array]:
        """All parameters of the `section`-th section, which has them until `release`. Raises PeerLost."""
        tensors, owned, widths = self._tensors[section], self._owned[section], self._widths[section]
        rank = self._collective.rank
        held = dict(tree_flatten(self.sections[section].model.parameters()))
        self._before_gather = {
            name: held[name] if name in owned[rank] else mx.zeros(0, tensor.dtype) for name, tensor in tensors.items()
        }
        rest = mx.zeros(max(widths) - widths[rank], mx.uint32)
        mine = mx.concatenate([*(as_words(held[name]) for name in owned[rank]), rest])
        everybody = self._collective.gather_arrays(mine)
        found: dict[str, mx.array] = {}
        for owner, parts in enumerate(owned):
            found |= from_words(everybody[owner], parts)
        self.sections[section].model.update(tree_unflatten(list(found.items())))
        return found

    def reduce(self, section: int, gradients: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The sums of all ranks' `gradients` (float32, all trained of the section) for own tensors. Raises PeerLost."""
        tensors = {name: tensor for name, tensor in self._tensors[section].items() if tensor.trained}
        if not tensors:
            return {}
        # Each rank takes its own part of a sum of everything: the ring has no sum_scatter.
        total = self._collective.all_sum(mx.concatenate([gradients[name].reshape(-1) for name in tensors]))
        found, start = {}, 0
        for name, tensor in tensors.items():
            if self._collective.rank in tensor.ranks:
                # The sum makes it a copy: a slice would keep all of `total`.
                found[name] = total[start : start + tensor.size].reshape(tensor.shape) + 0.0
            start += tensor.size
        mx.eval(found)
        return found

    def release(self, section: int) -> None:
        """Drop the tensors that `gather` returned last, for `section`."""
        self.sections[section].model.update(tree_unflatten(list(self._before_gather.items())))
        self._before_gather = {}


def assign_owners(sections: Sequence[Mapping[str, int]], ranks: int) -> dict[str, int]:
    """Assign each tensor a rank, from its cost in bytes: within each section as evenly as whole tensors allow, the
    largest first, and on a tie to the rank with the lowest total so far. A tensor in several sections counts once."""
    owners: dict[str, int] = {}
    whole = [0] * ranks
    for section in sections:
        here = [0] * ranks
        for name, cost in sorted(section.items(), key=lambda entry: (-entry[1], entry[0])):
            if name not in owners:
                owners[name] = min(range(ranks), key=lambda rank: (here[rank], whole[rank], rank))
                whole[owners[name]] += cost
            here[owners[name]] += cost
    return owners


def _keep_owned(model: nn.Module, own: set[str]) -> None:
    """Evaluate `own` parameters; the others become empty and frozen."""
    every = dict(tree_flatten(model.parameters()))
    mx.eval([every[name] for name in own])
    others = [name for name in every if name not in own]
    for name in others:
        *path, leaf = name.split(".")
        module: Any = model
        for part in path:
            module = module[int(part)] if isinstance(module, list) else module[part]
        module.freeze(recurse=False, keys=[leaf])
    model.update(tree_unflatten([(name, mx.zeros(0, every[name].dtype)) for name in others]))


class Sharded(PartitionedStrategy):
    def __init__(self, job: Job, model: nn.Module, loader: DataLoader, collective: Collective) -> None:
        """`model` is whole and not evaluated: tensors of other ranks never are. Raises JobError."""
        check_splittable(model, "sharded")
        self._shards = shards = Shards(model, collective)
        super().__init__(job, model, loader, collective, shards.placed)
        self._first_trained = min(section for section in range(len(shards.sections)) if shards.trained_in(section))

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        mine = self.loader.local_share(indices)
        batch = examples.batch(mine) if len(mine) else None
        rows = Rows.of(batch) if batch else None
        hidden = None
        for section in range(len(self._shards.sections)):
            hidden = self._forward(section, rows, hidden)
        return (scalar(hidden), batch.targets) if batch and hidden is not None else (0.0, 0)

    def _forward_backward(self, batch: Batch, *, last: bool, exact: bool) -> tuple[float, int]:
        shards, rows = self._shards, Rows.of(batch, half=self._half)
        final = len(shards.sections) - 1
        # Dropout: a section runs twice, and must draw the same numbers both times.
        seeds = np.asarray(mx.random.randint(0, 2**31 - 1, (final + 1,))).tolist()
        inputs: list[mx.array | None] = [None]
        for section in range(final):
            mx.random.seed(seeds[section])
            inputs.append(self._forward(section, rows, inputs[-1]))
        loss, cotangent = 0.0, mx.array(1.0)
        for section in range(final, self._first_trained - 1, -1):
            mx.random.seed(seeds[section])
            parameters = self._gather(section)
            trained = {name: parameters[name] for name in shards.trained_in(section)}
            output, gradients, below = shards.sections[section].forward_backward(
                trained, rows, inputs.pop(), cotangent, below=section > self._first_trained
            )
            mx.eval(gradients, [] if below is None else below, *([output] if section == final else []))
            if section == final:
                loss = scalar(output) / rows.scale
            del output, parameters, trained
            shards.release(section)
            started = time.perf_counter()
            reduced = shards.reduce(section, gradients)
            self._waited_s += time.perf_counter() - started
            del gradients
            self.add(reduced)
            if below is not None:
                cotangent = below
        return loss, batch.targets

    def _forward(self, section: int, rows: Rows | None, hidden: mx.array | None) -> mx.array | None:
        """None without rows: this rank then only takes part in the gathering."""
        self._gather(section)
        output = None
        if rows is not None:
            output = self._shards.sections[section].forward(rows, hidden)
            mx.eval(output)
        self._shards.release(section)
        return output

    def _gather(self, section: int) -> dict[str, mx.array]:
        started = time.perf_counter()
        parameters = self._shards.gather(section)
        self._waited_s += time.perf_counter() - started
        return parameters
