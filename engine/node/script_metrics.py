"""Metrics of a PyTorch script, as events of its rank: they come to the console as those of our trainers do. They are
read from what it prints, or from the files of its tracker where the job names their folder.

Two forms of lines are read: a JSON object with the step and a loss, such as {"step": 20, "loss": 1.25, "learning_rate":
1e-4}; and the dict that transformers' Trainer prints at each log and each evaluation ({'loss': '1.25', 'learning_rate':
'1e-04', 'epoch': '0.5'}). The latter has no step: it is that of the training's progress bar (" 10%|# | 20/200 ["),
which is printed anew after each of them, and without a bar the number of logs so far.

The files are TensorBoard's, as Accelerate's and the Trainer's trackers of that name write them: TFRecords
(tensorflow/core/lib/io/record_writer.h) of Event messages (tensorboard/compat/proto/event.proto, summary.proto), of
which the scalars are read. They are read here, where the script's own packages may not be imported.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.protocol.events import EventWriter

_LONGEST_LINE = 4096
"""Bytes; a longer one holds no metrics."""
_BAR = re.compile(rb"\s{0,3}\d{1,3}%\|[^|]{0,300}\| {0,12}(\d{1,12})/\d{1,12} \[[^\x1b]{0,60}$")
"""tqdm's, without a name, as those of downloads and files have; a bar below another one, as the evaluation's below the
training's, ends with a move of the cursor."""
_ANY_BAR = re.compile(rb"[^|]{0,80}\d{1,3}%\|[^|]{0,300}\| {0,12}\d{1,12}/\d{1,12} \[")
_ACTIVITY_EVERY_S = 1.0
"""A bar may be printed ten times a second."""
_OF_RANK = re.compile(rb"\[rank (\d{1,6})\] ")
"""Prefix by which torchrun tells the output of its workers apart, also in the middle of a line."""
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
"""Beside the Trainer's last `train_loss`, which is the mean of the whole training."""
_POLL_S = 1.0
_SEARCH_EVERY_S = 10.0
_LONGEST_RECORD = 65_536
"""Bytes; a longer one is an image or a histogram."""
_OF_EVALUATION = re.compile(r"(eval|val|validation)/")
"""As trackers write "eval_"."""
_WALL_TIME, _STEP, _SUMMARIES, _VALUE, _TAG, _SIMPLE_VALUE = 1, 2, 5, 1, 1, 2
"""Numbers of the fields of Event, Summary and Summary.Value."""


class _Reports:
    """Writes the events of one rank's metrics."""

    def __init__(self, events: EventWriter) -> None:
        self._events = events
        self.last = 0
        """The step of the last report."""
        self._last_at = 0.0
        self._active_at = time.monotonic()

    def write(self, step: int, train: dict[str, float], validation: dict[str, float], at: float | None = None) -> None:
        """Values as `_sorted` gives them. `at`: their time, seconds, by one clock for all; None: now."""
        if "train_loss" in train:
            self._report(step, train, time.monotonic() if at is None else at)
        if "val_loss" in validation:
            self._events.write("validation", iteration=step, **validation)

    def activity(self) -> None:
        """The program goes on, whatever it does: logs may be far apart."""
        now = time.monotonic()
        if now - self._active_at >= _ACTIVITY_EVERY_S:
            self._events.write("activity")
            self._active_at = now

    def _report(self, step: int, values: dict[str, float], at: float) -> None:
        made = step - self.last
        self._events.write("step", iteration=step)
        if made > 0 and self.last and at > self._last_at:
            values = {"iterations_per_second": made / (at - self._last_at), **values}
        self.last, self._last_at = step, at
        self._events.write("report", iteration=step, **values)


class PrintedMetrics:
    """Follows the output of one rank; only rank 0's lines count."""

    def __init__(self, events: EventWriter, *, elastic: bool, activity_only: bool = False) -> None:
        """`activity_only`: the metrics are elsewhere."""
        self._reports = _Reports(events)
        self._elastic = elastic
        self._activity_only = activity_only
        self._rest = b""
        self._skipping = False
        self._step: int | None = None
        """That of the progress bar, once there is one."""
        self._awaiting: tuple[dict[str, float], dict[str, float]] | None = None
        """A log of the Trainer, until the bar is printed again."""
        self._logs = 0

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
        if not self._elastic:
            self._read_own(line)
            return
        _, *parts = _OF_RANK.split(line)
        for rank, part in zip(parts[::2], parts[1::2], strict=True):
            if int(rank) == 0:
                self._read_own(part)

    def _read_own(self, line: bytes) -> None:
        if _ANY_BAR.match(line) is not None:
            self._reports.activity()
        if self._activity_only:
            return
        bar = _BAR.match(line)
        if bar is not None:
            self._step = int(bar[1])
            self._settle()
        begin, end = line.find(b"{"), line.rfind(b"}")
        if 0 <= begin < end:
            self._take(_numbers(line[begin : end + 1]))

    def _take(self, values: dict[str, float]) -> None:
        if not values or _SUMMARY in values:
            return
        self._settle()
        train, validation = _sorted(values)
        named = [int(values[name]) for name in _STEPS if name in values]
        if "train_loss" in train or "val_loss" in validation:
            self._logs += "train_loss" in train
            self._awaiting = (train, validation)
            if named or self._step is None:
                self._settle(named[0] if named else self._logs)

    def _settle(self, step: int | None = None) -> None:
        """Report what awaits its step, by default the bar's."""
        if self._awaiting is not None:
            values, self._awaiting = self._awaiting, None
            self._reports.write(step if step is not None else self._step or self._reports.last, *values)


