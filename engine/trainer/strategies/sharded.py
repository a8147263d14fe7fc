"""Strategy "sharded": every rank owns a part of the tensors, with their gradients and moments, and computes its
share of each global batch, section by section.

A section's tensors are gathered before it runs, forward and again backward, and dropped afterwards; in between only
each section's input is kept (as with gradient checkpointing). Its gradients are summed at once, and each rank keeps
those of the tensors it owns.

Beside the computation of a section the next one is gathered; in the backward pass, the sums of the one before follow.
Operations are started with what has been evaluated, and computations with what has arrived: so no GPU waits for a peer
in a command buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from engine.protocol.job import Job, state_bytes
from engine.trainer.collective import Collective, as_words, from_words
from engine.trainer.optimizer_state import StateForm
from engine.trainer.strategies.base import PartitionedStrategy, PlacedParameter, float32_sum
from engine.trainer.strategies.loss import Rows
from engine.trainer.strategies.sections import Section, check_splittable
from engine.trainer.weights import scalar
from engine.training.data import Batch, DataLoader, Split
from engine.training.sampler import Indices


@dataclass(frozen=True)
class Reduction:
    """A section's gradients before they are summed: lazy until `packed` and `own` are evaluated."""

    section: int
    own: dict[str, mx.array]
    """Gradients of the tensors that this rank owns; none where `packed` has them too."""
    packed: mx.array
    """Flat, for the other ranks."""


