"""Metrics of a user's program, as events of its rank: they come to the console as those of our trainers do. They are
read from what it prints, or from the files of its tracker where the job names their folder.

A job's own pattern is tried on each line, and nothing else. Without one these are tried in turn: the forms of
protocol.metric_patterns; a progress bar of tqdm with a loss before or behind it; a JSON object or Python dict with a
loss; a step and a loss by their names. The dict that transformers' Trainer prints at each log ({'loss': '1.25',
'epoch': '0.5'}) has no step: it is that of the training's bar, which is printed anew after each, or else the number of
logs so far.

The files are TensorBoard's: TFRecords (tensorflow/core/lib/io/record_writer.h) of Event messages
(tensorboard/compat/proto/event.proto, summary.proto), of which the scalars are read, here, where the script's own
packages may not be imported."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.protocol import metric_patterns
from engine.protocol.attempt import open_regular
from engine.protocol.events import EventWriter
from engine.protocol.metric_patterns import LOSSES, as_count, group_values, metrics_of, named_numbers

_LONGEST_LINE = 4096
"""Bytes; a longer one holds no metrics."""
_DIGITS = re.compile(rf"[\d.]{{{metric_patterns.LONGEST_NUMBER + 1}}}")
_OWN_LIMIT_S = 0.25
"""CPU time for one line: a pattern of the job's that takes longer would hold up the log, and is given up."""
_TRIED_LENGTHS = (125, 250, 500)
_BAR = re.compile(
    r"(?P<head>.{0,200}?)\s{0,3}\d{1,3}%\|[^|]{0,300}\| {0,12}(?P<step>\d{1,12})/(?P<total>\d{1,12}) "
    r"\[(?P<tail>[^\]\x1b]{0,300})(?P<end>\]?\x1b\[A)?"
)
"""tqdm's. A bar below another one, as the evaluation's below the training's, ends with a move of the cursor."""
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,40}m")
_WORTH = re.compile(
    rb"[Ll](?:oss|OSS)[^\n]{0,24}?(?:\d|[Nn]a[Nn]|[Ii]nf)|%\||skipped=|/global_step=|, iters: |\xc2\xb7 iters"
    rb"|Test accuracy|\xe2\x96[\xb2\xbc]|mval\x1b"
)
"""In every line with metrics: a loss before a number, a bar, or what some forms have instead."""
_ACTIVITY_EVERY_S = 1.0
"""A bar may be printed ten times a second."""
_BURST_S = 0.01
"""Reports that come together were made apart."""
_RECENT = 256
"""Reports among which a repeat is looked for: below a launcher inside the command every rank prints them, and a pipe
takes some 8 KiB of one rank at once."""
_OF_RANK = re.compile(rb"\[rank (\d{1,6})\] ")
"""Prefix by which torchrun tells the output of its workers apart, also in the middle of a line."""
_OF_ONE_RANK = re.compile(rb"\[(?:rank|default) ?(\d{1,6})\]:? ?")
"""The same as torchrun has it by default, or as above in a log that is tried: at the beginning of a line."""
_SUMMARY = "train_runtime"
"""Beside the Trainer's last `train_loss`, which is the mean of the whole training."""
_POLL_S = 1.0
_SEARCH_EVERY_S = 10.0
_LONGEST_RECORD = 65_536
"""Bytes; a longer one is an image or a histogram."""
_WALL_TIME, _STEP, _SUMMARIES, _VALUE, _TAG, _SIMPLE_VALUE = 1, 2, 5, 1, 1, 2
"""Numbers of the fields of Event, Summary and Summary.Value."""
_FRAME = LOSSES | {"step", "total", "epoch", "epochs"}
"""Given by a pattern's groups alone."""
_APART = frozenset(("step", "total", "epochs", "val_loss", "val_time"))
"""No figures of a report."""


