"""Stock mlx_lm.lora beside our trainer, the plan's memory beside MLX's own peak, and what compiling brings."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from engine.api import Engine
from engine.plan.document import MemorySection
from tests.gpu.head import write_config
from tests.gpu.mlx_models import STOCK_FORM, Asked, Cell, Models, ask, grid, kernels, training
from tests.gpu.part import Visit
from tests.gpu.results import read_rows

PEAK: Final = "our peak"
"""Ends the name of the figure that `memory` reads."""
_COUNTED_S: Final = 1.5
"""Least duration of what is counted of one training."""
_LEAST_S: Final = 25.0
"""Without so much time a size is not begun."""
_MEMORY_LIMIT: Final = 0.10
_LEFT_LIMIT: Final = 0.01


def throughput(visit: Visit) -> None:
    """All sizes, ours and stock in turns; then again, in the other order, as far as the time reaches."""
    models, chosen, taken = Models(visit), grid(visit), defaultdict[str, float](float)
    answers: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    order = ["ours", "stock"]
    while True:
        for size, config in chosen.configs.items():
            if taken[size] and (visit.dry or visit.remaining_s < 1.3 * taken[size]):
                return
            if not taken[size] and visit.remaining_s < _LEAST_S:
                left = f"{visit.remaining_s:.0f} s were left"
                visit.result(f"{size}: compared", "not measured", target="measured", ok=False, note=left)
                continue
            models.write({size: config}, [chosen.tokens])
            started = time.monotonic()
            for trainer in order:
                asked = measure(visit, models, chosen.of_size(size), trainer)
                for answer in asked.answers:
                    answers[trainer, answer["name"]].append(answer)
            taken[size] = time.monotonic() - started
            for cell in chosen.of_size(size):
                compare(visit, cell, answers["ours", cell.name], answers["stock", cell.name])
        order.reverse()


def measure(visit: Visit, models: Models, cells: Sequence[Cell], trainer: str, variant: Variant | None = None) -> Asked:
    """The trainings of these cells, one after the other in one process."""
    tokens, counted = grid(visit).tokens, (2, 0.0 if visit.dry else _COUNTED_S)
    keys = variant.keys if variant is not None else {}
    jobs = [models.job_of(cell, tokens, **keys) for cell in cells]
    runs = [training(cell.name, trainer, visit.device, job, counted) for cell, job in zip(cells, jobs, strict=True)]
    env = variant.env if variant is not None else None
    asked = ask(visit, "trainings", {"folder": str(models.folder), "runs": runs}, env=env)
    if asked.failure is not None:
        done = f"after {len(asked.answers)} of {len(cells)} trainings"
        visit.result(f"{cells[0].size}: {trainer}, all its trainings", asked.failure, ok=False, note=done)
    return asked


def compare(visit: Visit, cell: Cell, ours: list[dict[str, Any]], stock: list[dict[str, Any]]) -> None:
    """Medians of all rounds so far, at two decimals, which decide."""
    for trainer, answers in {"ours": ours, "stock": stock}.items():
        for answer in answers:
            if "failure" in answer:
                # What stock mlx-lm cannot is no fault of ours.
                visit.result(f"{cell.name}: {trainer}", answer["failure"], ok=None if trainer == "stock" else False)
    measured = [[answer for answer in answers if "failure" not in answer] for answers in (ours, stock)]
    peaks = [[answer["peak_bytes"] for answer in answers] for answers in measured]
    if peaks[0]:
        visit.result(f"{cell.name}: {PEAK}", statistics.median(peaks[0]) / 1e9, unit="GB")
    if not all(measured):
        missing = " and ".join(name for name, of in zip(("ours", "stock"), measured, strict=True) if not of)
        ok = None if measured[0] else False
        visit.result(f"{cell.name}: compared", f"nothing was measured of {missing}", ok=ok)
        return
    counted = {answer["tokens"] / (answer["reports"] - 1) for answers in measured for answer in answers}
    if len(counted) > 1:
        visit.result(f"{cell.name}: compared", f"not the same tokens between reports: {sorted(counted)}", ok=False)
        return
    left = max(answer["before_bytes"] / answer["peak_bytes"] for answers in measured for answer in answers)
    if left > _LEFT_LIMIT:
        note = "in the same process: the peaks are that much too high"
        visit.result(f"{cell.name}: left by the training before, of the peak", f"{left:.1%}", ok=False, note=note)
    rates = [[answer["tokens_per_s"] for answer in answers] for answers in measured]
    ours_rate, stock_rate = map(statistics.median, rates)
    ratio = round(ours_rate / stock_rate, 2)
    busy = [max(answer["processor_s"] / answer["seconds"] for answer in answers) for answers in measured]
    note = f"{ours_rate:,.0f} and {stock_rate:,.0f} tokens/s; processor {busy[0]:.0%} and {busy[1]:.0%}"
    note += f"; rounds {len(rates[0])} and {len(rates[1])}"
    judged(visit, f"{cell.name}: tokens/s, ours over stock", ratio, Target("≥ 1.00 ×", ratio >= 1.0), note)
    ours_peak, stock_peak = map(statistics.median, peaks)
    ratio = round(ours_peak / stock_peak, 2)
    note = f"{ours_peak / 1e9:.3g} and {stock_peak / 1e9:.3g} GB"
    judged(visit, f"{cell.name}: peak memory, ours over stock", ratio, Target("≤ 1.00 ×", ratio <= 1.0), note)


@dataclass(frozen=True)
class Target:
    text: str
    met: bool


def judged(visit: Visit, name: str, value: float | str, target: Target, note: str) -> None:
    """A figure whose target is the GPU's: on the CPU it is not judged."""
    unit = "×" if target.text.endswith("×") else ""
    if visit.dry:
        visit.result(name, value, unit=unit, note=f"{note}; CPU build, tiny sizes: not judged")
    else:
        visit.result(name, value, unit=unit, target=target.text, ok=target.met, note=note)


