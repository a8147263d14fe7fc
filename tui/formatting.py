"""Figures and attempts as text, for the command line and the panes: durations, ages, sizes, plain tables, and one-
line summaries of a run's attempts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from engine.errors import InputError, memory_text, plural, reason_text, size_text

if TYPE_CHECKING:
    from engine.api import Comparison, Difference, LinkMeasure, Prediction, QueueItem, QueueSnapshot
    from engine.snapshots import (
        AttemptStatus,
        CopyProgress,
        FetchProgress,
        RunResult,
        RunSnapshot,
        Sample,
        TrackerStatus,
        TrainedFile,
    )

NOT_MEASURED = "-"
"""Shown for None: never a guess."""


QUIET_S: Final = 120.0
"""Without a sign from a rank, from which on that is said; or half of what counts as a hang, where that is less."""
_USUAL_STEPS: Final = 3.0
"""Steps of the usual length that are no silence."""


def duration(seconds: float | None) -> str:
    """ "0:42", "41:12" or "26:03:07"; whole seconds, rounded down."""
    if seconds is None:
        return NOT_MEASURED
    whole = max(0, int(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def axis_text(axis: str) -> Callable[[float], str]:
    """Writes x of a chart's axis."""
    return {"time": duration, "tokens": count_text}.get(axis, "{:,.0f}".format)


def count_text(count: float) -> str:
    """ "12,300", "1.25 M", "3 G"."""
    for unit, factor in (("G", 1e9), ("M", 1e6)):
        if abs(count) >= factor:
            return f"{count / factor:.4g} {unit}"
    return f"{count:,.0f}"


def scale_of(unit: str, highest: float) -> tuple[float, str]:
    """The divisor of a series in `unit` for an axis up to `highest`, and its unit then."""
    if unit == "%":
        return 0.01, "%"
    if not unit.startswith("B"):
        return 1.0, unit
    # As everywhere: memory in powers of 1024, networks in powers of 1000.
    base = 1024.0 if unit == "B" else 1e3
    steps = [(base**4, "T"), (base**3, "G"), (base**2, "M"), (base, "k")]
    factor, prefix = next((step for step in steps if highest >= step[0]), (1.0, ""))
    return factor, prefix + unit


def figure_text(value: float, unit: str) -> str:
    """A value of a series with its unit."""
    factor, shown = scale_of(unit, abs(value))
    number = f"{value / factor:,.0f}" if abs(value / factor) >= 1000 else f"{value / factor:.4g}"
    return f"{number} {shown}".strip()


def span(seconds: float | None) -> str:
    """ "19 s", "41 min", "2 h 03 min", "1 d 4 h": a time to come, rounded down."""
    if seconds is None:
        return NOT_MEASURED
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min" if minutes else f"{whole} s"


_UNITS_S: Final = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(text: str) -> float:
    """A length of time as in "90m", "8h" or "1h30m". Raises InputError."""
    parts = re.findall(r"(\d+(?:\.\d+)?) ?(s|min|m|h|d) ?", text.strip())
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if not seconds or "".join("".join(part) for part in parts) != text.replace(" ", ""):
        raise InputError(f"{text!r}: expected a time such as 30m, 8h or 2d")
    return seconds


def age(then: datetime | None, now: datetime) -> str:
    """Time since `then` in its largest unit: "12 s", "3 min", "2 h", "5 d"; "now" below a second or in the future."""
    if then is None:
        return NOT_MEASURED
    seconds = (now - then).total_seconds()
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return "now"


def ago(then: datetime | None, now: datetime, *, at_once: str = "just now") -> str:
    """ "3 min ago"; `at_once` below a second."""
    return at_once if (text := age(then, now)) == "now" else f"{text} ago"


def quiet_text(snapshot: RunSnapshot, now: datetime) -> str | None:
    """Since when no rank has shown that it goes on, and when that counts as a hang; None while that is nothing
    unusual."""
    if (quiet := snapshot.quiet) is None:
        return None
    steps = [(rank.typical_s or 0.0) + (rank.exchange_s or 0.0) for rank in snapshot.ranks]
    seconds = (now - quiet.since).total_seconds()
    hang_s = quiet.hang_s
    if seconds < max(min(QUIET_S, (hang_s or 2 * QUIET_S) / 2), _USUAL_STEPS * max(steps, default=0.0)):
        return None
    silence = f"no {quiet.sign} from any rank for {span(seconds)}"
    if hang_s is None:
        return silence
    limit = f"{hang_s:g} s" if hang_s % 60 else span(hang_s)
    return f"{silence}; it counts as a hang after {limit} at the earliest"


