"""Keeps the pyramids of a run's series: the supervisor while rows arrive, a reader for a run of which none does.

All is derived: from metrics.jsonl, the steps in the ranks' mirrored events, and telemetry.jsonl. `state.json` has how
far each was read and how many points were on disk by then; what a kill left behind them is cut off and read again."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from engine.protocol.attempt import read_regular, regular_descriptor
from engine.protocol.events import STEP_FIELD
from engine.run.json_lines import DescriptorOwner, LineTail, parse_json_line
from engine.run.rank_events import NAME_END
from engine.run.series.pyramid import PyramidWriter
from engine.security.sanitise import count_or_none, finite_or_none, plain
from engine.store.layout import RunDir

VERSION: Final = 2
MOST_SERIES: Final = 500
NAMED_RANKS: Final = 8
"""Ranks that have curves of their own; of more only the extremes are kept."""
_AHEAD, _BATCH, _BLOCK = 64, 1000, 1 << 16
"""Steps that a rank may be ahead of one that is silent; lines read of all ranks at a time, and bytes of each."""
_SET_BACK_S: Final = 5.0
"""A clock that goes back by more was set: it counts on from where it was."""
_EVENTS: Final = ".events.jsonl"
_START_FIELD = b'"event": "start"'
_NO_SERIES = frozenset({"iteration", "iterations", "trained_tokens", "attempt", "kind", "at", "val_time"})
_NAMES: Final = {
    "train_loss": ("loss", "train"),
    "val_loss": ("loss", "validation"),
    "tokens_per_second": ("throughput", ""),
    "learning_rate": ("learning rate", ""),
    "peak_memory": ("memory", ""),
    "iterations_per_second": ("iterations/s", ""),
    "gpu_use": ("GPU use", None),
    "power": ("power", None),
    "temperature": ("temperature", None),
    "cpu_use": ("CPU use", None),
    "memory_used_bytes": ("memory used", None),
}
"""Figure → metric and label of its series; for None the node's name."""


class SeriesName(NamedTuple):
    metric: str
    label: str
    """Tells the curves of a metric apart: "train", "rank 0", a node."""


CLOCK: Final = {axis: SeriesName("clock", axis) for axis in ("tokens", "seconds", "at")}
"""By iteration: tokens trained on, active seconds (waits between attempts left out), seconds since the epoch."""


@dataclass
class SeriesState:
    """As in state.json."""

    version: int = VERSION
    series: list[tuple[str, str, int]] = field(default_factory=list)
    """(metric, label, points); the place is the name of the pyramid's files."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Bytes read of each source."""
    attempt: int | None = None
    """That of the newest row, as the next are."""
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Source → time of its newest row, in seconds since the epoch, and how far its clock was set back until then."""
    active_s: float = 0.0
    tokens: float = 0.0
    world: int = 0
    """Ranks of the newest attempt."""
    memory_by_rank: bool = False
    """The steps have the memory of each rank."""


def read_state(folder: Path) -> SeriesState | None:
    """None where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        state = SeriesState(**json.loads(read_regular(folder / "state.json")))
        return state if state.version == VERSION else None
    return None


class RankStep(NamedTuple):
    attempt: int
    iteration: int
    values: Mapping[str, Any]
    end: int
    """The end of its line, in bytes."""


