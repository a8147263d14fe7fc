"""Comparison of runs: what differs between them, which is best, and why their speeds differ. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Final

from engine.config.sources import values_of
from engine.errors import plural
from engine.models import RunRecord
from engine.run.history import RunHistory
from engine.run.run_plan import RunPlan
from engine.run.series.reader import SeriesFigures
from engine.security.redact import REDACTED, is_secret

ALIKE: Final = 0.03
"""Speeds that differ by less are alike."""
_TELLING: Final = 0.05
"""So is the part of a step that a difference explains, as a share of the slower one's step."""
Cell = str | float | bool | None


@dataclass(frozen=True)
class ComparedRun:
    record: RunRecord
    plan: RunPlan
    """As launched."""
    history: RunHistory
    series: Mapping[tuple[str, str], SeriesFigures] = field(default_factory=dict)
    """By metric and label."""
    chips: Mapping[str, str] = field(default_factory=dict)
    """By node, as of its last facts."""
    throttled: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Node → how its system describes the throttling by heat, and the share of the time in which there was some."""

    @cached_property
    def configuration(self) -> Mapping[str, Cell]:
        """Without secrets. Kept, as the next is: the fastest run is asked for each slower one."""
        return _configuration(self)

    @cached_property
    def decided(self) -> Mapping[str, Cell]:
        """The decisions of its plan."""
        return _plan(self)

    def typical(self, metric: str, label: str = "") -> float | None:
        """None where it has no finite value."""
        figures = self.series.get((metric, label))
        return figures.typical if figures is not None and math.isfinite(figures.typical) else None

    @property
    def name(self) -> str:
        """Name and last part of the id, which tell runs apart on a screen."""
        return f"{self.record.name}-{self.record.id.rpartition('-')[2]}"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Those of the last attempt, in the order of their ranks."""
        last = self.history.last_attempt
        return (last.plan.nodes if last is not None else ()) or self.plan.without(self.record.excluded).nodes

    @property
    def seconds(self) -> float:
        """In which an attempt went on."""
        ended = self.record.ended_at or self.history.state_since
        return sum(attempt.ran_s(ended) for attempt in self.history.attempts)


@dataclass(frozen=True)
class Difference:
    section: str
    key: str
    values: tuple[Cell, ...]
    """In the order of the runs; None where a run has none."""
    best: int | None = None
    """The place of the run with the best one, where one is better than another."""


@dataclass(frozen=True)
class SpeedReasons:
    """Why one run is slower than the fastest of them, the weightiest reason first."""

    run: str
    fastest: str
    summary: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    runs: tuple[RunRecord, ...]
    names: tuple[str, ...]
    """Short ones, each another."""
    differences: tuple[Difference, ...]
    speeds: tuple[SpeedReasons, ...]

    @property
    def ended(self) -> bool:
        """No run goes on."""
        return all(run.state.ended for run in self.runs)


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    return Comparison(
        runs=tuple(run.record for run in runs),
        names=tuple(run.name for run in runs),
        differences=tuple(_differences(runs)),
        speeds=tuple(_speeds(runs)),
    )


def _differences(runs: Sequence[ComparedRun]) -> Iterator[Difference]:
    # What is said of a node that only some of them have is said by the list of nodes.
    shared = set.intersection(*(set(run.plan.nodes) for run in runs))
    for section, facts in _SECTIONS.items():
        tables = [facts(run) for run in runs]
        for key in dict.fromkeys(key for table in tables for key in table):
            values = tuple(table.get(key) for table in tables)
            node = key.removeprefix("node.").rpartition(".")[0] if key.startswith("node.") else None
            if node is not None and node not in shared:
                continue
            if any(not _same(*two) for two in pairwise(values)):
                yield Difference(section, key, values, _best(key, values))


def _same(one: Cell, other: Cell) -> bool:
    # True is no 1 to a person.
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _best(key: str, values: Sequence[Cell]) -> int | None:
    pick = _BETTER.get(key)
    figures = {place: value for place, value in enumerate(values) if isinstance(value, float)}
    return pick(figures, key=lambda place: figures[place]) if pick is not None and len(figures) > 1 else None