def size(count: int | float | None) -> str:
    return NOT_MEASURED if count is None else size_text(count)


def memory(count: int | float | None) -> str:
    return NOT_MEASURED if count is None else memory_text(count)


def loss(value: float | None) -> str:
    """Four significant places: what mlx-lm prints, with room for small ones."""
    if value is None:
        return NOT_MEASURED
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


def train_loss(snapshot: RunSnapshot) -> str:
    """The loss of the newest report, in words where it is not finite."""
    lost = snapshot.series.not_finite
    return f"not finite since {lost[0]:,}" if lost is not None else loss(snapshot.record.train_loss)


def rate(value: float | None, unit: str = "tok/s") -> str:
    """A throughput: whole from 100 on, else with one decimal."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def throughput(examples_per_s: float | None) -> str:
    """Examples per second: two decimals below 10, where a large model's are."""
    if examples_per_s is None:
        return NOT_MEASURED
    return f"{examples_per_s:.2f} ex/s" if examples_per_s < 10 else rate(examples_per_s, "ex/s")


def latency(seconds: float | None) -> str:
    """ "48 µs", "1.2 ms", "0.42 s"."""
    if seconds is None:
        return NOT_MEASURED
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def bandwidth(bytes_per_s: float | None) -> str:
    """ "8.1 GB/s"."""
    return NOT_MEASURED if bytes_per_s is None else f"{size(bytes_per_s)}/s"


def spread(variation: float | None) -> str:
    """A coefficient of variation: "±2 %"."""
    return NOT_MEASURED if variation is None else f"±{variation * 100:.0f} %"


def link_text(link: LinkMeasure) -> str:
    """ "48 µs, 8.1 GB/s", or why that is not known."""
    if link.problem is not None:
        return f"not measured: {link.problem}"
    return f"{latency(link.latency_s)}, {bandwidth(link.bandwidth_bytes_per_s)}"


def calibration_notes(predicted: Prediction) -> Iterator[tuple[str, str]]:
    """All that a calibration says beside the table of its nodes, with labels: the shares and the speed that follow from
    it, links, priority, and what could not be measured."""
    taken = predicted.calibration
    yield "shares", predicted.shares.reason
    yield from (("warning", text) for text in predicted.shares.warnings if text != predicted.shares.reason)
    yield "predicted", _predicted(predicted)
    if taken is None:
        return
    for link in taken.sums:
        yield "link" if link in taken.links else "all ranks", f"{' - '.join(link.nodes)}: {link_text(link)}"
    if (group := taken.group) is not None and group.step_s is not None:
        parts = ", ".join(f"{node} {latency(seconds)}" for node, seconds in group.compute_s.items())
        waiting = f"; waiting {group.waiting:.0%}" if group.waiting is not None else ""
        yield "steps", f"all ranks ({group.strategy}): {latency(group.step_s)}, of which computation: {parts}{waiting}"
    elif group is not None and group.problem:
        yield "not measured", f"all ranks' steps: {group.problem}"
    yield "priority", "; ".join(dict.fromkeys(measure.qos for measure in taken.nodes if measure.qos)) or "not measured"
    yield from (("note", note) for note in taken.notes)
    yield from (("not measured", f"{measure.node}: {measure.problem}") for measure in taken.nodes if measure.problem)