class _Reports:
    """Writes the events of one rank's metrics."""

    def __init__(self, events: EventWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._clock = clock
        self.last: int | None = None
        """The step of the last report."""
        self._timed = (0, 0.0)
        """The step that the pace is counted from, and when it came."""
        self._lossless: dict[str, float] = {}
        """The figures of the last report, while it has no loss: that may stand in another line."""
        self._active_at = time.monotonic()
        self._recent: deque[str] = deque(maxlen=_RECENT)
        """The last different steps with their values."""

    def write(self, step: int, values: Mapping[str, float], at: float | None = None, total: int | None = None) -> None:
        """`values` as `metrics_of` gives them. `at`: their time, seconds, by one clock for all; None: now. `total`: the
        training's steps, where they are known."""
        newest = -1 if self.last is None else self.last
        trained = "train_loss" in values or ("val_loss" not in values and step > newest)
        if trained:
            # Also for a repeat: it shows that the program goes on.
            self._events.write("step", iteration=step)
        if (row := f"{step} {sorted(values.items())}") in self._recent:
            return
        self._recent.append(row)
        train = {name: value for name, value in values.items() if name not in _APART}
        validation = {name: values[name] for name in ("val_loss", "val_time") if name in values}
        if trained:
            figures = self._lossless if step == self.last else self._pace(step, self._clock() if at is None else at)
            figures = {**figures, **train}
            if total is not None and total >= max(step, 1):
                figures["iterations"] = total
            self._events.write("report", iteration=step, **figures)
            self.last, self._lossless = step, {} if "train_loss" in train else figures
        if "val_loss" in validation:
            self._events.write("validation", iteration=step, **validation)

    def activity(self) -> None:
        """The program goes on, whatever it does: logs may be far apart."""
        now = time.monotonic()
        if now - self._active_at >= _ACTIVITY_EVERY_S:
            self._events.write("activity")
            self._active_at = now

    def _pace(self, step: int, at: float) -> dict[str, float]:
        since, since_at = self._timed
        pace = {}
        if self.last is None or step <= since:
            self._timed = step, at
        elif at - since_at > _BURST_S:
            pace = {"iterations_per_second": (step - since) / (at - since_at)}
            self._timed = step, at
        return pace


class PrintedMetrics:
    """Follows the output of one rank; only rank 0's lines count."""

    def __init__(
        self,
        events: EventWriter,
        *,
        elastic: bool,
        activity_only: bool = False,
        pattern: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`activity_only`: the metrics are elsewhere. `pattern`: the job's own. Raises re.error."""
        self._events = events
        self._reports = _Reports(events, clock)
        self._elastic = elastic
        self._activity_only = activity_only
        self._own = re.compile(pattern) if pattern is not None else None
        self.reads, self.read_as = 0, ""
        """How many lines had metrics, and the form of the last one."""
        self._rest = b""
        self._skipping = False
        self._bar: tuple[int, int] | None = None
        """The step and the total of the progress bar, once there is one without a loss."""
        self._bar_loss: float | None = None
        """The last validation loss in a bar."""
        self._bar_began = (0, 0)
        """The total of the last bar without a loss, and the count at which it was first drawn."""
        self._bar_drawn: float | None = None
        """The loss that was last drawn."""
        self._bar_ahead = 0
        """1 where the loss in a bar is that of the step after its count."""
        self._held: tuple[int, dict[str, float], str] | None = None
        """A bar's count and report, whose loss may be that of the step before."""
        self._total: int | None = None
        """Printed before the first step."""
        self._awaiting: dict[str, float] = {}
        """A log of the Trainer, until the bar is printed again."""
        self._logs = 0
        self._by_epochs = False
        """The program has no other steps."""
        self._first_epoch: int | None = None
        self._place: tuple[str, float | None, int, int, int] = ("", None, 0, 0, 1)
        """The count that begins anew in each epoch: its name, the epoch, the steps before it, the last one in it, and
        the most from one to the next."""

    def feed(self, chunk: bytes) -> None:
        """The output as it comes; it costs a constant times its length, and keeps one line at most."""
        *lines, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if not self._skipping and len(line) <= _LONGEST_LINE:
                self._read(line)
            self._skipping = False
        self._skipping = self._skipping or len(rest) > _LONGEST_LINE
        self._rest = b"" if self._skipping else rest

    def finish(self) -> None:
        """The program has ended: its bar is not printed again."""
        self.feed(b"\n")
        if not self._bar_ahead:
            self._take_held()
        self._settle()

    def _read(self, line: bytes) -> None:
        if not self._elastic:
            prefix = _OF_ONE_RANK.match(line)
            if prefix is None or int(prefix[1]) == 0:
                self._read_own(line[prefix.end() if prefix is not None else 0 :])
            return
        _, *parts = _OF_RANK.split(line)
        for rank, part in zip(parts[::2], parts[1::2]):  # noqa: B905  (Python 3.9)
            if int(rank) == 0:
                self._read_own(part)

    def _read_own(self, line: bytes) -> None:
        if self._own is None and _WORTH.search(line) is None:
            return
        text = _COLOUR.sub("", line.decode(errors="replace"))
        bar = _BAR.match(text) if "%|" in text else None
        if bar is not None:
            self._reports.activity()
        if self._activity_only:
            return
        if self._own is not None:
            self._read_by(self._own, text)
            return
        for form in metric_patterns.FORMS:
            if form.literal in text and (match := form.regex.search(text)) is not None:
                more = {name: value for name, value in metrics_of(named_numbers(text)).items() if name not in _FRAME}
                values = {**more, **group_values(match)}
                self._take(form.program, values, form.program if "epoch_step" in form.regex.groupindex else "")
                return
        if bar is not None:
            self._read_bar(bar)
        begin, end = text.find("{"), text.rfind("}")
        if 0 <= begin < end and (numbers := _numbers(text[begin : end + 1])):
            self._read_dict(numbers)
        elif bar is None:
            self._read_named(text)

    def _read_by(self, pattern: re.Pattern[str], text: str) -> None:
        takes_long = len(text) > metric_patterns.LONGEST_LINE or _DIGITS.search(text) is not None
        match = None
        # The time grows with a power of the length: first it is seen on the beginning.
        for length in () if takes_long else (*filter(len(text).__gt__, _TRIED_LENGTHS), len(text)):
            began = time.thread_time()
            match = pattern.search(text[:length])
            if time.thread_time() - began <= _OWN_LIMIT_S:
                continue
            self._own, self._activity_only = None, True
            match = match if length == len(text) else None
            message = f"`metrics` of [job] takes too long for a line of {len(text)} characters: it is no longer tried"
            self._events.write("warning", message=message)
            break
        if match is not None and (values := group_values(match)).keys() & LOSSES:
            self._take("[job] metrics", values)

    def _read_bar(self, bar: re.Match[str]) -> None:
        head, count, total = bar["head"], int(bar["step"]), int(bar["total"])
        values = metrics_of(named_numbers(f"{head}, {bar['tail']}"))
        if "train_loss" not in values:
            if self._bar_began[0] != total:
                self._bar_began = total, count
            if not head.strip() and bar["end"] is None:
                self._bar = count, total
                self._settle()
        elif not metric_patterns.speaks_of_validation(head):
            if values.get("val_loss") == self._bar_loss:
                # It is that of the last evaluation until the next.
                values.pop("val_loss", None)
            self._bar_loss = values.get("val_loss", self._bar_loss)
            if "v_num=" in bar["tail"]:
                # Lightning's epochs begin with 0.
                self._first_epoch = 0
            named = "".join(filter(str.isalpha, head))
            self._take_drawn(count, total, values, f"{named}/{total}")

    def _take_drawn(self, count: int, total: int, values: dict[str, float], bar: str) -> None:
        """A bar is drawn when its count is raised, with the loss of the step before, and when a loss is set: a loss
        is reported when it changes, or when the count goes on without a change."""
        loss = values["train_loss"]
        if self._bar_drawn is None:
            # In `for batch in tqdm(…)` the loss is set before the count is raised.
            self._bar_ahead = int(self._bar_began == (total, count))
        changed, self._bar_drawn = loss != self._bar_drawn, loss
        if self._held is not None and self._held[0] != count:
            self._take_held()
        step = count + self._bar_ahead
        report = {**values, "step": step, "total": total}
        if changed or "val_loss" in values:
            self._held = None
            self._take("progress bar", report, bar)
        elif step <= total:
            if count == 0:
                # A new epoch's bar still has the loss of the last one.
                del report["train_loss"]
            self._held = count, report, bar

    def _take_held(self) -> None:
        if self._held is not None:
            self._take("progress bar", *self._held[1:])
            self._held = None

    def _read_dict(self, numbers: dict[str, float]) -> None:
        values = metrics_of(numbers)
        if not values.keys() & LOSSES or _SUMMARY in numbers:
            self.reads += _SUMMARY in numbers
            return
        self._settle()
        if "step" not in values and self._bar is not None:
            self.reads, self.read_as, self._awaiting = self.reads + 1, "dict", values
        elif "step" in values:
            self._take("dict", values)
        else:
            self._logs += "train_loss" in values
            self._take("dict", {**values, "step": self._logs if "train_loss" in values else self._reports.last or 0})

    def _read_named(self, text: str) -> None:
        """A line of no known form."""
        values = metrics_of(named_numbers(text))
        if not values.keys() & LOSSES or not values.keys() & {"step", "epoch"}:
            return
        if "val_loss" not in values and metric_patterns.speaks_of_validation(text[: text.lower().find("loss")]):
            values["val_loss"] = values.pop("train_loss")
        if "step" not in values and "train_loss" in values:
            # Where there are steps, an epoch's loss is the mean of theirs.
            self._by_epochs = self._by_epochs or self._reports.last is None
            if self._by_epochs:
                values = {**values, "step": values["epoch"], "total": values.get("epochs", 0)}
            else:
                del values["train_loss"]
        self._take("step and loss", values)

    def _take(self, read_as: str, values: dict[str, float], in_epoch: str = "") -> None:
        """`in_epoch` names what is counted, if it is counted in each epoch anew."""
        step, total = as_count(values.get("step")), as_count(values.get("total")) or None
        if step is None and (not values.keys() & LOSSES or "step" in values):
            self._total = total or self._total
            return
        if step is None:
            step = self._reports.last if self._bar is None else self._bar[0]
        elif not self._by_epochs:
            step, total = self._position(step, total, values, in_epoch)
            if read_as == "progress bar" and step == self._reports.last:
                # It is drawn again, maybe with the loss of an evaluation.
                values = {name: value for name, value in values.items() if name in _APART}
        self.reads, self.read_as = self.reads + 1, read_as
        self._reports.write(step or 0, values, total=total or self._total)

    def _position(
        self, step: int, total: int | None, values: Mapping[str, float], in_epoch: str
    ) -> tuple[int, int | None]:
        """The step, and the number of steps, from the training's beginning on."""
        epoch, epochs = as_count(values.get("epoch")), as_count(values.get("epochs"))
        if epoch is None and not in_epoch:
            return step, total
        counted, before, base, last, stride = self._place
        if counted != in_epoch:
            before, base, last, stride = epoch, 0, 0, 1
        repeats = bool(in_epoch) or (epochs is not None and total is not None)
        advanced = epoch is not None and before is not None and epoch > before
        if repeats and epoch is not None and total is not None:
            if self._first_epoch is None:
                # A run that was resumed begins with a later one.
                self._first_epoch = 1 if epoch == 1 or (epoch > 1 and epochs is not None) else 0
            base = max(0, epoch - self._first_epoch) * total
        elif (repeats and (advanced or step < last)) or (advanced and step < last):
            # An epoch whose count begins with 0 has more steps than its last number.
            base += total or last + (0 if step else 1 if last % stride else stride)
        self._place = in_epoch, epoch, base, step, max(stride, step - last)
        if total is not None and repeats and epoch is not None:
            total = epochs * total if epochs is not None else None
        elif total is not None:
            total += base
        return base + step, total

    def _settle(self) -> None:
        """Report what awaits the bar's step."""
        if self._awaiting:
            step, total = self._bar or (0, 0)
            self._reports.write(step, self._awaiting, total=total)
            self._awaiting = {}


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

    def _report(self, by_step: dict[int, dict[str, float]]) -> None:
        for step, values in sorted(by_step.items()):
            at = values.pop("")
            if any(name.endswith(_SUMMARY) for name in values):
                values = {name: value for name, value in values.items() if not name.endswith("train_loss")}
            self._reports.write(step, metrics_of(values), at)

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
            with open_regular(path) as file:
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
    fields = dict(_fields(event))
    # Zero is not written.
    step, at, summary = fields.get(_STEP, 0), fields.get(_WALL_TIME, bytes(8)), fields.get(_SUMMARIES)
    if not isinstance(step, int) or not isinstance(at, bytes) or len(at) != 8 or not isinstance(summary, bytes):
        return
    for value in (value for number, value in _fields(summary) if number == _VALUE and isinstance(value, bytes)):
        parts = {number: part for number, part in _fields(value) if isinstance(part, bytes)}
        if len(scalar := parts.get(_SIMPLE_VALUE, b"")) == 4:
            name = parts.get(_TAG, b"").decode(errors="replace")
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


def _numbers(text: str) -> dict[str, float]:
    """The numbers of a JSON object or a Python dict and of those in it, also the numbers in quotes; {} for anything
    else."""
    try:
        parsed: Any = json.loads(text)
    except (ValueError, RecursionError):
        try:
            parsed = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return {}
    numbers = {}
    for name, value in parsed.items() if isinstance(parsed, dict) else ():
        inner = value.items() if isinstance(value, dict) else ()
        for full, number in ((name, value), *((f"{name}/{within}", number) for within, number in inner)):
            if isinstance(full, str) and isinstance(number, (int, float, str)) and not isinstance(number, bool):
                with contextlib.suppress(ValueError, OverflowError):
                    numbers[full] = float(number)
    return numbers