class SeriesBuilder(DescriptorOwner):
    """One at a time of each run: it holds a lock. Use `take`."""

    def __init__(self, run_dir: RunDir, lock: int, *, anew: bool = False) -> None:
        self._descriptor = lock
        self._run_dir, self._folder = run_dir, run_dir.series
        self._steps: dict[int, deque[RankStep]] = {}
        """Rank → those that wait for the other ranks'."""
        self._unread = set[int]()
        """Ranks whose newest lines are still to be read."""
        self._read_to: dict[str, int] = {}
        self._places: dict[SeriesName, PyramidWriter] = {}
        self._state = SeriesState()
        self._written = ""
        """The state on disk."""
        try:
            self._restore(None if anew else read_state(self._folder))
        except (OSError, ValueError):
            self._restore(None)

    @classmethod
    def take(cls, run_dir: RunDir, *, anew: bool = False) -> SeriesBuilder | None:
        """None while another process keeps the series. `anew`: from the beginning. Raises OSError."""
        run_dir.series.mkdir(mode=0o700, exist_ok=True)
        lock = regular_descriptor(run_dir.series / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        return cls(run_dir, lock, anew=anew)

    def poll(self, limit_s: float = math.inf, *, ended: bool = False) -> None:
        """Take in what has come, for about `limit_s` at most. `ended`: no rank is waited for. Raises OSError, when the
        disk is full for example: the next one goes on."""
        self._write()
        until = time.monotonic() + limit_s
        while self._read_steps():
            self._join_steps(ended=False)
            if time.monotonic() > until:
                break
        self._join_steps(ended=ended)
        for line in self._lines(self._run_dir.metrics, until):
            self._take_row(parse_json_line(line) or {})
        for line in self._lines(self._run_dir.telemetry, until):
            self._take_sample(parse_json_line(line) or {})
        self._write()

    def _restore(self, state: SeriesState | None) -> None:
        if state is None:
            for path in self._folder.glob("*.*"):
                path.unlink()
        self._state, self._places = state or SeriesState(), {}
        for place, (metric, label, count) in enumerate(self._state.series):
            self._places[SeriesName(metric, label)] = PyramidWriter(self._folder / str(place), count)

    def _write(self) -> None:
        for pyramid in self._places.values():
            pyramid.flush()
        self._state.series = [(*name, pyramid.count) for name, pyramid in self._places.items()]
        text = json.dumps(asdict(self._state))
        if text != self._written:
            # Without a sync: after a loss of power it is made anew where it does not fit.
            new = self._folder / ".state.new"
            new.write_text(text)
            new.replace(self._folder / "state.json")
            self._written = text

    def _lines(self, path: Path, until: float) -> Iterator[bytes]:
        """The new lines; each counts as read once the next one is asked for."""
        place = self._state.offsets.get(path.name, 0)
        for number, line in enumerate(LineTail(path, place).lines(), 1):
            yield line
            place += len(line) + 1
            self._state.offsets[path.name] = place
            if number % _BATCH == 0 and time.monotonic() > until:
                return

    def _add(self, metric: str, label: str, x: float, y: float | None) -> None:
        """None: there was no finite value."""
        name = SeriesName(metric, label)
        if name not in self._places:
            if len(self._places) >= MOST_SERIES:
                return
            self._places[name] = PyramidWriter(self._folder / str(len(self._places)))
        self._places[name].add(x, math.nan if y is None else y)

    def _take_row(self, row: dict[str, Any]) -> None:
        iteration, kind = count_or_none(row.get("iteration")), row.get("kind")
        if iteration is None or kind not in ("train", "val"):
            return
        if kind == "train":
            self._take_time(row, iteration)
        for key, value in row.items():
            if key in _NO_SERIES or not (value is None or isinstance(value, int | float)):
                continue
            metric, label = _NAMES.get(key) or (plain(key, 40), "")
            y = finite_or_none(value)
            if metric != "memory":
                self._add(metric, label or "", iteration, y)
            elif not self._state.memory_by_rank:
                self._add(metric, "", iteration, y and y * 1e9)

    def _take_time(self, row: Mapping[str, Any], iteration: int) -> None:
        state = self._state
        before = state.clocks.get("rows", (0.0, 0.0))[0]
        try:
            now = self._steady("rows", datetime.fromisoformat(str(row.get("at"))).timestamp())
        except ValueError:
            now = before
        if before and row.get("attempt") == state.attempt:
            state.active_s += now - before
        state.attempt = row.get("attempt")
        tokens = count_or_none(row.get("trained_tokens"))
        for axis, value in (("tokens", tokens), ("seconds", state.active_s), ("at", now)):
            if value is not None:
                self._add("clock", axis, iteration, value)

    def _steady(self, source: str, at: float) -> float:
        """The time of a row by a clock that is never set back."""
        newest, back = self._state.clocks.get(source, (at, 0.0))
        if at + back < newest - _SET_BACK_S:
            back = newest - at
        steady = max(newest, at + back)
        self._state.clocks[source] = steady, back
        return steady

    def _read_steps(self) -> bool:
        """Read some steps of each rank; False when there are none."""
        numbers = [path.name[4 : -len(_EVENTS)] for path in self._run_dir.path.glob(f"rank*{_EVENTS}")]
        ranks = [int(number) for number in numbers if number.isdecimal()]
        return sum(self._read_rank(rank, max(1, _BATCH // len(ranks))) for rank in ranks) > 0

    def _read_rank(self, rank: int, most: int) -> int:
        """The number of lines that were read."""
        path, waiting = self._run_dir.events(rank), self._steps.setdefault(rank, deque())
        if len(waiting) > _AHEAD:
            return 0
        place = self._read_to.setdefault(path.name, self._state.offsets.get(path.name, 0))
        lines = itertools.islice(LineTail(path, place, block=_BLOCK).lines(), most)
        taken = 0
        for taken, line in enumerate(lines, 1):  # noqa: B007
            place += len(line) + 1
            name = line[:NAME_END]
            if STEP_FIELD in name and (event := parse_json_line(line)) is not None:
                attempt, iteration = (count_or_none(event.get(key)) for key in ("attempt", "iteration"))
                if iteration is not None:
                    self._state.memory_by_rank |= "peak_memory_bytes" in event
                    waiting.append(RankStep(attempt or 0, iteration, event, place))
            elif _START_FIELD in name and (event := parse_json_line(line)) is not None:
                self._state.world = count_or_none(event.get("world_size")) or self._state.world
        self._read_to[path.name] = place
        (self._unread.add if taken == most else self._unread.discard)(rank)
        if not waiting:
            self._state.offsets[path.name] = place
        return taken

    def _join_steps(self, *, ended: bool) -> None:
        """Enter the iterations that no rank is to report any more."""
        while heads := {rank: steps[0] for rank, steps in self._steps.items() if steps}:
            attempt, iteration = min(step[:2] for step in heads.values())
            joined = {rank: step for rank, step in heads.items() if step[:2] == (attempt, iteration)}
            # A rank's own word for it: of 2**62 only the first that is silent is looked for.
            world = self._state.world or len(self._steps)
            silent = any(not self._steps.get(rank) for rank in range(world))
            overdue = max(map(len, self._steps.values())) > _AHEAD
            if silent and not (ended or overdue or len(joined) >= world):
                return
            if any(not self._steps[rank] for rank in self._unread):
                return
            for rank, step in joined.items():
                self._steps[rank].popleft()
                name = f"rank{rank}.events.jsonl"
                self._state.offsets[name] = step.end if self._steps[rank] else self._read_to[name]
            self._take_step(iteration, {rank: joined[rank].values for rank in sorted(joined)})

    def _take_step(self, iteration: int, ranks: Mapping[int, Mapping[str, Any]]) -> None:
        compute = _figures(ranks, "compute_s")
        exchange, memory = _figures(ranks, "communicate_s"), _figures(ranks, "peak_memory_bytes")
        parts = [_figures(ranks, name) for name in ("data_s", "update_s")]
        whole = [sum(part.get(rank, 0.0) for part in (compute, exchange, *parts)) for rank in ranks]
        if compute:
            self._add("step time", "whole", iteration, max(whole))
            self._add("step time", "compute", iteration, max(compute.values()))
        if exchange:
            # Of the rank that waits least for others.
            self._add("step time", "exchange", iteration, min(exchange.values()))
        for label, part in zip(("data", "update"), parts, strict=True):
            if part:
                self._add("step time", label, iteration, max(part.values()))
        if len(compute) > 1 and (least := min(compute.values())) > 0:
            self._add("skew", "", iteration, max(compute.values()) / least - 1)
        for metric, values in (("compute", compute if len(ranks) > 1 else {}), ("memory", memory)):
            for rank in list(values)[:NAMED_RANKS]:
                self._add(metric, f"rank {rank}", iteration, values[rank])
        norms = [values["grad_norm"] for values in ranks.values() if "grad_norm" in values]
        if norms:
            self._add("gradient", "", iteration, finite_or_none(norms[0]))

    def _take_sample(self, sample: Mapping[str, Any]) -> None:
        at, node = finite_or_none(sample.get("at")), plain(sample.get("node"), 60)
        if at is None:
            return
        at = self._steady("samples", at)
        for key, value in sample.items():
            if key in _NAMES and (y := finite_or_none(value)) is not None:
                self._add(_NAMES[key][0], node, at, y)
        for label, key in (("in", "received_bytes_per_s"), ("out", "sent_bytes_per_s")):
            if (y := finite_or_none(sample.get(key))) is not None:
                self._add("network", f"{node} {label}", at, y)


def _figures(ranks: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float]:
    return {rank: y for rank, values in ranks.items() if (y := finite_or_none(values.get(name))) is not None}
