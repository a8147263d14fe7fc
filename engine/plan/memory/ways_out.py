"""Computes which changes would let a refused job fit: each is estimated, and named only if it helps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from engine.errors import memory_text
from engine.job.traits import PARTITIONED
from engine.plan.document import ChosenSettings, Settings, WayOut
from engine.plan.memory.choice import Choice, Load, choose, settings_of
from engine.plan.memory.estimate import RankWorkload
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import AUTO, Strategy
from engine.protocol.partition import Fusing, share_counts

_SYSTEM_BYTES = 2**33
"""Memory left to the system and other programs when a Mac's GPU limit is raised: 8 GiB."""
NEWER_MLX = "0.32.4 or newer"
"""With attention's gradient in tiles on Metal."""
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
    measured: float = 1.0
    """The measured need over its estimate, where it was measured and is more."""
    limit_from: str = ""
    """Where the limit comes from, or why it is unknown."""
    fuses: Fusing | None = None
    """The device whose MLX computes attention's gradient in tiles; "" where a newer MLX would; None where none does."""


def ways_out(
    shape: ModelShape,
    workloads: Sequence[RankWorkload],
    places: Sequence[RankPlace],
    requested: Mapping[str, Any],
    *,
    splittable: bool,
) -> tuple[WayOut, ...]:
    """The smallest change of each kind with which every rank fits, those that leave the training as it is first; the
    first combination, where none does alone; then more nodes, where sharding over the job's own does not help.
    `workloads` have settings that did not fit, `requested` are the job's. `splittable`: the model can be sharded."""
    job = _Job(shape, tuple(workloads), tuple(places), requested, max(place.measured for place in places))
    fixed = [key for key in ChosenSettings.model_fields if requested.get(key, AUTO) != AUTO]
    of_time = ("grad_checkpoint", "sequence_tiling")
    changes = [*([key] for key in of_time if key in fixed), [key for key in fixed if key not in of_time]]
    offered = [way for keys in changes for way in job.with_auto(keys)]
    kinds = [
        job.newer_mlx(),
        job.higher_limit(),
        *(() if offered else (job.with_auto(fixed),)),
        job.changed(() if workloads[0].strategy == "pipeline" else fewer_sequences(workloads, requested)),
        job.changed(shorter_sequences(workloads)),
        job.without_nodes(),
        job.changed(adapters(workloads)),
    ]
    offered += first_of_each(kinds)
    divided = [*islice(job.sharded(len(places)), 1)] if splittable and workloads[0].strategy not in PARTITIONED else []
    offered += divided
    more = job.sharded(_MOST_RANKS, over_job=False) if splittable and not divided else ()
    return (*(offered or islice(job.together(fixed), 1)), *islice(more, 1))


def first_of_each(kinds: Iterable[Iterator[WayOut]]) -> list[WayOut]:
    return [way for ways in kinds for way in islice(ways, 1)]