def _predicted(prediction: Prediction) -> str:
    predicted = prediction.throughput
    if predicted.examples_per_s is None:
        return f"nothing: {predicted.why_not}"
    text = f"{throughput(predicted.examples_per_s)}, {rate(predicted.tokens_per_s)}"
    if predicted.speed_up is None or predicted.efficiency is None:
        return text
    text += f", {predicted.speed_up:.2f} times the fastest node alone, efficiency {predicted.efficiency:.0%}"
    return f"{text}, {latency(predicted.communicate_s)} of each {latency(predicted.step_s)} for the sum"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], room: int | None = None, lead: int = 2) -> str:
    """Columns padded to their widest cell, two spaces apart, no trailing blanks; the last column is never padded. What
    has no `room` follows as another table, with the first `lead` columns again."""
    grid = [headers, *rows]
    widths = [max(len(row[column]) for row in grid) for column in range(len(headers))]
    parts = [list(range(lead))]
    for column in range(lead, len(headers)):
        taken = sum(widths[other] + 2 for other in parts[-1]) + widths[column]
        if room is not None and taken > room and len(parts[-1]) > lead:
            parts.append(list(range(lead)))
        parts[-1].append(column)
    tables = (["  ".join(row[at].ljust(widths[at]) for at in part).rstrip() for row in grid] for part in parts)
    return "\n\n".join(map("\n".join, tables))


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` columns, its end replaced by "…" where it is longer."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def short_name(name: str, width: int) -> str:
    """A run's name in at most `width` columns, with its last part, which tells it from others."""
    return name if len(name) <= width else f"{name[: max(0, width - 6)]}…{name[-5:]}"


_SOURCES = {
    "emergency": "the state of iteration {} that its survivors saved",
    "checkpoint": "the checkpoint of iteration {}",
    "adapter": "the adapters of iteration {}",
}


def attempt_summary(attempt: AttemptStatus) -> str:
    """An attempt's start and, when it failed, its end: one line."""
    parts = [attempt.why] if attempt.why else []
    if attempt.source in _SOURCES:
        parts.append("from " + _SOURCES[attempt.source].format(attempt.resumed_at))
    elif attempt.source == "command":
        parts.append(f"its first step is {attempt.resumed_at + 1}" if attempt.resumed_at else "from the beginning")
    parts += _recovery(attempt)
    if attempt.reason is not None:
        reached = f" at iteration {attempt.reached}" if attempt.reached else ""
        parts.append(f"{reason_text(attempt.reason)}{_place(attempt)}{reached}")
    return ", ".join(parts) if parts else "as planned"


def membership_change(attempt: AttemptStatus, before: AttemptStatus | None) -> str | None:
    """The node of each rank, when an attempt's differ from those of the one before; else None."""
    if before is None or attempt.members == before.members:
        return None
    ranks = ", ".join(f"rank {rank} on {node}" for rank, node in attempt.members)
    gone = [node for _, node in before.members if node not in [name for _, name in attempt.members]]
    return ranks + (f"; without {', '.join(gone)}" if gone else "")


def trained_text(file: TrainedFile) -> str:
    """ "…/adapters.safetensors (1.5 MB) on ultra"; "checkpoint of iteration 80 (1.5 MB), in 2 parts on ultra, max"."""
    if len(file.parts) < 2:
        return f"{file.path} ({size(file.size)}) on {file.node}"
    state = f"checkpoint of iteration {file.iteration:,} ({size(file.size)})"
    return f"{state}, in {len(file.parts)} parts on {', '.join(file.nodes)}"


def result_text(result: RunResult) -> str:
    """ "val loss 5.831 to 2.143, best 2.101 at iteration 80; 1,234,567 tokens in 12:01"; "" where nothing is known."""
    parts = []
    if (first := result.first) is not None and (last := result.last) is not None:
        change = f" to {loss(last.loss)}" if last != first else ""
        best = result.best if result.best != last else None
        text = f", best {loss(best.loss)} at iteration {best.iteration:,}" if best is not None else ""
        parts.append(f"val loss {loss(first.loss)}{change}{text}")
    if result.tokens:
        parts.append(f"{plural(result.tokens, 'token')} in {duration(result.seconds)}")
    if (energy := result.energy) is not None:
        parts.append(f"{energy.joules / 3.6e6:.3g} kWh")
    return "; ".join(parts)


_CELLS: Final[dict[str, Callable[[float], str]]] = {
    **dict.fromkeys(("time", "time lost to recoveries"), duration),
    "step time": latency,
    "peak memory": memory,
    "tokens/s": lambda value: rate(value, ""),
    "energy": lambda joules: f"{joules / 3.6e6:.3g} kWh",
    "J per million tokens": lambda joules: f"{joules:,.0f}",
}
"""Figures of a comparison by their key; losses are all others of the result."""


def cell_text(difference: Difference, value: object) -> str:
    """A value in a comparison's table."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "true" if value else "false"
    if difference.key == "why it ended":
        return reason_text(str(value))
    if difference.section == "result" and isinstance(value, int | float):
        return _CELLS.get(difference.key, loss)(value).strip()
    return f"{value:g}" if isinstance(value, float) else str(value)


def comparison_rows(comparison: Comparison, width: int = 40) -> list[list[str]]:
    """Section (once), key, a text of at most `width` for each run, and the name of the best."""
    rows, section = list[list[str]](), None
    for difference in comparison.differences:
        label, section = difference.section if difference.section != section else "", difference.section
        cells = [shortened(cell_text(difference, value), width) for value in difference.values]
        best = comparison.names[difference.best] if difference.best is not None else ""
        rows.append([label, difference.key, *cells, best])
    return rows


def sample_texts(samples: Sequence[Sample]) -> Iterator[tuple[str, str]]:
    """Each prompt and its answers, with labels: "prompt", "base" for those before the first update, "at 40"; and
    their share of the training time."""
    for prompt in dict.fromkeys(sample.prompt for sample in samples):
        yield "prompt", prompt
        for sample in samples:
            if sample.prompt == prompt:
                yield f"at {sample.iteration:,}" if sample.iteration else "base", sample.text or NOT_MEASURED
    newest = max(samples, key=lambda sample: sample.iteration, default=None)
    if newest is not None and newest.share is not None:
        yield "answers", f"{newest.share:.1%} of the training time"


def resume_text(snapshot: RunSnapshot) -> str:
    """ "from iteration 37 (checkpoint on ultra)", as far as it is known before the nodes are asked."""
    files = snapshot.result.newest("checkpoint") if snapshot.result is not None else ()
    if files:
        nodes = ", ".join(dict.fromkeys(file.node for file in files))
        return f"from iteration {files[0].iteration:,} (checkpoint on {nodes})"
    return "from the newest state that its nodes have"


def fetch_text(step: FetchProgress) -> str:
    """ "1.2 GB of 4.1 GB, 112 MB/s, ETA 26 s", within 80 columns."""
    parts = [f"{size(step.bytes)} of {size(step.total)}"]
    if step.bytes_per_s:
        eta = span((step.total - step.bytes) / step.bytes_per_s)
        parts += [bandwidth(step.bytes_per_s), f"ETA {eta}"]
    return shortened(", ".join([*parts, *filter(None, [step.note])]), 79)


def copy_text(step: CopyProgress) -> str:
    """ "bea: 1.2 GB of 4.0 GB"."""
    if step.path is not None:
        return f"{step.node}: {size(step.total)} in {step.path}, each file verified"
    return f"{step.node}: {step.text}"


def checkpoint_text(result: RunResult) -> str | None:
    """ "iteration 390 (1.2 GB) on ana, bea"; None without one."""
    files = result.newest("checkpoint")
    nodes = ", ".join(dict.fromkeys(file.node for file in files))
    total = size(sum(file.bytes for file in files))
    return f"iteration {files[0].iteration:,} ({total}) on {nodes}" if files else None


def terminal_notification(text: str) -> str:
    """OSC 9, which iTerm2, kitty, WezTerm, Ghostty and Windows Terminal show as a notification, and the bell."""
    return f"\x1b]9;{''.join(filter(str.isprintable, text))}\x07\a"


def tracker_texts(tracker: TrackerStatus) -> list[str]:
    """The command or address that shows its curves, and its failure."""
    failed = f"{tracker.name} is no longer written: {tracker.problem}" if tracker.problem is not None else None
    return [text for text in (tracker.use, failed) if text is not None]


def recovery_summary(snapshot: RunSnapshot) -> str | None:
    """ "recovered from rank 1's death at iteration 37, 1 step repeated, 8.2 s" of the last attempt, or what is going on
    before the next; None of a first."""
    if snapshot.recovery is not None:
        return snapshot.recovery
    last = snapshot.attempts[-1] if snapshot.attempts else None
    if last is None or last.why is None:
        return None
    why = last.why if last.recovery_s is None else last.why.replace("recovers", "recovered", 1)
    return ", ".join([why, *_recovery(last)])


def _recovery(attempt: AttemptStatus) -> list[str]:
    """That it begins anew, the steps that it makes again, where they are known, and the time to its first one."""
    anew = [f"begins anew: no state was saved{f' up to iteration {attempt.repeated}' if attempt.repeated else ''}"]
    anew *= attempt.source == "none"
    if attempt.recovery_s is None:
        return anew
    least = "at least " if attempt.source == "command" and attempt.resumed_at else ""
    repeated = [f"{least}{plural(attempt.repeated, 'step')} repeated"] if attempt.repeated is not None else []
    return [*anew, *repeated, f"{attempt.recovery_s:.1f} s"]


def _place(attempt: AttemptStatus) -> str:
    if attempt.rank is None:
        return f" on {attempt.host}" if attempt.host else ""
    return f": rank {attempt.rank}" + (f" on {attempt.host}" if attempt.host else "")


def item_state(item: QueueItem) -> str:
    """That of its run once this has ended."""
    return item.outcome.value if item.outcome is not None else item.state


def item_why(item: QueueItem, queue: QueueSnapshot) -> str:
    """The reason why an item of the queue waits, else its run, and why that ended."""
    if waits := queue.waits.get(item.id):
        return waits if waits.startswith("not before") else f"waits for {waits}"
    ended = f" ({reason_text(item.reason)})" if item.reason not in (None, "completed") else ""
    return f"{item.why or item.run or ''}{ended}"
