"""Chooses the values of the job keys that are "auto": the most precise optimizer with which every rank fits its limit,
and the fewest recomputed layers with which it does; and where all do not help, the largest tiles of a sequence. They
cost time only, so they come first."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.config.models import Config
from engine.plan.document import ChosenSettings, ChosenTorchSettings, Disabled, Settings
from engine.plan.memory.estimate import FLOAT32_BYTES, RankWorkload, Workload, estimate, recomputable
from engine.plan.memory.shape import ModelShape
from engine.protocol.job import AUTO, MOST_PRECISE_FIRST

_TILES = (2048, 1024, 512, 256)
"""Tokens: with smaller ones attention's products are too small to be worth a kernel."""
Load = TypeVar("Load", bound=Workload)
COMFORTABLE = 0.90
"""Share of a node's limit up to which settings are chosen, if any fit: an estimate errs, and macOS needs memory."""


@dataclass(frozen=True)
class Choice:
    settings: ChosenSettings
    fits: bool
    """Every rank has enough, as far as limits are known; else the settings are those that need the least."""
    needed_bytes: tuple[int, ...]
    """By rank, reserve included."""
    rejected_bytes: int | None = None
    """The largest need with the next more precise optimizer, with all recomputed that may be; None if there is none."""
    whole_bytes: int | None = None
    """The largest need without the tiles that were chosen."""


def choose(
    shape: ModelShape, workloads: Sequence[RankWorkload], limits: Sequence[int | None], requested: Mapping[str, Any]
) -> Choice:
    """The settings of a job with these values (`requested`) of ChosenSettings' keys, for ranks with these workloads and
    limits in bytes (None: unknown). Raises InputError as `estimate` does."""
    comfortable = [None if limit is None else int(COMFORTABLE * limit) for limit in limits]
    choice = _choose(shape, workloads, comfortable, requested)
    return choice if choice.fits else _choose(shape, workloads, limits, requested)


def _choose(
    shape: ModelShape, workloads: Sequence[RankWorkload], limits: Sequence[int | None], requested: Mapping[str, Any]
) -> Choice:

    def attempt(chosen: ChosenSettings) -> Choice:
        needs = {workload: estimate(shape, with_settings(workload, chosen)).needed_bytes for workload in set(workloads)}
        needed = tuple(needs[workload] for workload in workloads)
        fits = all(limit is None or need <= limit for need, limit in zip(needed, limits, strict=True))
        return Choice(chosen, fits, needed, rejected)

    layers, asked = max(recomputable(shape, load) for load in set(workloads)), requested.get("grad_checkpoint", False)
    counts = [False, *range(1, layers), *[True] * (layers > 0)] if asked == AUTO else [asked]
    rejected = None
    tokens = requested.get("sequence_tiling", 0)
    smaller = _TILES if tokens == AUTO else ()
    for precision, moments in _pairs(shape, workloads[0], requested):
        first = ChosenSettings(optimizer_precision=precision, moments=moments, sequence_tiling=0 if smaller else tokens)
        settings = [first.model_copy(update={"grad_checkpoint": count}) for count in counts]
        least = attempt(settings[-1])
        if least.fits:
            return attempt(settings[bisect_left(settings, True, key=lambda chosen: attempt(chosen).fits)])
        whole = max(least.needed_bytes)
        for size in smaller:
            tiled = attempt(settings[-1].model_copy(update={"sequence_tiling": size}))
            if tiled.fits:
                return replace(tiled, whole_bytes=whole)
            least = min(least, tiled, key=lambda choice: max(choice.needed_bytes))
        rejected = max(least.needed_bytes)
    return least


def is_open(config: Config) -> bool:
    """The job leaves a setting to the plan."""
    job = config.job
    fields = {"mlx": ChosenSettings.model_fields, "torch": ChosenTorchSettings.model_fields}[job.framework]
    return AUTO in (job.strategy, *map(job.mlx_lm.get, fields)) and bool(job.mlx_lm)


def resolved(config: Config, chosen: Settings | Disabled) -> Config:
    """`config` with the chosen values where its job has "auto"; the same where the plan has chosen none."""
    if isinstance(chosen, Disabled):
        return config
    given, updated = config.job.mlx_lm, {}
    values = {key: value for key, value in chosen if given.get(key) == AUTO}
    if isinstance(chosen, ChosenTorchSettings) and config.job.strategy == AUTO:
        updated["strategy"] = chosen.strategy
    return config.model_copy(update={"job": config.job.model_copy(update={"mlx_lm": {**given, **values}, **updated})})


def unresolved(requested: Mapping[str, Any]) -> ChosenSettings:
    """The settings where the memory is unknown: the defaults in place of "auto"."""
    given = {key: requested.get(key, AUTO) for key in ChosenSettings.model_fields}
    return ChosenSettings.model_validate({key: value for key, value in given.items() if value != AUTO})


def settings_of(workload: RankWorkload) -> ChosenSettings:
    return ChosenSettings(**{key: getattr(workload, key) for key in ChosenSettings.model_fields})


def with_settings(workload: Load, chosen: Settings) -> Load:
    return replace(workload, **dict(chosen))


def _pairs(shape: ModelShape, workload: RankWorkload, requested: Mapping[str, Any]) -> list[tuple[str, str]]:
    """optimizer_precision and moments, the most precise first. Adapters, and weights of float32, have no masters."""
    precision, moments = (requested.get(key, "float32") for key in ("optimizer_precision", "moments"))
    if precision == AUTO and (workload.fine_tune_type != "full" or shape.dtype_bytes == FLOAT32_BYTES):
        precision = "float32"
    pairs = (
        (first if precision == AUTO else precision, second if moments == AUTO else moments)
        for first, second in MOST_PRECISE_FIRST
    )
    return list(dict.fromkeys(pairs))
