"""The ranks of a run side by side: compute time of the last step as bars, who is slowest, memory, phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from tui.formatting import age, loss, rate, size
from tui.glyphs import FAIL, MUTED, PENDING, PHASES, RUNNING, STALE, STOPPED, UNKNOWN, Glyph, rank_style
from tui.state import RANK_LIMIT_S, DeckState
from tui.widgets.columns import Column, lay_out
from tui.widgets.node_state import away

if TYPE_CHECKING:
    from engine.events import ChunkProgress, RankStatus, RunSnapshot

MARKED_SKEW = 0.05
"""A rank is called slowest when it needs this much longer than the fastest; below it is noise."""


def rank_glyph(state: DeckState, rank: RankStatus) -> tuple[Glyph, str]:
    """The rank's phase as it is to be believed: an old word is stale, an exit is told by its code."""
    if rank.signal is not None:
        return _ended_badly(state, rank), f"signal {rank.signal}"
    if rank.exit_code is not None and rank.exit_code != 0:
        return _ended_badly(state, rank), f"exit {rank.exit_code}"
    if state.active and rank.phase == "starting" and state.snapshot is not None and own_program(state.snapshot):
        return RUNNING, "started"
    if rank.phase == "waiting" and not state.active:
        return PENDING, "not started"
    if (link := away(state, rank)) is not None and rank.phase != "ended":
        return UNKNOWN, f"{link.condition} {age(link.since, state.now)}"
    working = state.active and rank.phase in ("training", "validating", "saving")
    if working and rank.seen_at is not None and state.age_s(rank.seen_at) > RANK_LIMIT_S:
        return STALE, f"{rank.phase}, silent {age(rank.seen_at, state.now)}"
    if rank.phase == "ended" and rank.exit_code is None:
        return STOPPED, "ended"
    return PHASES.get(rank.phase, STALE), rank.phase


def _ended_badly(state: DeckState, rank: RankStatus) -> Glyph:
    """A failure is the culprit's; the others were stopped because of it, or by a person."""
    record = state.snapshot.record if state.snapshot is not None else None
    stopped = record is not None and (record.state == "aborted" or record.rank not in (None, rank.rank))
    return STOPPED if stopped else FAIL


def own_program(snapshot: RunSnapshot) -> bool:
    """The run is a program of the user's own: preflight looked for it. Such a rank tells nothing but its output."""
    return any(check.name == "program_present" and check.status == "pass" for check in snapshot.checks)


def _straggler(state: DeckState, snapshot: RunSnapshot) -> int | None:
    """Only a run that goes on has one to look after."""
    return slowest(snapshot.ranks) if state.active else None


def slowest(ranks: tuple[RankStatus, ...]) -> int | None:
    """The straggler: the rank with the longest compute time, where it matters."""
    found = skew(ranks)
    return found[1] if found is not None and found[0] > MARKED_SKEW else None


def skew(ranks: tuple[RankStatus, ...]) -> tuple[float, int] | None:
    """How much longer the slowest rank computes than the fastest, as a share of the latter, and which it is; None where
    there are not two to compare."""
    times = [(rank.step_s if rank.typical_s is None else rank.typical_s, rank.rank) for rank in ranks]
    timed = [(seconds, rank) for seconds, rank in times if seconds is not None]
    if len(timed) < 2:
        return None
    (longest, number), (shortest, _) = max(timed), min(timed)
    return (longest / shortest - 1, number) if shortest > 0 else None


