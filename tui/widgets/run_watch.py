"""What is found of a run while it trains: alarms, and what must be true after its launch, each a line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.content import Content

from engine.runs.verification import GPU, NOT_MEASURED, gpu_line
from tui.formatting import age
from tui.glyphs import FAIL, MUTED, OK, UNKNOWN, WARN, Glyph
from tui.state import DeckState
from tui.widgets.pairs import pair

if TYPE_CHECKING:
    from engine.events import RunSnapshot, Verification

SHOWN: Final = 3
"""Alarms, the newest: `flightdeck show` has all."""
GRAVE: Final = frozenset({"backend", "replicas"})
"""What makes a training worthless when it is not so; the rest is worth a look."""
_INDENT: Final = 14


def alarms(state: DeckState, snapshot: RunSnapshot, width: int) -> list[Content]:
    """The newest alarms of a run that goes on."""
    if not state.active or not snapshot.alarms:
        return []
    mark = state.glyphs.shape(WARN)
    lines = [
        pair(f"{mark} alarm", f"{alarm.message} (iteration {alarm.iteration}, {age(alarm.at, state.now)})", width)
        for alarm in snapshot.alarms[-SHOWN:]
    ]
    if (more := len(snapshot.alarms) - SHOWN) > 0:
        lines.append(pair("", f"and {more} before: `flightdeck show {snapshot.record.id}`", width, style=MUTED))
    return [line.stylize("$warning") for line in lines]


def verification(state: DeckState, snapshot: RunSnapshot, width: int, *, every: bool) -> list[Content]:
    """A line each; without `every` only of what is not as it should be."""
    lines = [_with_telemetry(state, snapshot, line) for line in snapshot.verification]
    return [_line(state, line, width) for line in lines if every or line.good is False]


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
    """GPU use is known to the console alone, while it looks."""
    if line.name != GPU or line.text != NOT_MEASURED or not state.active:
        return line
    nodes = dict.fromkeys(rank.node for rank in snapshot.ranks)
    return gpu_line({node: state.telemetry[node].gpu_use if node in state.telemetry else None for node in nodes})
