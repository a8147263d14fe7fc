"""Computes which changes would let a refused job fit: each is estimated, and named only if it helps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

from engine.plan.document import ChosenSettings, WayOut
from engine.plan.memory.choice import Choice, choose, settings_of
from engine.plan.memory.estimate import RankWorkload
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import AUTO

_SYSTEM_BYTES = 2**33
"""Memory left to the system and other programs when a Mac's GPU limit is raised: 8 GiB."""
_SHORTEST = 256
"""Tokens; shorter sequences are not proposed."""
_MOST_RANKS = 16
"""Nodes that sharding is proposed for."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs."""

    node: str
    limit_bytes: int | None
    ranks: int
    """Ranks that share the machine."""
    total_bytes: int | None
    """All memory of a Mac, whose GPU limit can be raised; None elsewhere, and where it is unknown."""


def ways_out(
    shape: ModelShape,
    workloads: Sequence[RankWorkload],
    places: Sequence[RankPlace],
    requested: Mapping[str, Any],
    *,
    splittable: bool,
) -> tuple[WayOut, ...]:
    """The smallest change of each kind with which every rank fits, those that leave the training as it is first; the
    first combination, where none does alone; empty where that does not, either. `workloads` have settings that did not
    fit, `requested` are the job's. `splittable`: the model can be sharded."""
    job = _Job(shape, tuple(workloads), tuple(places), requested)
    fixed = [key for key in ChosenSettings.model_fields if requested.get(key, AUTO) != AUTO]
    optimizer = [key for key in fixed if key != "grad_checkpoint"]
    found = [*job.with_auto(["grad_checkpoint"] if fixed != optimizer else []), *job.with_auto(optimizer)]
    kinds = [
        job.higher_limit(),
        *(() if found else (job.with_auto(fixed),)),
        job.fewer_sequences(),
        job.shorter_sequences(),
        job.without_nodes(),
        job.sharded() if splittable else (),
        job.adapters(),
    ]
    found += [way for ways in kinds for way in islice(ways, 1)]
    return tuple(found or islice(job.together(fixed), 1))


def describe_ways(ways: Sequence[WayOut]) -> str:
    if not ways:
        return "no change of its settings lets it fit these nodes"
    return "it fits with " + ", or ".join(f"{way.change} ({way.needed_bytes / 1e9:,.1f} GB)" for way in ways)


