"""Which rank owns which tensor of a model, and how a section's are put together when it runs.

Each tensor is owned whole by one rank, so that any shape divides, every optimizer sees the matrices that it would see
alone, and another number of ranks picks up the same tensors. What is owned is all that a rank keeps.
"""

# ruff: noqa: TID252  the package is `worker` on a node, not `engine.worker`

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from ..collective import Collective
from .parts import Held
from .sections import Section

_WORD = 4
_ALIGNED_WORDS = 16
"""Each tensor begins at a multiple of 64 bytes of what is gathered, for kernels that read several numbers at once."""
_OF_TRAINED = 12
"""Bytes of state for each trained number beside itself: two float32 moments and its gradient's sum."""


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    shape: tuple[int, ...]
    dtype: mx.Dtype
    trained: bool
    owner: int

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size

    @property
    def words(self) -> int:
        """Its room among others."""
        room = _WORD * _ALIGNED_WORDS
        return -(-self.nbytes // room) * _ALIGNED_WORDS


class Shards:
    """A model's sections over the ranks. gather and reduce are called by all ranks, in the same order."""

    def __init__(self, model: nn.Module, collective: Collective) -> None:
        """`model` is whole and has not been evaluated; from now on it holds this rank's tensors alone, and of them it
        trains those that were to be trained."""
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
            {name: value.nbytes + _OF_TRAINED * value.size * (name in trained) for name, value in section.items()}
            for section in values
        ]
        owners = assigned(costs, collective.size)
        self._tensors = [
            {name: Tensor(v.shape, v.dtype, name in trained, owners[name]) for name, v in section.items()}
            for section in values
        ]
        self._put_back: dict[str, mx.array] = {}
        _keep(model, {name for name, owner in owners.items() if owner == collective.rank})

    def held(self, *, trained: bool) -> list[Held]:
        """All parameters, or all that are trained, on whatever rank."""
        every = {name: tensor for section in self._tensors for name, tensor in section.items()}
        return [
            Held(name, tensor.shape, tensor.dtype, (tensor.owner,))
            for name, tensor in every.items()
            if tensor.trained or not trained
        ]

    def trained_in(self, section: int) -> list[str]:
        return [name for name, tensor in self._tensors[section].items() if tensor.trained]

    def gather(self, section: int) -> dict[str, mx.array]:
        """All parameters of the `section`-th section, until `release`. Raises PeerLost."""
        tensors, rank = self._tensors[section], self._collective.rank
        held = dict(tree_flatten(self.sections[section].model.parameters()))
        own = {name: held[name] for name, tensor in tensors.items() if tensor.owner == rank}
        self._put_back = {name: own.get(name, _nothing(tensor.dtype)) for name, tensor in tensors.items()}
        places, width = _places(tensors)
        parts = [_as_words(value, tensors[name].words) for name, value in own.items()]
        rest = width - sum(part.size for part in parts)
        mine = mx.concatenate([*parts, mx.zeros(rest, mx.uint32)])
        everybody = self._collective.gather_arrays(mine)
        found = {}
        for name, start in places.items():
            tensor = tensors[name]
            words = everybody[tensor.owner, start : start + tensor.words]
            found[name] = words.view(tensor.dtype)[: tensor.size].reshape(tensor.shape)
        return found

    def reduce(self, section: int, gradients: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """The sums over all ranks of `gradients` (float32, of all that is trained in the section) for what this rank
        owns. Raises PeerLost."""
        tensors = {name: tensor for name, tensor in self._tensors[section].items() if tensor.trained}
        if not tensors:
            return {}
        # A sum over all, of which each takes its own: the ring has no sum_scatter.
        total = self._collective.sum(mx.concatenate([gradients[name].reshape(-1) for name in tensors]))
        found, start = {}, 0
        for name, tensor in tensors.items():
            if tensor.owner == self._collective.rank:
                # The sum makes it a copy: a slice would keep all of `total`.
                found[name] = total[start : start + tensor.size].reshape(tensor.shape) + 0.0
            start += tensor.size
        mx.eval(found)
        return found

    def release(self, section: int) -> None:
        """Forget what was gathered last, for `section`."""
        self.sections[section].model.update(tree_unflatten(list(self._put_back.items())))
        self._put_back = {}


def assigned(sections: Sequence[Mapping[str, int]], ranks: int) -> dict[str, int]:
    """Each tensor's rank, from what it costs there: within each section as evenly as whole tensors go, the largest
    first, and where that leaves a choice to the rank that has least so far. One in several sections counts once."""
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


def _places(tensors: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Where each begins in its owner's row of words, and how long the longest row is."""
    places, rows = {}, dict[int, int]()
    for name, tensor in tensors.items():
        places[name] = rows.get(tensor.owner, 0)
        rows[tensor.owner] = places[name] + tensor.words
    return places, max(rows.values(), default=0)


def _as_words(value: mx.array, words: int) -> mx.array:
    """The bits of `value` as 32-bit words, filled up to `words`."""
    flat = value.reshape(-1)
    missing = (words * _WORD - flat.nbytes) // flat.dtype.size
    return mx.concatenate([flat, mx.zeros(missing, flat.dtype)]).view(mx.uint32)


def _nothing(dtype: mx.Dtype) -> mx.array:
    return mx.zeros(0, dtype)


def _keep(model: nn.Module, own: set[str]) -> None:
    """Evaluate `own` parameters, and leave the others out: without elements, and not trained."""
    every = dict(tree_flatten(model.parameters()))
    mx.eval([every[name] for name in own])
    others = [name for name in every if name not in own]
    for name in others:
        *path, leaf = name.split(".")
        module: Any = model
        for part in path:
            module = module[int(part)] if isinstance(module, list) else module[part]
        module.freeze(recurse=False, keys=[leaf])
    model.update(tree_unflatten([(name, _nothing(every[name].dtype)) for name in others]))