def table(state: DeckState, snapshot: RunSnapshot, width: int, *, headed: bool) -> list[Content]:
    """A line a rank, with a header line when `headed`."""
    ranks, none = snapshot.ranks, state.glyphs.none
    if not ranks:
        return [Content.styled("no rank has started yet", MUTED)]
    longest = max((rank.step_s or 0.0 for rank in ranks), default=0.0)
    straggler = _straggler(state, snapshot)
    arrow = "<- slowest" if state.glyphs.ascii else "← slowest"
    found = [rank_glyph(state, rank) for rank in ranks]
    bars = [state.glyphs.bar(rank.step_s / longest, 9) if rank.step_s and longest else "" for rank in ranks]
    columns = [
        Column("rank", [Content.styled(f"rank {rank.rank}", rank_style(rank.rank)) for rank in ranks], 9),
        Column("node", [rank.node for rank in ranks], 3),
        Column("state", [state.glyphs.state(glyph, word) for glyph, word in found], 8),
        Column("compute", [Content.styled(bar, rank_style(r.rank)) for bar, r in zip(bars, ranks, strict=True)], 5),
        Column("", [f"{rank.step_s:.3f} s" if rank.step_s is not None else none for rank in ranks], 9, right=True),
        Column("step", [f"{r.iteration:,}" if r.iteration is not None else none for r in ranks], 5, right=True),
        Column("peak", [size(r.memory_bytes) if r.memory_bytes else none for r in ranks], 6, right=True),
        Column("", [Content.styled(arrow if r.rank == straggler else "", "$warning") for r in ranks], 8),
    ]
    if straggler is None:
        columns.pop()
    if headed:
        waits = [f"{rank.exchange_s:.3f} s" if rank.exchange_s is not None else none for rank in ranks]
        norms = [f"{rank.grad_norm:.3g}" if rank.grad_norm is not None else none for rank in ranks]
        place = [column.title for column in columns].index("step")
        columns.insert(place, Column("exchange", waits, 4, right=True))
        columns.insert(place + 2, Column("gradient", norms, 3, right=True))
        heard = [age(rank.seen_at, state.now) if rank.seen_at else none for rank in ranks]
        columns.insert(-1, Column("heard", heard, 4, right=True))
    head, rows = lay_out(columns, width)
    return [head, *rows] if headed else rows


def line(state: DeckState, snapshot: RunSnapshot, width: int) -> Content:
    """All ranks on one line, as far as there is room: state, compute time of the last step, who is slowest."""
    straggler = _straggler(state, snapshot)
    arrow = " <- slowest" if state.glyphs.ascii else " ← slowest"
    parts = []
    for rank in snapshot.ranks:
        glyph, word = rank_glyph(state, rank)
        took = f" {rank.step_s:.3f} s" if rank.step_s is not None else ""
        late = Content.styled(arrow if rank.rank == straggler else "", "$warning")
        named = Content.styled(f"rank {rank.rank} ", rank_style(rank.rank))
        parts.append(Content.assemble(named, state.glyphs.state(glyph, word), took, late))
    return Content("   ").join(parts).truncate(width, ellipsis=not state.glyphs.ascii)


def _predicted(snapshot: RunSnapshot) -> str | None:
    """By the calibration that the run was divided by; beside it, how far from that the run is."""
    told = snapshot.division.tokens_per_s if snapshot.division is not None else None
    if told is None:
        return None
    now = snapshot.record.tokens_per_second
    return f"{rate(told)} ({now / told - 1:+.0%})" if now is not None and told else rate(told)


def _chunk(chunk: ChunkProgress) -> str:
    epoch = f", epoch {chunk.epoch}" if chunk.epoch > 1 else ""
    return f"chunk {chunk.done:,}/{chunk.of:,} ({chunk.done / chunk.of:.0%}{epoch})"


def figures(state: DeckState, snapshot: RunSnapshot, width: int, *, peak: bool = False) -> Content:
    """What the header leaves out, on one line, as far as there is room; "–" for what is not there, nothing that was not
    measured. `peak`: the highest of all ranks, where these are not shown one by one."""
    record, none = snapshot.record, state.glyphs.none
    predicted, found = _predicted(snapshot), skew(snapshot.ranks) if state.active else None
    peaks = [rank.memory_bytes for rank in snapshot.ranks if rank.memory_bytes] if peak else []
    parts = {
        "val": loss(record.val_loss) if record.val_loss is not None else none,
        "lr": f"{snapshot.learning_rate:.3g}" if snapshot.learning_rate is not None else none,
        "peak": size(max(peaks)) if peaks else "",
        "gradient": f"{snapshot.grad_norm:.3g}" if snapshot.grad_norm is not None else none,
        "skew": f"{found[0]:.0%}" if found is not None else "",
        "speed": rate(record.tokens_per_second) if record.tokens_per_second is not None else none,
        "data": _chunk(snapshot.chunk) if snapshot.chunk is not None else "",
        "predicted": predicted or "not measured",
    }
    parts = {label: value for label, value in parts.items() if value}
    unsaid = () if predicted else ("predicted",)
    for name in ("speed", *unsaid, "gradient", "lr", "skew", "data", "predicted", "peak"):
        if sum(len(label) + len(value) + 4 for label, value in parts.items()) > width + 3:
            parts.pop(name, None)
    return Content("   ").join([Content.assemble((f"{label} ", MUTED), value) for label, value in parts.items()])