def memory(visit: Visit) -> None:
    """Peaks come from this visit's `throughput`; what it has not measured is measured when those are told."""
    models, chosen = Models(visit), grid(visit)
    peaks = {
        row.name.removesuffix(f": {PEAK}"): float(row.value) * 1e9
        for row in read_rows(visit.out)
        if row.visit == visit.id and row.name.endswith(PEAK)
    }
    for size, config in chosen.configs.items():
        models.describe(size, config)
    sections = asyncio.run(plans(visit, models, chosen.cells))
    report_memory(visit, {name: section for name, section in sections.items() if name in peaks}, peaks)
    for size, config in chosen.configs.items():
        if not (lacking := [cell for cell in chosen.of_size(size) if cell.name not in peaks]):
            continue
        models.write({size: config}, [chosen.tokens])
        for answer in measure(visit, models, lacking, "ours").answers:
            if "failure" in answer:
                visit.result(answer["name"], answer["failure"], ok=False)
            else:
                peaks[answer["name"]] = answer["peak_bytes"]
        report_memory(visit, {cell.name: sections[cell.name] for cell in lacking}, peaks)


def report_memory(visit: Visit, sections: Mapping[str, MemorySection | str], peaks: Mapping[str, float]) -> None:
    """By cell: the plan's section, or why there is none, and the measured peak, bytes."""
    for name, section in sections.items():
        if isinstance(section, str):
            visit.result(f"{name}: the plan's peak", section, ok=False)
        elif name not in peaks:
            visit.result(f"{name}: peak", "not measured", ok=False)
        else:
            planned, peak = section.ranks[0].peak_bytes, peaks[name]
            error, note = planned / peak - 1, f"{planned / 1e9:.3g} of {peak / 1e9:.3g} GB"
            target = Target("within 10%", abs(error) <= _MEMORY_LIMIT)
            judged(visit, f"{name}: planned over measured peak", f"{error:+.1%}", target, note)
    limits = [section.ranks[0] for section in sections.values() if isinstance(section, MemorySection)]
    if limits and limits[0].limit_bytes is not None:
        visit.result("the rank's memory limit", limits[0].limit_bytes / 1e9, unit="GB", note=limits[0].limit_from)