class TensorBoardMetrics:
    """Follows the event files that this machine's programs write below a folder from now on, in a thread of its own:
    the folder may be on a disk that stalls."""

    def __init__(self, events: EventWriter, folder: Path) -> None:
        self._reports = _Reports(events)
        self._folder = folder
        self._names = f"events.out.tfevents.*.{socket.gethostname()}*"
        self._read: dict[Path, int] = {}
        """Bytes by file."""
        self._pending: dict[int, dict[str, float]] = {}
        """By step: values by name, and when they were made by ""."""
        self._found: list[Path] = []
        self._search_at = float("-inf")
        self.follows = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, within_s: float) -> None:
        """The program has ended: what it has written is reported, unless that takes longer."""
        self._ended.set()
        self._thread.join(within_s)

    def _follow(self) -> None:
        self.skip()
        self.follows = True
        while not self._ended.wait(_POLL_S):
            self.poll()
        self._search_at = float("-inf")
        self.poll()
        self._report(self._pending)

    def skip(self) -> None:
        """Leave out all that is there by now: it is another run's."""
        for path in self._files():
            with contextlib.suppress(OSError):
                self._read[path] = path.stat().st_size

    def poll(self) -> None:
        """Report the steps that are complete: a step's scalars are written one by one, until none has come."""
        fresh: dict[int, dict[str, float]] = {}
        for path in self._files():
            for step, at, name, value in self._scalars(path):
                fresh.setdefault(step, {"": at})[name] = value
        complete = {step: values for step, values in self._pending.items() if step not in fresh}
        earlier = {step: values for step, values in self._pending.items() if step in fresh}
        self._pending = {step: {**earlier.get(step, {}), **values} for step, values in fresh.items()}
        self._report(complete)

    def _report(self, found: dict[int, dict[str, float]]) -> None:
        for step, values in sorted(found.items()):
            self._reports.write(step, *_sorted(values), values[""])

    def _files(self) -> list[Path]:
        """All that were there when the folder was last searched, which may hold data and checkpoints, too."""
        if (now := time.monotonic()) >= self._search_at:
            self._search_at = now + _SEARCH_EVERY_S
            with contextlib.suppress(OSError):
                self._found = sorted(self._folder.rglob(self._names))
        return self._found

    def _scalars(self, path: Path) -> Iterator[tuple[int, float, str, float]]:
        """(step, time, name, value) of the records that are whole and have not been read. The last one may be being
        written."""
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                file.seek(begin := self._read.get(path, 0))
                while len(header := file.read(12)) == 12:
                    (length,) = struct.unpack("<Qxxxx", header)
                    if (end := begin + 12 + length + 4) > size:
                        return
                    if length <= _LONGEST_RECORD:
                        yield from _event_scalars(file.read(length))
                    file.seek(begin := end)
                    self._read[path] = end
        except OSError:
            return


def _event_scalars(event: bytes) -> Iterator[tuple[int, float, str, float]]:
    own = dict(_fields(event))
    # Zero is not written.
    step, at, summary = own.get(_STEP, 0), own.get(_WALL_TIME, bytes(8)), own.get(_SUMMARIES)
    if not isinstance(step, int) or not isinstance(at, bytes) or len(at) != 8 or not isinstance(summary, bytes):
        return
    for value in (value for number, value in _fields(summary) if number == _VALUE and isinstance(value, bytes)):
        parts = {number: part for number, part in _fields(value) if isinstance(part, bytes)}
        if len(scalar := parts.get(_SIMPLE_VALUE, b"")) == 4:
            name = _OF_EVALUATION.sub("eval_", parts.get(_TAG, b"").decode(errors="replace")).removeprefix("train/")
            yield step, float(struct.unpack("<d", at)[0]), name, float(struct.unpack("<f", scalar)[0])


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a Protocol Buffers message (protobuf.dev/programming-guides/encoding): numbers of VARINT fields,
    bytes of all others. What is not such a message ends early."""
    at = 0

    def varint() -> int:
        nonlocal at
        number = shift = 0
        while at < len(message):
            byte = message[at]
            at, number, shift = at + 1, number | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                break
        return number

    while at < len(message):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: -1, 5: 4}.get(wire, len(message))
        size = varint() if size < 0 else size
        yield key >> 3, message[at : at + size]
        at += size


def _sorted(values: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Those of training and those of validation, by mlx-lm's names."""
    if _SUMMARY in values:
        values = {name: value for name, value in values.items() if name != "train_loss"}
    train = {ours: values[name] for name, ours in _TRAIN.items() if name in values}
    return train, {ours: values[name] for name, ours in _VALIDATION.items() if name in values}


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
