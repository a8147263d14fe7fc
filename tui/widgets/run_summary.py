"""A run as lines of text: the ranks side by side, key figures, alarms, verification, attempts, and how it ended with
its first cause and fix.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Final

from textual.content import Content

from engine import api
from engine.errors import plural, reason_text
from tui.fixes import pasted
from tui.formatting import (
    age,
    attempt_summary,
    duration,
    loss,
    membership_change,
    memory,
    quiet_text,
    rate,
    recovery_summary,
    result_text,
    sample_texts,
    tracker_texts,
    trained_text,
)
from tui.glyphs import (
    FAIL,
    MUTED,
    OK,
    PENDING,
    PHASES,
    RUNNING,
    STALE,
    STATES,
    STOPPED,
    UNKNOWN,
    WARN,
    Glyph,
    rank_style,
)
from tui.node_state import away
from tui.state import RANK_LIMIT_S, DeckState
from tui.task_results import result_lines, serving_lines
from tui.widgets.text import Column, lay_out, pair

if TYPE_CHECKING:
    from engine.models import RunRecord
    from engine.snapshots import ChunkProgress, RankStatus, RunSnapshot, Verification


SHOWN_ALARMS: Final = 3
"""Alarms, the newest: `flightdeck show` has all."""
GRAVE: Final = frozenset({"backend", "replicas"})
"""Lines without which a training is worthless; the others only warn."""
_INDENT: Final = 14
_NAMED_RANKS: Final = 4
"""On one line; more are counted."""
NAMED_NODES: Final = 8
"""Unreachable nodes that are named."""


def title(record: RunRecord) -> str:
    """The run's id; of a task what it is, and of which run."""
    return f"{record.task} of {record.source}" if record.task is not None else record.id