async def plans(
    visit: Visit, models: Models, cells: Sequence[Cell], **tables: Mapping[str, Any]
) -> dict[str, MemorySection | str]:
    """The memory section of each cell's plan, or why there is none. The node is probed once."""
    sections: dict[str, MemorySection | str] = {}
    async with Engine() as engine:
        facts = None
        for cell in cells:
            config = engine.load_config(configured(visit, models, cell, **tables))
            facts = facts or await engine.nodes.probe(config)
            section = (await engine.launches.plan(config, facts=facts)).memory
            sections[cell.name] = section if isinstance(section, MemorySection) else section.reason
    return sections


def configured(visit: Visit, models: Models, cell: Cell, **tables: Mapping[str, Any]) -> Path:
    """flightdeck.toml of the cell on one rank, in stock mlx-lm's precision."""
    job = models.job_of(cell, grid(visit).tokens) | STOCK_FORM
    return write_config(visit, "planned", 1, job={"name": "visit", **job}, **tables, **job_env(visit))


def job_env(visit: Visit) -> dict[str, Mapping[str, Any]]:
    """A table of flightdeck.toml."""
    return {} if visit.dry else {"job.env": kernels()}


@dataclass(frozen=True)
class Variant:
    """Our trainer with other settings; its rate is over that of the first one of the same cell."""

    name: str
    cell: Cell
    env: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)


def compiling(visit: Visit) -> None:
    """Rates without compiled functions, without CUDA graphs, and with freed memory released in every step."""
    models, chosen = Models(visit), grid(visit)
    size, config = next(iter(chosen.configs.items()))
    models.write({size: config}, [chosen.tokens])
    small, *_, large = chosen.of_size(size)
    variants = (
        Variant("as it is", small),
        Variant("not compiled", small, {"MLX_DISABLE_COMPILE": "1"}),
        Variant("without CUDA graphs", small, {"MLX_USE_CUDA_GRAPHS": "0"}),
        Variant("as it is", large),
        Variant("freed memory released above 1 GiB", large, keys={"clear_cache_threshold": 2**30}),
    )
    first: dict[str, float] = {}
    for variant in variants:
        name = f"{variant.cell.name}, {variant.name}"
        for answer in measure(visit, models, [variant.cell], "ours", variant).answers:
            if "failure" in answer:
                visit.result(name, answer["failure"], ok=False)
                continue
            rate = float(answer["tokens_per_s"])
            over = rate / first.setdefault(variant.cell.name, rate)
            note = f"{rate:,.0f} tokens/s, peak {answer['peak_bytes'] / 1e9:.3g} GB"
            note += "; on the CPU nothing is compiled" if visit.dry else ""
            visit.result(name, round(over, 3), unit="×", note=note)
    many_shapes(visit)


def many_shapes(visit: Visit) -> None:
    """Attention of more lengths than twice MLX's default of 64 kept plans of its gradient, which cuDNN computes for
    multiples of 128: what MLX raises, and that its switch prevents it."""
    lengths = [128 * count for count in range(1, 4 if visit.dry else 132)]
    for name, env in {"by default": {}, "check off": {"MLX_ENABLE_CACHE_THRASHING_CHECK": "0"}}.items():
        asked = ask(visit, "attention", {"head_dims": [64], "heads": 2, "lengths": lengths}, limit_s=25.0, env=env)
        done = f"{len(asked.answers)} of {len(lengths)} lengths"
        ok = asked.failure is None if name == "check off" else None
        visit.result(f"many lengths, {name}", done, ok=ok, note=asked.failure or "no error")