class Shards:
    """A model's sections over the ranks. What communicates is called by all ranks, in the same order."""

    def __init__(self, job: Job, model: nn.Module, collective: Collective) -> None:
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
        form = StateForm.of(job)

        def cost(name: str, value: mx.array) -> float:
            # Beside a trained element itself: the optimizer's state of it, and its gradient's float32 sum.
            state = state_bytes(form.precision, form.moments, value.dtype.size) + 4 if name in trained else 0
            return value.nbytes + value.size * state

        costs = [{name: cost(name, value) for name, value in section.items()} for section in values]
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
        self._widths = [[sum(v.words for v in tensors.values()) for tensors in owned] for owned in self._owned]
        self._sent = [
            [
                {name: v.gradient for name, v in section.items() if v.trained and sender not in v.ranks}
                for sender in range(collective.size)
            ]
            for section in self._tensors
        ]
        """The gradients that each rank has for others, by section."""
        self._sent_words = [max(sum(v.words for v in gradients.values()) for gradients in sent) for sent in self._sent]
        alone = job.grad_accumulation_steps == 1
        self._rounded = {v.name for v in self.placed if alone and form.summed(v.dtype) == mx.bfloat16}
        """Tensors whose gradients' sums wait for the update in bfloat16, in which the step is computed."""
        _keep_owned(model, {name for name, owner in owners.items() if owner == collective.rank})

    @property
    def placed(self) -> list[PlacedParameter]:
        """All parameters, on all ranks."""
        return list({name: tensor for section in self._tensors for name, tensor in section.items()}.values())

    def trained_in(self, section: int) -> list[str]:
        return [name for name, tensor in self._tensors[section].items() if tensor.trained]

    def start_gather(self, section: int) -> None:
        """Begin to gather the `section`-th section's tensors, which `finish_gather` returns. Raises PeerLost."""
        owned, widths = self._owned[section], self._widths[section]
        rank = self._collective.rank
        held = dict(tree_flatten(self.sections[section].model.parameters()))
        rest = mx.zeros(max(widths) - widths[rank], mx.uint32)
        self._collective.start_gather(mx.concatenate([*(as_words(held[name]) for name in owned[rank]), rest]))

    def finish_gather(self, section: int) -> dict[str, mx.array]:
        """All parameters of the section. Raises PeerLost."""
        everybody = self._collective.finish()
        gathered: dict[str, mx.array] = {}
        for owner, parts in enumerate(self._owned[section]):
            gathered |= from_words(everybody[owner], parts)
        return gathered

    @contextmanager
    def with_parameters(self, section: int, parameters: Mapping[str, mx.array]) -> Iterator[Section]:
        """The section, which has `parameters` for as long as its computation is being built."""
        model = self.sections[section].model
        held = tree_flatten(model.parameters())
        model.update(tree_unflatten(list(parameters.items())))
        try:
            yield self.sections[section]
        finally:
            model.update(tree_unflatten(held))

    def pack(self, section: int, gradients: Mapping[str, mx.array]) -> Reduction:
        """This rank's `gradients`, all trained of the section, as they are summed. Local. The ring has no sum_scatter:
        from each of n ranks, gathering what it has for others sends (n-1)²/n times the bytes of a gradient, a sum of
        everything in float32 8(n-1)/n bytes per element: whichever is less, for even parts the first one up to 5 ranks
        in 16 bits and up to 3 in float32."""
        sent = self._sent[section][self._collective.rank]
        if self._is_gathered(section):
            rest = mx.zeros(self._sent_words[section] - sum(spec.words for spec in sent.values()), mx.uint32)
            kept = {name: gradients[name] for name in gradients if name not in sent}
            return Reduction(section, kept, mx.concatenate([*(as_words(gradients[name]) for name in sent), rest]))
        flat = [gradients[name].astype(mx.float32).reshape(-1) for name in self.trained_in(section)]
        return Reduction(section, {}, mx.concatenate(flat))

    def start_reduce(self, reduction: Reduction) -> None:
        """Begin to sum all ranks' gradients; `finish_reduce` returns the sums. Raises PeerLost."""
        if self._is_gathered(reduction.section):
            self._collective.start_gather(reduction.packed)
        else:
            self._collective.start_sum(reduction.packed)

    def finish_reduce(self, reduction: Reduction) -> dict[str, mx.array]:
        """The sums for this rank's own tensors, float32 or as they are rounded. Lazy. Raises PeerLost."""
        section, rank = reduction.section, self._collective.rank
        total = self._collective.finish()
        if self._is_gathered(section):
            received = [from_words(row, sent) for row, sent in zip(total, self._sent[section], strict=True)]
            # In the order of the ranks, so that a run repeated has the same bits.
            return {
                name: self._kept(
                    name, [mine if source == rank else others[name] for source, others in enumerate(received)]
                )
                for name, mine in reduction.own.items()
            }
        sums, start = {}, 0
        for name in self.trained_in(section):
            tensor = self._tensors[section][name]
            if rank in tensor.ranks:
                # The sum makes it a copy: a slice would keep all of `total`.
                sums[name] = self._kept(name, [total[start : start + tensor.size].reshape(tensor.shape) + 0.0])
            start += tensor.size
        return sums

    def _kept(self, name: str, contributions: Sequence[mx.array]) -> mx.array:
        total = reduce(float32_sum, contributions)
        return total.astype(mx.bfloat16) if name in self._rounded else total

    def _is_gathered(self, section: int) -> bool:
        ranks = self._collective.size
        elements = sum(tensor.size for tensor in self._tensors[section].values() if tensor.trained)
        return (ranks - 1) * 4 * self._sent_words[section] <= 2 * (ranks - 1) / ranks * 4 * elements


def assign_owners(sections: Sequence[Mapping[str, float]], ranks: int) -> dict[str, int]:
    """Assign each tensor a rank, from its cost in bytes: within each section as evenly as whole tensors allow, the
    largest first, and on a tie to the rank with the lowest total so far. A tensor in several sections counts once."""
    owners: dict[str, int] = {}
    whole = [0.0] * ranks
    for section in sections:
        here = [0.0] * ranks
        for name, cost in sorted(section.items(), key=lambda entry: (-entry[1], entry[0])):
            if name not in owners:
                owners[name] = min(range(ranks), key=lambda rank: (here[rank], whole[rank], rank))
                whole[owners[name]] += cost
            here[owners[name]] += cost
    return owners