def alarms(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    if not state.active:
        return []
    silence = quiet_text(snapshot, state.now)
    calm = [pair(f"{state.glyphs.shape(PENDING)} quiet", silence, width, style=MUTED)] if silence is not None else []
    mark = state.glyphs.shape(WARN)
    lines = [
        pair(f"{mark} alarm", f"{alarm.message} (iteration {alarm.iteration}, {age(alarm.at, state.now)})", width)
        for alarm in snapshot.alarms[-SHOWN_ALARMS:]
    ]
    if (more := len(snapshot.alarms) - SHOWN_ALARMS) > 0:
        lines.append(pair("", f"and {more} before: `flightdeck show {snapshot.record.id}`", width, style=MUTED))
    return [*(line.stylize("$warning") for line in lines), *calm]


def verification(state: DeckState, snapshot: RunSnapshot, width: int, *, every: bool) -> list[Content]:
    """A line each; without `every` only of what is not as it should be."""
    lines = [_with_telemetry(state, snapshot, line) for line in snapshot.verification]
    return [_line(state, line, width) for line in lines if every or line.good is False]


def verified_line(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """The names of what is as it should be, and of what is not known, on one line."""
    lines = [_with_telemetry(state, snapshot, line) for line in snapshot.verification]
    named = {glyph: [line.name for line in lines if line.good is good] for good, glyph in ((True, OK), (None, UNKNOWN))}
    words = {OK: "as expected:", UNKNOWN: "not known:"}
    parts = [
        Content.assemble(state.glyphs.state(glyph, words[glyph]), (f" {', '.join(names)}", MUTED))
        for glyph, names in named.items()
        if names
    ]
    return [Content("   ").join(parts).truncate(width, ellipsis=not state.glyphs.ascii)] if parts else []


def ranks_well(state: DeckState, snapshot: RunSnapshot) -> bool:
    """Every rank trains, or has ended as it should."""
    return all(rank_glyph(state, rank)[0] in (RUNNING, OK) for rank in snapshot.ranks)


def _line(state: DeckState, line: Verification, width: int) -> Content:
    glyph = _glyph(line)
    mark = Content.assemble((f"{state.glyphs.shape(glyph)} ", glyph.style))
    style = MUTED if line.good is None else ""
    return Content.assemble(mark, pair(line.name, line.text, width - 2, style=style, indent=_INDENT - 2))


def _glyph(line: Verification) -> Glyph:
    if line.good is None:
        return UNKNOWN
    if line.good:
        return OK
    return FAIL if line.name in GRAVE else WARN


def _with_telemetry(state: DeckState, snapshot: RunSnapshot, line: Verification) -> Verification:
    """Fill in GPU use, which only the console has, from telemetry."""
    # A rank that loads its model or is started again does not use its GPU yet.
    training = state.ranks_work and all(rank.step_s is not None for rank in snapshot.ranks)
    if line.name != api.GPU or line.text != api.NOT_MEASURED or not training:
        return line
    nodes = dict.fromkeys(rank.node for rank in snapshot.ranks)
    return api.gpu_line({node: state.telemetry[node].gpu_use if node in state.telemetry else None for node in nodes})


_NOISE: Final = 0.01
"""Less than this share is no difference between two ranks."""
MARKED_SKEW = 0.05
"""A rank is called slowest when it needs this much longer than the fastest; below it is noise."""


_ALONE: Final = ("saving", "generating")
"""Phases of one rank while the others wait."""


def rank_glyph(state: DeckState, rank: RankStatus) -> tuple[Glyph, str]:
    """The rank's phase: stale when its last report is old, its exit code or signal once it has ended."""
    if rank.signal is not None:
        return _ended_badly(state, rank), f"signal {rank.signal}"
    if rank.exit_code is not None and rank.exit_code != 0:
        return _ended_badly(state, rank), f"exit {rank.exit_code}"
    if rank.phase == "waiting" and not state.active:
        return PENDING, "not started"
    if (link := away(state, rank)) is not None and rank.phase != "ended":
        return UNKNOWN, f"{link.condition} {age(link.since, state.now)}"
    working = rank.phase in ("training", "validating", "saving", "generating")
    # A rank is only told to save by a stop, which may come while the run recovers.
    stopped = rank.phase == "saving" and state.snapshot is not None and state.snapshot.stop is not None
    if working and state.active and not state.ranks_work and not stopped:
        return PENDING, "waiting"
    if working and state.active and _silent(state, rank):
        ranks = state.snapshot.ranks if state.snapshot is not None else ()
        busy = [other.rank for other in ranks if other.phase in _ALONE and not _silent(state, other)]
        if busy:
            return PENDING, f"waits for rank {busy[0]}"
        return STALE, f"{rank.phase}, silent {age(rank.seen_at, state.now)}"
    if rank.phase == "ended" and rank.exit_code is None:
        return STOPPED, "ended"
    return PHASES.get(rank.phase, STALE), rank.phase


def _silent(state: DeckState, rank: RankStatus) -> bool:
    return rank.seen_at is not None and state.age_s(rank.seen_at) > RANK_LIMIT_S


def _ended_badly(state: DeckState, rank: RankStatus) -> Glyph:
    """Only the first failure is one; the other ranks were stopped because of it, or by a person."""
    record = state.snapshot.record if state.snapshot is not None else None
    stopped = record is not None and (record.state == "aborted" or record.rank not in (None, rank.rank))
    return STOPPED if stopped else FAIL


def own_program(snapshot: RunSnapshot) -> bool:
    """The run is a program of the user's own: preflight checked for it. Such a rank reports nothing but its output."""
    return any(check.name == "program_present" and check.status == "pass" for check in snapshot.checks)


def _straggler(state: DeckState, snapshot: RunSnapshot) -> int | None:
    return slowest(snapshot.ranks) if state.ranks_work else None


def slowest(ranks: tuple[RankStatus, ...]) -> int | None:
    worst = skew(ranks)
    return worst[1] if worst is not None and worst[0] > MARKED_SKEW else None


def skew(ranks: tuple[RankStatus, ...]) -> tuple[float, int] | None:
    """How much longer the slowest rank computes than the fastest, as a share of the latter, and which it is; None where
    there are not two to compare."""
    times = [(compute_s(rank), rank.rank) for rank in ranks]
    timed = [(seconds, rank) for seconds, rank in times if seconds is not None]
    if len(timed) < 2:
        return None
    (longest, number), (shortest, _) = max(timed), min(timed)
    return (longest / shortest - 1, number) if shortest > 0 else None


def compute_s(rank: RankStatus) -> float | None:
    """A typical step of late, by which the slowest rank is told; else the last one."""
    return rank.step_s if rank.typical_s is None else rank.typical_s


def rank_table(state: DeckState, snapshot: RunSnapshot, width: int, *, headed: bool) -> list[Content]:
    """A line a rank, with a header line when `headed`."""
    ranks, figure = snapshot.ranks, state.glyphs.known
    if not ranks:
        return [Content.styled("no rank has started yet", MUTED)]
    took = [compute_s(rank) for rank in ranks]
    longest = max((seconds or 0.0 for seconds in took), default=0.0)
    straggler = _straggler(state, snapshot)
    arrow = "<- slowest" if state.glyphs.ascii else "← slowest"
    states = [rank_glyph(state, rank) for rank in ranks]
    bars = [state.glyphs.bar(seconds / longest, 9) if seconds and longest else "" for seconds in took]
    columns = [
        Column("rank", [Content.styled(f"rank {rank.rank}", rank_style(rank.rank)) for rank in ranks], 9),
        Column("node", [rank.node for rank in ranks], 3),
        Column("state", [state.glyphs.state(glyph, word) for glyph, word in states], 8, reserved=12),
        Column("compute", [Content.styled(bar, rank_style(r.rank)) for bar, r in zip(bars, ranks, strict=True)], 5),
        Column("", [figure(seconds, _seconds) for seconds in took], 9, right=True, reserved=8),
        Column("step", [figure(rank.iteration, ",") for rank in ranks], 5, right=True),
        Column("peak", [figure(rank.memory_bytes or None, memory) for rank in ranks], 6, right=True, reserved=6),
        Column("", [Content.styled(arrow if r.rank == straggler else "", "$warning") for r in ranks], 8,
               reserved=len(arrow) if state.active and len(ranks) > 1 else 0),
    ]  # fmt: skip
    if state.snapshot is not None and state.snapshot.record.task is not None:
        peak = ["peak"] if any(rank.memory_bytes for rank in ranks) else []
        columns = [column for column in columns if column.title in ("rank", "node", "state", *peak)]
    elif headed:
        waits = [figure(rank.exchange_s, _seconds) for rank in ranks]
        norms = [figure(rank.grad_norm, ".3g") for rank in ranks]
        place = [column.title for column in columns].index("step")
        columns.insert(place, Column("exchange", waits, 4, right=True))
        columns.insert(place + 2, Column("gradient", norms, 3, right=True))
        columns.insert(-1, Column("last", [figure(last_sign(state, rank), str) for rank in ranks], 4, right=True))
    head, rows = lay_out(columns, width)
    return [head, *rows] if headed else rows


def last_sign(state: DeckState, rank: RankStatus) -> str | None:
    """The rank's last output or step, and how long ago it came."""
    sign, at = max(rank.signs.items(), key=lambda item: item[1], default=("", None))
    return f"{sign} {age(at, state.now)}" if at is not None else None


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def rank_line(state: DeckState, snapshot: RunSnapshot, width: int) -> Content:
    """All ranks on one line, as far as there is room: state, compute time of a step, who is slowest."""
    straggler = _straggler(state, snapshot)
    arrow = " <- slowest" if state.glyphs.ascii else " ← slowest"
    parts = []
    for rank in snapshot.ranks:
        glyph, word = rank_glyph(state, rank)
        sign = last_sign(state, rank) if rank.phase != "ended" else None
        seconds = compute_s(rank)
        took = f" {_seconds(seconds)}" if seconds is not None else f" {sign}" if sign is not None else ""
        late = Content.styled(arrow if rank.rank == straggler else "", "$warning")
        named = Content.styled(f"rank {rank.rank} ", rank_style(rank.rank))
        parts.append(Content.assemble(named, state.glyphs.state(glyph, word), took, late))
    if len(parts) > _NAMED_RANKS or sum(part.cell_length + 3 for part in parts) > width + 3:
        times = [seconds for rank in snapshot.ranks if (seconds := compute_s(rank)) is not None]
        spread = f"   {min(times):.3f} to {max(times):.3f} s" if times else ""
        late = Content.styled(f"   rank {straggler}{arrow}" if straggler is not None else "", "$warning")
        words = Counter(rank_glyph(state, rank) for rank in snapshot.ranks)
        states = [state.glyphs.state(glyph, f"{count} {word}") for (glyph, word), count in words.items()]
        parts = [Content.assemble(f"{len(parts)} ranks", spread, late), *states]
    return Content("   ").join(parts).truncate(width, ellipsis=not state.glyphs.ascii)


def _predicted_rate(snapshot: RunSnapshot) -> str | None:
    """The rate of the calibration that divided the run, and the run's deviation from it."""
    expected = snapshot.division.tokens_per_s if snapshot.division is not None else None
    if expected is None:
        return None
    now = snapshot.record.tokens_per_second
    return f"{rate(expected)} ({now / expected - 1:+.0%})" if now is not None and expected else rate(expected)


_SHORTER: Final = (
    ("peak memory", "peak"), ("learning rate", "lr"), ("gradient norm", "gradient"), ("slowest rank", "slowest"),
    ("validation", "val"), ("gradient", None), ("lr", None), ("slowest", None), ("speed", None), ("data", None),
    ("predicted", None), ("peak", None),
)  # fmt: skip
"""How the figures give way, one after the other: a shorter name, or None to leave it out."""


def _chunk(chunk: ChunkProgress) -> str:
    epoch = f", epoch {chunk.epoch}" if chunk.epoch > 1 else ""
    return f"chunk {chunk.done:,}/{chunk.of:,} ({chunk.done / chunk.of:.0%}{epoch})"


def figures(state: DeckState, snapshot: RunSnapshot, width: int, *, peak: bool = False) -> Content:
    """The figures beside the chart on one line, as far as there is room, by short names where there is little.
    `peak`: the highest of all ranks, where these are not shown one by one."""
    record = snapshot.record
    worst = skew(snapshot.ranks) if state.active else None
    peaks = [rank.memory_bytes for rank in snapshot.ranks if rank.memory_bytes] if peak else []
    values = {
        "validation": loss(record.val_loss) if record.val_loss is not None else "",
        "test": loss(record.test_loss) if record.test_loss is not None else "",
        "learning rate": f"{snapshot.learning_rate:.3g}" if snapshot.learning_rate is not None else "",
        "peak memory": memory(max(peaks)) if peaks else "",
        "gradient norm": f"{snapshot.grad_norm:.3g}" if snapshot.grad_norm is not None else "",
        "slowest rank": f"+{worst[0]:.0%}" if worst is not None and worst[0] >= _NOISE else "",
        "speed": rate(record.tokens_per_second) if record.tokens_per_second is not None else "",
        "data": _chunk(snapshot.chunk) if snapshot.chunk is not None else "",
        "predicted": _predicted_rate(snapshot) or "",
    }
    parts = {label: value for label, value in values.items() if value}
    for name, short in _SHORTER:
        if sum(len(label) + len(value) + 4 for label, value in parts.items()) <= width + 3:
            break
        parts = {short or label if label == name else label: v for label, v in parts.items() if short or label != name}
    return Content("   ").join([Content.assemble((f"{label} ", MUTED), value) for label, value in parts.items()])


def outcome(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """The shown run's end, with the first cause and its fix when it failed. Empty while all is well."""
    record, glyphs = snapshot.record, state.glyphs
    if record.state == "succeeded":
        lasted = record.ended_at - record.created_at if record.ended_at else None
        took = duration(lasted.total_seconds() if lasted is not None else None)
        steps = plural(record.iterations, "iteration") if record.iterations else "all ranks"
        if record.iteration and record.iterations and record.iteration < record.iterations:
            steps = f"{record.iteration:,} of {steps}"
        lines = [Content.assemble(glyphs.state(STATES["succeeded"], "succeeded"), f"  {steps} in {took}")]
        if record.task is not None:
            lines = [Content.assemble(glyphs.state(STATES["succeeded"], "succeeded"), f"  in {took}")]
        return [*lines, *([pair("note", record.cause, width)] if record.cause else [])]
    diagnosis = snapshot.diagnosis
    if not record.state.ended and diagnosis is None:
        if not snapshot.supervised and not snapshot.record.ended_at:
            return _unsupervised(state)
        return _away(state, snapshot, width)
    unexplained = record.reason in (None, "completed")
    why = record.state.value if unexplained else f"{record.state} ({reason_text(record.reason)})"
    place = _place(snapshot)
    lines = [Content.assemble(glyphs.state(STATES[record.state], why), (f"  {place}" if place else "", "bold"))]
    if snapshot.cause:
        lines.append(pair("first cause" if record.state == "failed" else "cause", snapshot.cause, width))
    if snapshot.fix:
        lines.append(pair("fix", snapshot.fix, width, style="bold"))
    failures = sum(check.status == "fail" for check in snapshot.checks)
    if record.reason == "preflight_failed" and failures:
        lines.append(pair("", f"{plural(failures, 'failed check')}: 2 shows evidence and fix", width))
    if record.excluded:
        lines.append(pair("left out", f"{', '.join(record.excluded)}: the files there differ", width, style="$warning"))
    if record.unconfirmed:
        nodes = ", ".join(record.unconfirmed)
        lines.append(pair("unconfirmed", f"the stop could not be proved on {nodes}", width, style="$error"))
    return lines


def left(state: DeckState, snapshot: RunSnapshot, width: int, *, tall: bool) -> list[Content]:
    """A run that has ended: what it came to, its newest checkpoint and weights, and how these are used. Where the pane
    is not `tall`, no paths and no commands, which `flightdeck show` has."""
    record, file, result = snapshot.record, snapshot.trained, snapshot.result
    if not record.state.ended:
        return []
    lines = []
    if result is not None and (text := result_text(result)):
        fetch = state.key("; u F fetches the weights") if result.fetch_option == "" else f"; {snapshot.fetch}"
        text = text + fetch * bool(result.files) if tall else text.partition(";")[0]
        lines.append(pair("result", text, width))
    if record.state in ("aborted", "failed") and (kept := newest_checkpoint(snapshot)) is not None:
        lines.append(pair("kept", f"the checkpoint of iteration {kept:,}{state.key(': R resumes from it')}", width))
    # A task's own results name its fused model.
    if tall and file is not None and record.task is None:
        lines.append(pair("trained", trained_text(file), width))
    if tall and file is not None:
        lines.append(pair("use it", file.command, width, style="bold"))
    return lines


def commands(state: DeckState, snapshot: RunSnapshot) -> dict[str, str]:
    """Those that are shown for a run that has ended, whole, for a shell here."""
    texts = {"the fix": snapshot.fix}
    if snapshot.record.state.ended:
        if (file := snapshot.trained) is not None:
            # What uses a state is a command of this machine.
            texts["use it"] = file.command if file.parts else pasted(state, file.node, file.command)
        texts |= {tracker.name: tracker.use for tracker in snapshot.trackers}
    return {name: text for name, text in texts.items() if text}


def samples(snapshot: RunSnapshot, width: int) -> list[Content]:
    """The answers while it trained."""
    texts = sample_texts(snapshot.samples)
    return [pair(label, text, width, style="bold" if label == "prompt" else "") for label, text in texts]


def task_results(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """The results of a task on what another run has trained."""
    texts = (
        *result_lines(snapshot.task_results, ended=snapshot.record.state.ended),
        *serving_lines(snapshot, state.key("ctrl+x stops it")),
    )
    lines = [line for text in texts for line in text.splitlines() or [""]]
    return [Content(part) for line in lines for part in textwrap.wrap(line, max(20, width)) or [""]]


def task_lines(state: DeckState, run: str, width: int) -> list[Content]:
    """The tasks on the result of a run, with what each has come to."""
    lines = []
    for task in state.listed.tasks.get(run, ()):
        mark = state.glyphs.shape(STATES[task.state])
        text = f"{mark} {task.state} {state.ago(task.created_at)}{state.glyphs.separator}{task.outcome or task.id}"
        lines.append(pair(task.task or "", text, width))
    return lines


def next_key(state: DeckState, snapshot: RunSnapshot, width: int) -> Content:
    """The key that helps now in a task on what another run has trained."""
    results = snapshot.task_results
    refused = any(result.kind == "fused" and not result.accepted for result in results)
    served = any(result.kind == "serving" for result in results)
    texts = {
        "esc leads to its run": state.read_only,
        "c asks it, ctrl+x stops it": state.active and served,
        "ctrl+x stops it, esc leads to its run": state.active,
        "u f fuses it in another form": refused,
        "u tries again": snapshot.record.state != "succeeded",
        "u p publishes it": snapshot.record.task == "fuse",
        "u lists other uses, esc leads to its run": True,
    }
    return pair("next", next(text for text, holds in texts.items() if holds), width)


def trackers(snapshot: RunSnapshot, width: int) -> list[Content]:
    """While a run goes on only what has failed; then where its curves are, too."""
    ended = snapshot.record.state.ended
    shown = (tracker for tracker in snapshot.trackers if ended or tracker.problem is not None)
    return [pair("tracker", text, width) for tracker in shown for text in tracker_texts(tracker)]


def attempts(snapshot: RunSnapshot, width: int, *, every: bool) -> list[Content]:
    """The recovery of a run and its members by now; with `every`, each of its attempts."""
    numbered = snapshot.attempts
    lines = []
    if every and len(numbered) > 1:
        lines = [pair(f"attempt {attempt.number}", attempt_summary(attempt), width) for attempt in numbered]
    elif (text := recovery_summary(snapshot)) is not None:
        lines = [pair("recovery", text, width)]
    if len(numbered) > 1 and (moved := membership_change(numbered[-1], numbered[0])) is not None:
        lines.append(pair("", moved, width, style=MUTED))
    if snapshot.given_up is not None and len(numbered) > 1:
        lines.append(pair("no restart", snapshot.given_up, width))
    return lines


def _away(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """The nodes that the run's supervisor cannot reach: since when, why, and the consequence."""
    lines: list[Content] = []
    lease_s = state.config.recovery.lease_s if state.config is not None else None
    expired = False
    for rank in snapshot.ranks:
        link = away(state, rank)
        if link is not None and len(lines) < NAMED_NODES:
            expired = expired or (lease_s is not None and state.age_s(link.since) > lease_s)
            text = f"rank {rank.rank} on {rank.node}: {link.condition} for {age(link.since, state.now)}"
            why = f" ({link.why})" if link.why else ""
            mark = f"{state.glyphs.shape(UNKNOWN)} node" if not lines else ""
            lines.append(pair(mark, text + why, width, style="$warning"))
    if lines:
        lease = f"{lease_s:g} s" if lease_s is not None else "its time"
        note = f"a rank goes on training while its node is unreachable; its lease ends it after {lease}"
        if expired:
            note = f"a lease of {lease} has run out: by now its keeper has ended the rank, or is letting it save"
        lines.append(pair("", note, width, style=MUTED))
    return lines


def _unsupervised(state: DeckState) -> list[Content]:
    return [Content.styled("? no supervisor is alive for this run; it is being adopted or fenced", "$warning")]


def _place(snapshot: RunSnapshot) -> str:
    record, parts = snapshot.record, []
    if record.rank is not None:
        parts.append(f"rank {record.rank}" + (f" on {record.host}" if record.host else ""))
    elif record.host:
        parts.append(record.host)
    if record.signal is not None:
        parts.append(f"signal {record.signal}")
    elif record.exit_code is not None:
        parts.append(f"exit {record.exit_code}")
    return ", ".join(parts)


def newest_checkpoint(snapshot: RunSnapshot) -> int | None:
    """Iteration of the one that the run goes on from, also of those saved at an end by force; None when there is none.
    Marks are of all attempts, of which a later one may have begun further back."""
    saved = snapshot.result.newest("checkpoint") if snapshot.result is not None else ()
    marked = (mark.iteration for mark in snapshot.series.marks if mark.kind == "checkpoint")
    return max((file.iteration for file in saved) if saved else marked, default=None)


def marks(snapshot: RunSnapshot) -> list[tuple[int, str]]:
    """The marks of a chart: iterations, each with its kind."""
    placed = [(mark.iteration, mark.kind) for mark in snapshot.series.marks]
    best = min((point for point in snapshot.series.val), key=lambda point: point[1], default=None)
    lost = [(past.reached, "lost node") for past in snapshot.attempts if past.reason == "node_lost" and past.reached]
    return placed + ([(best[0], "best validation")] if best is not None else []) + lost