@dataclass(frozen=True)
class _Job:
    """A job that does not fit. Each method yields the changes of its kind that help, the smallest first."""

    shape: ModelShape
    workloads: tuple[RankWorkload, ...]
    places: tuple[RankPlace, ...]
    requested: Mapping[str, Any]

    @property
    def limits(self) -> list[int | None]:
        return [place.limit_bytes for place in self.places]

    def with_auto(self, keys: Sequence[str]) -> Iterator[WayOut]:
        """These settings chosen, which the job sets."""
        if not keys:
            return
        choice = choose(self.shape, self.workloads, self.limits, {**self.requested, **dict.fromkeys(keys, AUTO)})
        if choice.fits:
            yield _way(_settings_text(choice, keys), choice)

    def higher_limit(self) -> Iterator[WayOut]:
        """More of a Mac's memory for its GPU."""
        raised = [
            max(limit, (place.total_bytes - _SYSTEM_BYTES) // place.ranks)
            if limit is not None and place.total_bytes is not None
            else limit
            for limit, place in zip(self.limits, self.places, strict=True)
        ]
        choice = choose(self.shape, self.workloads, raised, dict(settings_of(self.workloads[0])))
        needs = zip(choice.needed_bytes, self.limits, self.places, strict=True)
        megabytes = {
            place.node: math.ceil(need * place.ranks / 2**20)
            for need, limit, place in needs
            if limit is not None and need > limit
        }
        if choice.fits:
            set_limits = [f"iogpu.wired_limit_mb={size} on {node}" for node, size in megabytes.items()]
            yield _way(" and ".join(set_limits), choice)

    def fewer_sequences(self) -> Iterator[WayOut]:
        """A smaller batch, accumulated to the same number of sequences."""
        if self.workloads[0].strategy == "pipeline":
            return
        whole = sum(workload.batch for workload in self.workloads)
        for divisor in _powers_of_two(max(workload.batch for workload in self.workloads)):
            smaller = [max(1, workload.batch // divisor) for workload in self.workloads]
            steps = math.ceil(whole / sum(smaller)) * self.workloads[0].accumulation
            changed = [
                replace(workload, batch=batch, accumulation=steps)
                for workload, batch in zip(self.workloads, smaller, strict=True)
            ]
            change = f"batch_size = {sum(smaller)} and grad_accumulation_steps = {steps}"
            yield from self._try(change, changed)

    def shorter_sequences(self) -> Iterator[WayOut]:
        sequence = self.workloads[0].sequence
        for divisor in _powers_of_two(sequence // _SHORTEST):
            shorter = [replace(workload, sequence=sequence // divisor) for workload in self.workloads]
            yield from self._try(f"max_seq_length = {sequence // divisor}", shorter)

    def without_nodes(self) -> Iterator[WayOut]:
        """The largest nodes alone, each with a full copy and more of the batch."""
        largest = self._largest_first()
        for ranks in range(len(largest) - 1 if self.workloads[0].strategy == "data" else 0, 0, -1):
            kept = largest[:ranks]
            names = " and ".join(place.node for place in kept)
            yield from self._try(
                f"{names} alone", [self._over("data", ranks)] * ranks, [each.limit_bytes for each in kept]
            )

    def sharded(self) -> Iterator[WayOut]:
        """The state divided over the fewest of the job's nodes, or of more nodes like its largest."""
        largest = self._largest_first()
        own = len(largest) if self.workloads[0].strategy == "data" else 0
        for ranks in range(2, own + 1):
            names = ", ".join(place.node for place in largest[:ranks])
            limits = [place.limit_bytes for place in largest[:ranks]]
            yield from self._try(f'strategy = "sharded" over {names}', [self._over("sharded", ranks)] * ranks, limits)
        for ranks in range(2, _MOST_RANKS + 1):
            over = f"over {ranks} nodes like {largest[0].node}"
            yield from self._try(
                f'strategy = "sharded" {over}', [self._over("sharded", ranks)], [largest[0].limit_bytes]
            )

    def _largest_first(self) -> list[RankPlace]:
        return sorted(self.places, key=lambda place: place.limit_bytes or 0, reverse=True)

    def _over(self, strategy: Literal["data", "sharded"], ranks: int) -> RankWorkload:
        batch = sum(workload.batch for workload in self.workloads)
        return replace(self.workloads[0], strategy=strategy, world_size=ranks, batch=-(-batch // ranks), layers=None)

    def adapters(self) -> Iterator[WayOut]:
        if self.workloads[0].fine_tune_type == "full":
            changed = [replace(workload, fine_tune_type="lora") for workload in self.workloads]
            yield from self._try('fine_tune_type = "lora"', changed)

    def together(self, fixed: Sequence[str]) -> Iterator[WayOut]:
        """All settings chosen, one sequence per rank, and shorter and shorter ones."""
        free = {**self.requested, **dict.fromkeys(fixed, AUTO)}
        one = replace(self, requested=free, workloads=tuple(replace(each, batch=1) for each in self.workloads))
        for way in (*one._try("", one.workloads), *one.shorter_sequences()):
            settings = [f'{key} = "{AUTO}"' for key in fixed]
            batch = [f"batch_size = {len(self.places)}"] if any(each.batch > 1 for each in self.workloads) else []
            change = ", ".join([*settings, *batch, *([way.change] if way.change else [])])
            yield WayOut(change=change, needed_bytes=way.needed_bytes)

    def _try(
        self, change: str, workloads: Sequence[RankWorkload], limits: Sequence[int | None] | None = None
    ) -> Iterator[WayOut]:
        choice = choose(self.shape, workloads, self.limits if limits is None else limits, self.requested)
        if choice.fits:
            yield _way(change, choice)


def _way(change: str, choice: Choice) -> WayOut:
    return WayOut(change=change, needed_bytes=max(choice.needed_bytes))


def _settings_text(choice: Choice, keys: Sequence[str]) -> str:
    chosen = dict(choice.settings)
    return " and ".join(f"{key} = {json.dumps(chosen[key])}" for key in keys)


def _powers_of_two(most: int) -> Iterator[int]:
    """2, 4, and so on, to `most`."""
    divisor = 2
    while divisor <= most:
        yield divisor
        divisor *= 2