_BETTER: Final[Mapping[str, Callable[..., int]]] = {
    **dict.fromkeys(("val loss", "best val loss", "best val loss, smoothed", "test loss", "time", "energy"), min),
    **dict.fromkeys(("train loss", "lowest train loss", "lowest train loss, smoothed"), min),
    **dict.fromkeys(("J per million tokens", "peak memory", "step time", "time lost to recoveries"), min),
    "tokens/s": max,
}
"""The better of the figures of a key: the least, or the most."""


def _configuration(run: ComparedRun) -> dict[str, Cell]:
    # The job's own come first.
    listed = sorted(values_of(run.plan.config), key=lambda value: value[0][0] != "job")
    redact = run.plan.config.job.redactor()
    values = {
        name: REDACTED if isinstance(value, str) and is_secret(str(path[-1])) else redact.document(value)
        for path, name, value in listed
        if path[0] != "ui"
    }
    # A node's path is that of [job] in most configurations.
    of_job = {f"node.{node.name}.{key}": values.get(key) for node in run.plan.config.nodes for key in ("model", "data")}
    return {
        name: json.dumps(value) if isinstance(value, list) else value
        for name, value in values.items()
        if name not in of_job or value != of_job[name]
    }


def _inputs(run: ComparedRun, *, base: bool) -> dict[str, Cell]:
    inputs = run.history.training.inputs if run.history.training is not None else {}
    return {name: value for name, value in inputs.items() if ("base model" in name) is base}


def _versions(run: ComparedRun) -> dict[str, Cell]:
    return {**run.history.training.versions} if run.history.training is not None else {}


def _hardware(run: ComparedRun) -> dict[str, Cell]:
    hosts = {node.name: node.ssh for node in run.plan.config.nodes}
    chips: dict[str, Cell] = {f"chip of {node}": run.chips[node] for node in run.nodes if node in run.chips}
    return {
        "ranks": f"{len(run.nodes)}",
        "nodes": ", ".join(run.nodes),
        "hosts": ", ".join(dict.fromkeys(hosts.get(node, node) for node in run.nodes)),
        **chips,
    }


def _plan(run: ComparedRun) -> dict[str, Cell]:
    if (made := run.history.decisions_for(run.nodes) or next(iter(run.history.decisions), None)) is None:
        return {"backend": run.record.backend}
    settings = made.settings.model_dump(mode="json") if made.settings is not None else {}
    return {
        "backend": made.network.backend,
        "shares": ", ".join(f"{node} {share:.0%}" for node, share in made.division.parts.items()),
        "shares by": made.division.source,
        "layers of each rank": made.layer_split,
        "validating nodes": ", ".join(made.validators),
        **settings,
    }


def _result(run: ComparedRun) -> dict[str, Cell]:
    record, energy = run.record, sum(event.joules for event in run.history.energy)
    validation, train = run.series.get(("loss", "validation")), run.series.get(("loss", "train"))
    tokens = run.series.get(("clock", "tokens"))
    recovery = sum(attempt.status.recovery_s or 0.0 for attempt in run.history.attempts)
    memory = [figures.last for (metric, _), figures in run.series.items() if metric == "memory"]
    cells: dict[str, Cell] = {
        "state": record.state.value,
        "why it ended": record.reason.value if record.reason is not None else None,
        "iterations": str(record.iteration) if record.iteration is not None else None,
        "train loss": record.train_loss,
        "val loss": validation.last if validation is not None else record.val_loss,
        "best val loss": validation.lowest if validation is not None else None,
        "best val loss, smoothed": validation.smoothed if validation is not None else None,
        "lowest train loss": train.lowest if train is not None else None,
        "lowest train loss, smoothed": train.smoothed if train is not None else None,
        "test loss": record.test_loss,
        "tokens": f"{tokens.last:,.0f}" if tokens is not None else None,
        "tokens/s": run.typical("throughput"),
        "step time": run.typical("step time", "whole"),
        "time": run.seconds or None,
        "peak memory": max(memory, default=None),
        "energy": energy or None,
        "J per million tokens": energy / tokens.last * 1e6 if energy and tokens is not None and tokens.last else None,
        "attempts": str(record.attempts),
        "time lost to recoveries": recovery,
        "tags": ", ".join(record.tags) or None,
    }
    # What has diverged is neither better than another nor unlike itself.
    return {key: None if isinstance(cell, float) and not math.isfinite(cell) else cell for key, cell in cells.items()}