def fewer_sequences(workloads: Sequence[Load], requested: Mapping[str, Any]) -> Iterator[tuple[str, list[Load]]]:
    """A smaller batch, accumulated to as many sequences per update, and as many updates as before. `requested`: the
    job's settings, of which iters is None where they are those of epochs."""
    budget, iterations = requested.get("batch_tokens"), requested.get("iters")
    batches, accumulated = [workload.batch for workload in workloads], workloads[0].accumulation
    for divisor in powers_of_two(sum(batches) // len(batches)):
        smaller = share_counts(sum(batches) // divisor, batches)
        more = math.ceil(sum(batches) / sum(smaller))
        size = f"batch_size = {sum(smaller)}" if budget is None else f"batch_tokens = {budget // more}"
        settings = [size, f"grad_accumulation_steps = {accumulated * more}"]
        settings += [f"iters = {iterations * more}"] if iterations is not None else []
        ranks = zip(workloads, smaller, strict=True)
        changed = [replace(rank, batch=batch, accumulation=accumulated * more) for rank, batch in ranks]
        yield " and ".join(settings), changed


def shorter_sequences(workloads: Sequence[Load]) -> Iterator[tuple[str, list[Load]]]:
    for divisor in powers_of_two(workloads[0].sequence // _SHORTEST):
        length = workloads[0].sequence // divisor
        yield f"max_seq_length = {length}", [replace(workload, sequence=length) for workload in workloads]


def adapters(workloads: Sequence[Load]) -> Iterator[tuple[str, list[Load]]]:
    if workloads[0].fine_tune_type == "full":
        yield 'fine_tune_type = "lora"', [replace(workload, fine_tune_type="lora") for workload in workloads]


def describe_ways(ways: Sequence[WayOut]) -> str:
    if not ways:
        return "no change of its settings lets it fit these nodes"
    return "it fits with " + ", or ".join(f"{way.change} ({memory_text(way.needed_bytes)})" for way in ways)


@dataclass(frozen=True)
class _Job:
    """A job that does not fit. Each method yields the changes of its kind that help, the smallest first."""

    shape: ModelShape
    workloads: tuple[RankWorkload, ...]
    places: tuple[RankPlace, ...]
    requested: Mapping[str, Any]
    measured: float

    @property
    def limits(self) -> list[int | None]:
        return [place.limit_bytes for place in self.places]

    def with_auto(self, keys: Sequence[str]) -> Iterator[WayOut]:
        """These settings chosen, which the job sets."""
        if keys:
            free = {**self.requested, **dict.fromkeys(keys, AUTO)}
            yield from self._try(lambda choice: settings_text(choice.settings, keys), requested=free)

    def higher_limit(self) -> Iterator[WayOut]:
        """More of a Mac's memory for its GPU."""
        raised = [
            None if limit is None else max(limit, ((place.total_bytes or 0) - _SYSTEM_BYTES) // place.ranks)
            for limit, place in zip(self.limits, self.places, strict=True)
        ]

        def commands(choice: Choice) -> str:
            return " and ".join(
                f"iogpu.wired_limit_mb={math.ceil(need * place.ranks / 2**20)} on {place.node}"
                for need, place in zip(choice.needed_bytes, self.places, strict=True)
                if place.limit_bytes is not None and need > place.limit_bytes
            )

        yield from self._try(commands, limits=raised, requested=dict(settings_of(self.workloads[0])))

    def newer_mlx(self) -> Iterator[WayOut]:
        newer = [
            replace(workload, fused_attention=workload.fused_attention or ("metal" if place.fuses == "" else ""))
            for workload, place in zip(self.workloads, self.places, strict=True)
        ]
        if any(place.fuses == "" for place in self.places):
            yield from self._try(f"mlx {NEWER_MLX}", newer)

    def changed(self, changes: Iterable[tuple[str, Sequence[RankWorkload]]]) -> Iterator[WayOut]:
        for change, workloads in changes:
            yield from self._try(change, workloads)

    def without_nodes(self) -> Iterator[WayOut]:
        """The largest nodes alone, each with a full copy and more of the batch."""
        largest, current = self._largest_first(), self.workloads[0].strategy
        for ranks in range(0 if current in PARTITIONED else len(largest) - 1, 0, -1):
            kept = largest[:ranks]
            strategy: Strategy = current if ranks > 1 else "data"
            change = f"{' and '.join(place.node for place in kept)} alone"
            change += f' and strategy = "{strategy}"' if strategy != current else ""
            limits = [place.limit_bytes for place in kept]
            yield from self._try(change, [self._over(strategy, ranks)] * ranks, limits=limits)

    def sharded(self, most: int, *, over_job: bool = True) -> Iterator[WayOut]:
        """The state divided over the fewest nodes: of the job's own (`over_job`), or like its largest."""
        largest, first = self._largest_first(), self.workloads[0]
        for ranks in range(2, most + 1):
            # There is no int8 for it, and a sequence for each rank.
            settings = ['strategy = "sharded"', *['wire = "auto"'] * (first.wire == "int8")]
            sequences = sum(workload.batch for workload in self.workloads)
            few = sequences < ranks and self.requested.get("batch_tokens") is None
            settings += [f"batch_size = {ranks}"] * few
            nodes = largest[:ranks] if over_job else largest[:1]
            over = ", ".join(place.node for place in nodes) if over_job else f"{ranks} nodes like {nodes[0].node}"
            workloads, limits = [self._over("sharded", ranks)] * len(nodes), [place.limit_bytes for place in nodes]
            yield from self._try(f"{' and '.join(settings)} over {over}", workloads, limits=limits)

    def _largest_first(self) -> list[RankPlace]:
        return sorted(self.places, key=lambda place: place.limit_bytes or 0, reverse=True)

    def _over(self, strategy: Strategy, ranks: int) -> RankWorkload:
        batch = sum(workload.batch for workload in self.workloads)
        return replace(self.workloads[0], strategy=strategy, world_size=ranks, batch=-(-batch // ranks), layers=None)

    def together(self, fixed: Sequence[str]) -> Iterator[WayOut]:
        """All settings chosen, one sequence per rank, and shorter and shorter ones."""
        free, budget = {**self.requested, **dict.fromkeys(fixed, AUTO)}, self.requested.get("batch_tokens")
        stages = len(self.workloads) if self.workloads[0].strategy == "pipeline" else 0
        # A stage of a pipeline has as many micro-batches in flight as stages follow, and its own.
        least = [max(1, stages - rank) for rank in range(len(self.workloads))]
        few = tuple(replace(workload, batch=batch) for workload, batch in zip(self.workloads, least, strict=True))
        one = replace(self, requested=free, workloads=few)
        for way in one.changed([("", few), *shorter_sequences(few)]):
            settings = [f'{key} = "{AUTO}"' for key in fixed]
            size = f"batch_size = {len(self.places)}" if budget is None else f"batch_tokens = {few[0].sequence}"
            batch = [size] if few != self.workloads else []
            change = ", ".join([*settings, *batch, *([way.change] if way.change else [])])
            yield WayOut(change=change, needed_bytes=way.needed_bytes)

    def _try(
        self,
        change: str | Callable[[Choice], str],
        workloads: Sequence[RankWorkload] | None = None,
        *,
        limits: Sequence[int | None] | None = None,
        requested: Mapping[str, Any] | None = None,
    ) -> Iterator[WayOut]:
        """The change if the job fits with it, every need being as much above its estimate as the measured one is."""
        scaled = [limit and int(limit / self.measured) for limit in limits or self.limits]
        choice = choose(self.shape, workloads or self.workloads, scaled, requested or self.requested)
        if choice.fits:
            needs = tuple(math.ceil(need * self.measured) for need in choice.needed_bytes)
            text = change if isinstance(change, str) else change(replace(choice, needed_bytes=needs))
            yield WayOut(change=text, needed_bytes=max(needs))


def settings_text(chosen: Settings, keys: Sequence[str]) -> str:
    return " and ".join(f"{key} = {json.dumps(getattr(chosen, key))}" for key in keys)


def powers_of_two(most: int) -> Iterator[int]:
    """2, 4, and so on, to `most`."""
    return (2**power for power in range(1, most.bit_length()))