def _keep_owned(model: nn.Module, owned: set[str]) -> None:
    """Evaluate `owned` parameters; the others become empty and frozen."""
    every = dict(tree_flatten(model.parameters()))
    mx.eval([every[name] for name in owned])
    others = [name for name in every if name not in owned]
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
        self._shards = shards = Shards(job, model, collective)
        super().__init__(job, model, loader, collective, shards.placed)
        self._last = len(shards.sections) - 1
        trained = (section for section in range(self._last + 1) if shards.trained_in(section))
        self._first_trained = min(trained, default=self._last)

    def loss(self, examples: Split, indices: Indices) -> tuple[float, int]:
        mine = self.loader.validation_share(examples, indices)
        batch = examples.batch(mine) if len(mine) else None
        loss = self._forward_all(Rows.of(batch) if batch else None)
        return (scalar(loss), batch.targets) if batch and loss is not None else (0.0, 0)

    def logits(self, tokens: mx.array) -> mx.array | None:
        """On rank 0."""
        return self._forward_all(tokens if self.collective.rank == 0 else None)

    def _forward_all(self, rows: Rows | mx.array | None) -> mx.array | None:
        hidden, parameters = None, self._gather_first()
        for section in range(self._last + 1):
            hidden, parameters = self._forward(section, parameters, rows, hidden)
        return hidden

    def forward_backward(self, batch: Batch, *, last: bool, exact: bool = False) -> tuple[float, int]:
        shards, rows = self._shards, Rows.of(batch, half=self._half)
        # Dropout: a section runs twice, and must draw the same numbers both times.
        seeds = np.asarray(mx.random.randint(0, 2**31 - 1, (self._last + 1,))).tolist()
        inputs: list[mx.array | None] = []
        hidden, parameters = None, self._gather_first()
        for section in range(self._last):
            mx.random.seed(seeds[section])
            # The backward pass ends at the first trained section.
            if section >= self._first_trained:
                inputs.append(hidden)
            hidden, parameters = self._forward(section, parameters, rows, hidden)
        inputs.append(hidden)
        del hidden
        loss, cotangent = 0.0, mx.array(1.0)
        above: Reduction | None = None
        for section in range(self._last, self._first_trained - 1, -1):
            mx.random.seed(seeds[section])
            more = section > self._first_trained
            if more:
                shards.start_gather(section - 1)
            with shards.with_parameters(section, parameters) as part:
                trained = {name: parameters[name] for name in shards.trained_in(section)}
                output, gradients, below = part.forward_backward(trained, rows, inputs.pop(), cotangent, below=more)
            del trained
            parameters = {}
            # One operation at a time: the gathering beside the forward pass, the sums beside the backward pass.
            mx.eval(output)
            if section == self._last:
                loss = scalar(output) / rows.scale
            del output
            parameters = shards.finish_gather(section - 1) if more else {}
            if above:
                shards.start_reduce(above)
            reduction = shards.pack(section, gradients) if gradients else None
            del gradients
            mx.eval([] if below is None else below, (reduction.own, reduction.packed) if reduction else [])
            if above:
                self.add(shards.finish_reduce(above))
            above = reduction
            if below is not None:
                cotangent = below
        if above:
            shards.start_reduce(above)
            self.add(shards.finish_reduce(above))
        return loss, batch.targets

    def _gather_first(self) -> dict[str, mx.array]:
        self._shards.start_gather(0)
        return self._shards.finish_gather(0)

    def _forward(
        self, section: int, parameters: Mapping[str, mx.array], rows: Rows | mx.array | None, hidden: mx.array | None
    ) -> tuple[mx.array | None, dict[str, mx.array]]:
        """The section's output (without rows, None: this rank only takes part), and the next one's parameters. The last
        one's is the loss of `rows`, or the logits of tokens."""
        if section < self._last:
            self._shards.start_gather(section + 1)
        output = None
        if rows is not None:
            with self._shards.with_parameters(section, parameters) as part:
                output = part.forward(rows, hidden) if isinstance(rows, Rows) else part(rows, hidden)
            mx.eval(output)
        return output, self._shards.finish_gather(section + 1) if section < self._last else {}