_SECTIONS: Final[Mapping[str, Callable[[ComparedRun], Mapping[str, Cell]]]] = {
    "configuration": lambda run: run.configuration,
    "data": lambda run: _inputs(run, base=False),
    "base model": lambda run: _inputs(run, base=True),
    "versions": _versions,
    "hardware": _hardware,
    "plan": lambda run: run.decided,
    "result": _result,
}


def _speeds(runs: Sequence[ComparedRun]) -> Iterator[SpeedReasons]:
    paced = sorted(
        ((speed, run) for run in runs if (speed := run.typical("throughput"))), key=lambda pair: pair[0], reverse=True
    )
    for speed, run in paced[1:]:
        fastest, other = paced[0]
        if (less := 1 - speed / fastest) < ALIKE:
            text = f"{run.name} is as fast as {other.name}: {speed:,.0f} and {fastest:,.0f} tokens/s"
            yield SpeedReasons(run.record.id, other.record.id, text, ())
            continue
        text = f"{run.name} makes {speed:,.0f} tokens/s, {less:.0%} less than {other.name} ({fastest:,.0f})"
        # A stable order of reasons of the same weight: that of the table.
        reasons = [reason for explain in _REASONS for reason in explain(run, other)]
        texts = [reason for _, reason in sorted(reasons, key=lambda pair: -pair[0])]
        none = ["nothing that the runs have recorded explains it: the machines may have had other work"]
        yield SpeedReasons(run.record.id, other.record.id, text, tuple(texts or none))


Reasons = Iterator[tuple[float, str]]
"""Each with its weight: the share of a slow step that it explains, where that is measured."""


