"""Metrics that a PyTorch script prints, as events of its rank: they come to the console as those of our trainers do.

Two forms are read, each on a line of its own: a JSON object with the step and a loss, such as
{"step": 20, "loss": 1.25, "learning_rate": 1e-4}; and the dict that transformers' Trainer prints at each log and each
evaluation ({'loss': '1.25', 'learning_rate': '1e-04', 'epoch': '0.5'}). The latter has no step: it is that of the
training's progress bar (" 10%|# | 20/200 ["), which is printed anew after each of them, and without a bar the number of
logs so far.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from typing import Any

from engine.protocol.events import EventWriter

_LONGEST_LINE = 4096
"""Bytes; a longer one holds no metrics."""
_BAR = re.compile(rb"\s{0,3}\d{1,3}%\|[^|]{0,300}\| {0,12}(\d{1,12})/\d{1,12} \[[^\x1b]{0,60}$")
"""tqdm's, without a name, as those of downloads and files have; a bar below another one, as the evaluation's below the
training's, ends with a move of the cursor."""
_STEP_EVERY_S = 1.0
"""A bar may be printed ten times a second."""
_OF_RANK = re.compile(rb"\[rank (\d{1,6})\] ")
"""The beginning of a line of an elastic job's worker."""
_STEPS = ("step", "iteration", "global_step")
_TRAIN = {
    "loss": "train_loss",
    "train_loss": "train_loss",
    "learning_rate": "learning_rate",
    "lr": "learning_rate",
    "grad_norm": "grad_norm",
    "tokens_per_second": "tokens_per_second",
    "epoch": "epoch",
}
"""Name in the script -> ours, which is mlx-lm's."""
_VALIDATION = {
    "eval_loss": "val_loss",
    "val_loss": "val_loss",
    "validation_loss": "val_loss",
    "eval_runtime": "val_time",
}
_SUMMARY = "train_runtime"
"""In the Trainer's last line, which repeats the whole training."""


class PrintedMetrics:
    """Follows the output of one rank; only rank 0's lines count."""

    def __init__(self, events: EventWriter, *, elastic: bool) -> None:
        self._events = events
        self._elastic = elastic
        self._rest = b""
        self._skipping = False
        self._step: int | None = None
        """That of the progress bar, once there is one."""
        self._awaiting: tuple[dict[str, float], dict[str, float]] | None = None
        """A log of the Trainer, until the bar is printed again."""
        self._logs = self._last = 0
        self._last_at = self._stepped_at = time.monotonic()
        self._stepped = 0

    def feed(self, chunk: bytes) -> None:
        """The output as it comes; it costs a constant times its length, and keeps one line at most."""
        *lines, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if not self._skipping and len(line) <= _LONGEST_LINE:
                self._read(line)
            self._skipping = False
        self._skipping = self._skipping or len(rest) > _LONGEST_LINE
        self._rest = b"" if self._skipping else rest

    def _read(self, line: bytes) -> None:
        prefix = _OF_RANK.match(line)
        if prefix is not None:
            if int(prefix[1]) != 0:
                return
            line = line[prefix.end() :]
        elif self._elastic:
            return
        bar = _BAR.match(line)
        if bar is not None:
            self._step = int(bar[1])
            self._settle()
            self._advance(self._step, _STEP_EVERY_S)
        begin, end = line.find(b"{"), line.rfind(b"}")
        if 0 <= begin < end:
            self._take(_numbers(line[begin : end + 1]))

    def _take(self, values: dict[str, float]) -> None:
        if not values or _SUMMARY in values:
            return
        self._settle()
        train = {ours: values[name] for name, ours in _TRAIN.items() if name in values}
        validation = {ours: values[name] for name, ours in _VALIDATION.items() if name in values}
        named = [int(values[name]) for name in _STEPS if name in values]
        if "train_loss" in train or "val_loss" in validation:
            self._logs += "train_loss" in train
            self._awaiting = (train, validation)
            if named or self._step is None:
                self._settle(named[0] if named else self._logs)

    def _settle(self, step: int | None = None) -> None:
        """Report what awaits its step, by default the bar's."""
        if self._awaiting is None:
            return
        (train, validation), self._awaiting = self._awaiting, None
        step = step if step is not None else self._step or self._last
        if "train_loss" in train:
            self._report(step, train)
        if "val_loss" in validation:
            self._events.write("validation", iteration=step, **validation)

    def _report(self, step: int, values: dict[str, float]) -> None:
        now, made = time.monotonic(), step - self._last
        self._advance(step)
        if made > 0 and self._last and now > self._last_at:
            values = {"iterations_per_second": made / (now - self._last_at), **values}
        self._last, self._last_at = step, now
        self._events.write("report", iteration=step, **values)

    def _advance(self, step: int, every_s: float = 0.0) -> None:
        """The program goes on: logs may be far apart. A restarted worker begins at a lower step."""
        now = time.monotonic()
        if step != self._stepped and now - self._stepped_at >= every_s:
            self._events.write("step", iteration=step)
            self._stepped, self._stepped_at = step, now


def _numbers(text: bytes) -> dict[str, float]:
    """The numbers of a JSON object or a Python dict, also those in quotes; {} for anything else."""
    found: Any = None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        try:
            found = ast.literal_eval(text.decode())
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return {}
    if not isinstance(found, dict):
        return {}
    numbers = {}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not isinstance(name, str):
            continue
        try:
            number = float(value)
        except (ValueError, OverflowError):
            continue
        if name not in _STEPS or (math.isfinite(number) and 0 <= number < 1e15):
            numbers[name] = number
    return numbers
