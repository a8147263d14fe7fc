"""Pane 3: what calibration has measured of each node and link, the shares of the batch that follow, and what was
predicted beside what the shown run does. While nodes are measured, how far that is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.content import Content

from tui.formatting import calibration_notes, latency, link_text, memory, rate, spread, throughput
from tui.glyphs import FAIL, MUTED, STALE
from tui.node_state import node_names
from tui.state import DeckState
from tui.widgets.pane import Pane
from tui.widgets.scaling_plot import scaling_lines
from tui.widgets.text import Column, Text, lay_out, pair

if TYPE_CHECKING:
    from engine.api import Calibration

ALL_SUM = "gradient_layer"
"""The preflight check that times a real all_sum over the real ring."""
_INDENT = 16
_GAP = "   "


class SharesPane(Pane, can_focus=True):
    """A bar per node; "not measured" where nobody has measured. The full view leaves a column to its scroll bar."""

    NAME = "calibration"
    NUMBER = "3"
    HINTS = ("calibrate", "scaling", "enter")
    UNSEEN = Pane.UNSEEN | {"runs"}

    def compose(self) -> ComposeResult:
        yield Text(id="shares", wraps=True)

    def title(self, state: DeckState) -> str:
        return f"calibration{state.glyphs.separator}{verdict(state)}"

    def draw(self, state: DeckState) -> None:
        self.query_one("#shares", Text).put(Content("\n").join(_lines(state, self.room - self.full, full=self.full)))

    def text(self) -> str:
        return "\n".join(line.plain for line in _lines(self.state, 100, full=True))


def verdict(state: DeckState) -> str:
    """The whole calibration, for the title."""
    if state.calibrating is not None:
        done = sum(step.phase in ("measured", "not measured") for step in state.calibrating.values())
        return f"measuring, {done} done"
    taken = state.prediction.calibration if state.prediction is not None else None
    if state.prediction is None or taken is None:
        return "not measured"
    text = f"{state.glyphs.shape(STALE)} stale, " if state.prediction.stale else ""
    return f"{text}{state.ago(taken.taken_at)}{state.glyphs.separator + 'quick' if taken.quick else ''}"


def shares(state: DeckState) -> dict[str, float] | None:
    """Node → its part of the batch, summing to 1, as the next launch would divide it; None when the configuration is
    unknown."""
    if state.config is None:
        return None
    if state.prediction is not None:
        return dict(state.prediction.shares.parts)
    raw = {node.name: node.share if node.share is not None else 1.0 for node in state.config.nodes}
    return {name: share / sum(raw.values()) for name, share in raw.items()}


def speed_up(state: DeckState) -> float | None:
    """The shown run's rate over the fastest node's alone; None where that was not measured."""
    if state.snapshot is None or state.snapshot.division is None:
        return None
    predicted, now = state.snapshot.division, state.snapshot.record.tokens_per_second
    if now is None or not predicted.tokens_per_s or not predicted.speed_up:
        return None
    return now / (predicted.tokens_per_s / predicted.speed_up)


def _lines(state: DeckState, width: int, *, full: bool) -> list[Content]:
    if not node_names(state):
        return [Content.styled(state.unconfigured, MUTED)]
    scaling = _scaling(state, width) if full else []
    if state.calibrating is not None:
        return _measuring(state, width, full=full) + scaling
    taken = state.prediction.calibration if state.prediction is not None else None
    lines = _shared(state, width, full=full) if taken is None else _measured(state, taken, width, full=full)
    return lines + scaling + _notes(state, taken, width) if full else lines


def _scaling(state: DeckState, width: int) -> list[Content]:
    if state.scaling is None or not state.scaling.points:
        return []
    return [Content(""), *scaling_lines(state.scaling, state.ago(state.scaling.taken_at), width, state.glyphs)]


def _shared(state: DeckState, width: int, *, full: bool) -> list[Content]:
    nodes, parts, none = node_names(state), shares(state) or {}, state.glyphs.none
    columns = [
        Column("node", nodes, 9),
        _bars(state, [parts.get(node) for node in nodes], width),
        Column("share", [_share(parts.get(node)) for node in nodes], 9, right=True),
        Column("throughput", [f"{none} ex/s"] * len(nodes), 6, right=True),
    ]
    head, rows = lay_out(columns, width)
    lines = [head, *rows] if full else rows
    if link := _link_of_preflight(state):
        lines.append(Content.assemble(("ring  ", MUTED), link, ("  (preflight)", MUTED)).truncate(width, ellipsis=True))
    else:
        lines.append(Content.styled(f"link {none}   speed-up {none}   not measured", MUTED))
    return lines


def _measured(state: DeckState, taken: Calibration, width: int, *, full: bool) -> list[Content]:
    assert state.prediction is not None
    none, parts, batches = state.glyphs.none, state.prediction.shares.parts, state.prediction.micro_batches or {}
    batch = sum(batches.values())
    fastest = max((measure.examples_per_s or 0.0 for measure in taken.nodes), default=0.0)
    nodes = [measure.node for measure in taken.nodes]
    speeds = [measure.examples_per_s for measure in taken.nodes]
    columns = [
        Column("node", nodes, 9),
        _bars(state, [speed / fastest if speed and fastest else None for speed in speeds], width),
        Column("throughput", [throughput(speed) if speed is not None else f"{none} ex/s" for speed in speeds], 8,
               right=True),
        Column("spread", [spread(measure.spread) for measure in taken.nodes], 6, right=True),
        Column("share", [_share(parts.get(node)) for node in nodes], 9, right=True),
        Column("batch", [f"{batches[node]} of {batch}" if node in batches else none for node in nodes], 6, right=True),
    ]  # fmt: skip
    if full:
        peaks = [{probe.batch: probe.peak_bytes for probe in measure.probes} for measure in taken.nodes]
        columns += [
            Column("tokens", [rate(measure.tokens_per_s) for measure in taken.nodes], 5, right=True),
            Column("step", [latency(measure.step_s) for measure in taken.nodes], 5, right=True),
            Column("state", [memory(measure.state_bytes) for measure in taken.nodes], 3, right=True),
            Column("peak at 1", [memory(peak.get(1)) for peak in peaks], 2, right=True),
            Column("at 2", [memory(peak.get(2)) for peak in peaks], 1, right=True),
        ]
    head, rows = lay_out(columns, width)
    lines = [head, *rows] if full else rows
    link, predicted = Content.assemble(("link  ", MUTED), _worst(taken)), Content.assemble(*_speed_up(state))
    if link.cell_length + len(_GAP) + predicted.cell_length <= width:
        return [*lines, Content(_GAP).join([link, predicted])]
    return [*lines, link.truncate(width, ellipsis=True), predicted.truncate(width, ellipsis=True)]


def _measuring(state: DeckState, width: int, *, full: bool) -> list[Content]:
    progress, order = state.calibrating or {}, node_names(state)
    names = (*filter(progress.get, order), *(name for name in progress if name not in order))
    steps = {name: progress[name] for name in names}
    done = [
        min(1.0, step.elapsed_s / step.seconds) if step.seconds and step.phase == "measuring" else
        1.0 if step.phase == "measured" else None
        for step in steps.values()
    ]  # fmt: skip
    so_far = [throughput(step.examples_per_s) if step.examples_per_s is not None else "" for step in steps.values()]
    columns = [
        Column("what", list(steps), 9),
        _bars(state, done, width),
        Column("", [step.phase for step in steps.values()], 9),
        Column("throughput", so_far, 8, right=True),
        Column("", [Content.styled(step.note, MUTED) for step in steps.values()], 4, grows=True),
    ]
    head, rows = lay_out(columns, width)
    waiting = [node for node in node_names(state) if node not in steps]
    lines = [head, *rows] if full and rows else rows
    if waiting and state.busy == "calibrating":
        lines.append(Content.styled(f"{', '.join(waiting)}: waiting", MUTED).truncate(width, ellipsis=True))
    return [*lines, Content.styled("c stops it; what was measured before stays", MUTED).truncate(width)]


def _bars(state: DeckState, parts: list[float | None], width: int) -> Column:
    cells = 20 if width > 90 else 10
    drawn = [state.glyphs.bar(part, cells) if part is not None else state.glyphs.none for part in parts]
    return Column("", [Content.styled(bar, "$text-primary") for bar in drawn], 7)


def _share(part: float | None) -> Content | str:
    return Content.styled("left out", "$warning") if part is None else f"{part:.0%}"


def _worst(taken: Calibration) -> str:
    """Over all ranks, else the slowest link; or why that is not known."""
    if taken.all_ranks is not None:
        return link_text(taken.all_ranks)
    return "one node: there is none"


def _speed_up(state: DeckState) -> list[Content | tuple[str, str]]:
    assert state.prediction is not None
    predicted, real = state.prediction.throughput.speed_up, speed_up(state)
    parts: list[Content | tuple[str, str]] = [("speed-up  ", MUTED)]
    parts.append(Content("not predicted" if predicted is None else f"{predicted:.2f} predicted"))
    if real is not None:
        parts.append(Content(f", {real:.2f} measured"))
    return parts


def _link_of_preflight(state: DeckState) -> str | None:
    passed = (check.summary for check in state.shown_checks if check.name == ALL_SUM and check.status == "pass")
    return next(passed, None)


def _notes(state: DeckState, taken: Calibration | None, width: int) -> list[Content]:
    notes = list(calibration_notes(state.prediction)) if state.prediction is not None else [("shares", _why(state))]
    if taken is None:
        unknown = f"the speed of each node and link, and the speed-up{state.key(': c measures them')}"
        notes = [*(note for note in notes if note[0] != "predicted"), ("not measured", unknown)]
    styles = {"not measured": FAIL.style} if taken is not None else {}
    rows = (pair(label, text, width, style=styles.get(label, ""), indent=_INDENT) for label, text in notes)
    return [Content(""), *rows]


def _why(state: DeckState) -> str:
    fixed = state.config is not None and any(node.share is not None for node in state.config.nodes)
    return "fixed by share in [[node]]" if fixed else "equal: no share is configured and nothing is calibrated"