def _other_work(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    one, other = slow.configuration, fast.configuration
    # A command has settings of its own: those of the other say nothing about it.
    keys = ["command"] if (one.get("command") is None) != (other.get("command") is None) else _WORK
    for key in keys:
        if not _same(one.get(key), other.get(key)):
            # -1 is all layers; a value that makes a token cheaper explains nothing.
            figures = [math.inf if value == -1 else value for value in (one.get(key), other.get(key))]
            numbers = [value for value in figures if isinstance(value, int | float)]
            more, why = _WORK[key]
            slower = more is None or len(numbers) < 2 or (numbers[0] > numbers[1]) == more
            unlike = _unlike(one.get(key), other.get(key))
            yield 0.9, f"it trains other work: {key} is {unlike}{why if slower else ''}"


_WORK: Final[Mapping[str, tuple[bool | None, str]]] = {
    "model": (None, ""),
    "command": (None, ""),
    "fine_tune_type": (None, ""),
    "num_layers": (True, ": more trained layers cost more a token"),
    "batch_size": (False, ": a small batch shares its fixed cost among fewer tokens"),
    "batch_tokens": (False, ": a small batch shares its fixed cost among fewer tokens"),
    "max_seq_length": (True, ": attention costs more a token in long texts"),
    "strategy": (None, ""),
    "wire": (None, ": gradients take another number of bytes"),
}
"""Keys that change what a token costs, whether a higher value makes it dearer, and why."""


def _unlike(one: Cell, other: Cell) -> str:
    if other is None:
        return f"{one}, in the other not set"
    return f"{one}, not {other}" if one is not None else f"not set, in the other {other}"


def _nodes(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    if len(slow.nodes) != len(fast.nodes):
        one, other = (f"{plural(len(run.nodes), 'rank')} ({', '.join(run.nodes)})" for run in (slow, fast))
        yield 0.8, f"it ran on {one}, not {other}"
    elif slow.nodes != fast.nodes:
        yield 0.8, f"it ran on {', '.join(slow.nodes)}, not {', '.join(fast.nodes)}"
    chips, others = ([run.chips.get(node, "") for node in run.nodes] for run in (slow, fast))
    unlike = sorted(chips) != sorted(others) if len(chips) == len(others) else {*chips} != {*others}
    if all((*chips, *others)) and unlike:
        yield 0.8, f"its chips are {', '.join(chips)}, not {', '.join(others)}"


def _link(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    one, other = (run.decided.get("backend") for run in (slow, fast))
    if one != other:
        yield 0.7, f"its ranks were connected by {one}, not {other}"
    yield from _longer(slow, fast, "exchange", "waits {0} a step for the other ranks and their gradients, not {1}")


def _longer(slow: ComparedRun, fast: ComparedRun, part: str, text: str) -> Reasons:
    """A part of the step takes longer by a telling share of the slow one's."""
    one, other = (run.typical("step time", part) for run in (slow, fast))
    whole = slow.typical("step time", "whole")
    if one is not None and other is not None and whole and (one - other) / whole > _TELLING:
        weight = (one - other) / whole
        yield weight, f"it {text.format(_time(one), _time(other))}: {weight:.0%} of its step"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _step(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    yield from _longer(slow, fast, "compute", "computes {0} a step on its slowest rank, not {1}")
    yield from _longer(slow, fast, "data", "waits {0} a step for its data, not {1}")
    yield from _longer(slow, fast, "update", "takes {0} a step for the optimizer's update, not {1}")


def _shares(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    one, other = slow.decided, fast.decided
    if slow.nodes == fast.nodes and one.get("shares") != other.get("shares"):
        by = f" ({one.get('shares by')})"
        yield 0.3, f"its batch was shared as {one.get('shares')}{by}, not {other.get('shares')}"


def _skew(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    skew, before = slow.typical("skew"), fast.typical("skew") or 0.0
    if skew is not None and skew - before > _TELLING:
        ranks = {label: slow.typical(metric, label) or 0.0 for metric, label in slow.series if metric == "compute"}
        slowest = max(filter(None, ranks), key=lambda label: ranks[label], default="")
        number = slowest.removeprefix("rank ")
        node = f" ({slow.nodes[int(number)]})" if number.isdecimal() and int(number) < len(slow.nodes) else ""
        who = f"{slowest}{node} takes" if slowest else "its slowest rank takes"
        yield skew / (1 + skew), f"its ranks are unequal: {who} {skew:.0%} longer than the fastest, not {before:.0%}"


def _settings(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    one, other = slow.decided, fast.decided
    for key in ("grad_checkpoint", "sequence_tiling", "optimizer_precision", "moments", "layers of each rank"):
        if None not in (one.get(key), other.get(key)) and not _same(one.get(key), other.get(key)):
            yield 0.2, f"{key} was {one.get(key)}, not {other.get(key)}"
    versions, others = _versions(slow), _versions(fast)
    for name in sorted(versions.keys() & others.keys()):
        if versions[name] != others[name]:
            yield 0.1, f"{name} was {versions[name]}, not {others[name]}"


def _interruptions(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    lost = sum(attempt.status.recovery_s or 0.0 for attempt in slow.history.attempts)
    if (count := len(slow.history.attempts) - 1) > 0 and slow.seconds:
        yield (
            lost / slow.seconds,
            f"it recovered {plural(count, 'time')}, which took {lost:.0f} s of {slow.seconds:.0f} s",
        )


def _heat(slow: ComparedRun, fast: ComparedRun) -> Reasons:
    for node, (pressure, share) in slow.throttled.items():
        before = fast.throttled.get(node, ("", 0.0))[1]
        if share - before > _TELLING:
            yield share, f"{node} was throttled by heat ({pressure}) for {share:.0%} of the time, not {before:.0%}"


_REASONS: Final = (_other_work, _nodes, _link, _step, _shares, _skew, _settings, _interruptions, _heat)
