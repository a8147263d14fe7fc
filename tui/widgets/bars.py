"""The one-line bars around the panes: the header, the tabs of a small terminal, and the key bar."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from textual.content import Content
from textual.events import Click
from textual.message import Message

from engine.errors import plural
from tui.actions import Action, bar, label
from tui.formatting import age, duration, rate, span, train_loss
from tui.glyphs import DISABLED, FAIL, FEW_COLOURS, MUTED, STALE, STATES, UNKNOWN
from tui.node_state import away, node_names
from tui.state import NUMBERED, RANK_LIMIT_S, DeckState
from tui.widgets.text import Text, justify

if TYPE_CHECKING:
    from engine.snapshots import RunSnapshot


class TabStrip(Text):
    """One line: every view with its number key, the logs behind the run; the current one lit."""

    def __init__(self) -> None:
        super().__init__(id="tabs")

    def show(self, state: DeckState) -> None:
        view = "run" if state.view == "dashboard" else state.view
        current = "logs" if view == "run" and state.pane == "logs" else view
        parts: list[Content] = []
        for number, name in enumerate(NUMBERED, start=1):
            parts.append(_tab(f"{number} {name}", lit=name == current))
            if name == "run":
                parts.append(_tab("logs", lit=current == "logs"))
        self.put(Content("  ").join([*parts, _tab("7 models", lit=False)]))


def _tab(text: str, *, lit: bool) -> Content:
    return Content.styled(text, "bold reverse" if lit else MUTED)


KEY_GAP = 3
_ALWAYS: Final = ("help", "quit")
"""Keys that the bar keeps however narrow it is."""


class KeyBar(Text):
    """The action table's keys here and now; a click presses one."""

    @dataclass
    class Pressed(Message):
        """An action of the bar was clicked."""

        action: Action

    def __init__(self) -> None:
        super().__init__(id="keys")
        self._spans: list[tuple[int, int, Action]] = []

    def show(self, state: DeckState) -> None:
        actions, room = bar(state), self.content_size.width
        # A narrow terminal first loses blanks, then the longer labels, then the last keys of those that may go.
        choices = [(gap, short) for short in (False, True) for gap in range(KEY_GAP, 0, -1)]
        while (choice := next((c for c in choices if _width(actions, state, *c) <= room), None)) is None:
            others = [action for action in actions if action.id not in _ALWAYS]
            if not others:
                break
            actions.remove(others[-1])
        gap, short = choice or choices[-1]
        disabled = MUTED if self.app.has_class(FEW_COLOURS) else DISABLED
        parts: list[Content] = []
        self._spans, place = [], 0
        for action in actions:
            possible = action.why_not(state) is None
            key_style, style = ("bold $text-primary", "") if possible else (disabled, disabled)
            part = Content.assemble((action.shown_key, key_style), (f" {label(action, state, short=short)}", style))
            self._spans.append((place, place + part.cell_length, action))
            place += part.cell_length + gap
            parts.append(part)
        self.put(Content(" " * gap).join(parts))

    def on_click(self, event: Click) -> None:
        for start, stop, action in self._spans:
            if start <= event.x - self.gutter.left < stop:
                self.post_message(self.Pressed(action))


def _width(actions: list[Action], state: DeckState, gap: int, short: bool) -> int:
    widths = (len(action.shown_key) + 1 + len(label(action, state, short=short)) for action in actions)
    return sum(widths) + gap * (len(actions) - 1)


PART_GAP = "   "
_SMOOTHED = 10
"""Reports of the loss in each of the two means that its arrow compares."""
_NODE_COUNT = 5
"""Priority of the number of nodes among the run's parts: above the speed, which the run pane has too."""


class RunHeader(Text):
    """One line; the least important parts go first when it is short."""

    def __init__(self) -> None:
        super().__init__(id="header")
        self.put(Content("MLX Flight Deck"))

    def show(self, state: DeckState) -> None:
        self.put(header(state, max(20, self.content_size.width)))


def header(state: DeckState, width: int) -> Content:
    """The line, at most `width` cells."""
    left, right = _place(state), _warnings(state)
    parts = _run(state)
    if _length(left, [part for part in parts if part[0] > _NODE_COUNT], right) > width:
        left = _place(state, counted=False)
    while parts and _length(left, parts, right) > width:
        parts.pop(min(range(len(parts)), key=lambda index: (parts[index][0], -index)))
    middle = Content(PART_GAP).join([part for _, part in parts])
    return justify(Content(PART_GAP).join([left, middle]) if parts else left, right, width)


def _length(left: Content, parts: list[tuple[int, Content]], right: Content) -> int:
    return left.cell_length + sum(part.cell_length + len(PART_GAP) for _, part in parts) + right.cell_length + 1


def _place(state: DeckState, *, counted: bool = True) -> Content:
    record, config = state.snapshot.record if state.snapshot else None, state.config
    if config is not None and "name" in config.cluster.model_fields_set:
        name = config.cluster.name
    else:
        # A cluster that nobody has named is called by what it trains.
        name = config.job.name if config else (record.name if record else "MLX Flight Deck")
    parts = [state.backend] if state.backend is not None else []
    if counted and (nodes := node_names(state)):
        parts.append(plural(len(nodes), "node"))
    if config is not None and config.file is not None and config.file.name != "flightdeck.toml":
        parts.append(config.file.name)
    if state.read_only:
        parts.append("read-only")
    separator = state.glyphs.separator
    return Content.assemble((name, "bold"), *[(separator + part, MUTED) for part in parts])


def _run(state: DeckState) -> list[tuple[int, Content]]:
    """The run's parts with their priorities, in the order shown."""
    snapshot = state.snapshot
    if snapshot is None:
        if (hidden := state.running) is not None:
            return [(9, state.glyphs.state(STATES[hidden.state], f"{hidden.id} {hidden.state}, not shown"))]
        word = "loading" if not state.ready else ("idle" if state.config is not None else _without(state))
        return [(9, Content.styled(f"{state.glyphs.shape(UNKNOWN) if not state.ready else ''} {word}".strip()))]
    record = snapshot.record
    glyph = STATES[record.state]
    if state.active:
        # As in the history and in `flightdeck runs`: since it was made.
        word = f"{record.state} {duration(state.age_s(record.created_at))}"
    else:
        word = f"{record.state} {state.ago(record.ended_at or snapshot.state_since)}"
    parts: list[tuple[int, Content]] = [(9, state.glyphs.state(glyph, word))]
    if record.task is not None:
        parts.append((8, Content(f"{record.task} of {record.source}")))
    if record.iteration is not None:
        total = f"/{record.iterations:,}" if record.iterations else ""
        parts.append((8, _pair("step", f"{record.iteration:,}{total}")))
    if record.train_loss is not None or snapshot.series.not_finite is not None:
        parts.append((7, _pair("loss", f"{train_loss(snapshot)}{_trend(state, snapshot)}")))
    if state.active and record.tokens_per_second is not None:
        parts.append((4, Content(rate(record.tokens_per_second))))
    if state.active and snapshot.eta_s is not None:
        parts.append((6, _pair("ETA", span(snapshot.eta_s))))
    return parts


def _without(state: DeckState) -> str:
    return "waiting for your answer" if state.asking else "no configuration"


def _trend(state: DeckState, snapshot: RunSnapshot) -> str:
    """An arrow for the change of the smoothed loss: the mean of the newest reports against that of those before."""
    losses = [loss for _, loss in snapshot.series.train[-2 * _SMOOTHED :] if math.isfinite(loss)]
    half = len(losses) // 2
    before, newest = sum(losses[-2 * half : -half or None]), sum(losses[len(losses) - half :])
    if half == 0 or before == newest or snapshot.series.not_finite is not None:
        return ""
    return " " + (state.glyphs.down if newest < before else state.glyphs.up)


def _warnings(state: DeckState) -> Content:
    if state.frozen:
        return Content.styled(" FROZEN, data keeps arriving ", "reverse $warning")
    if state.busy:
        return Content.styled(state.busy, MUTED)
    snapshot = state.snapshot
    if snapshot is None or not state.active:
        return Content("")
    if not snapshot.supervised:
        return state.glyphs.state(UNKNOWN, "supervisor gone")
    gone = [(link, rank) for rank in snapshot.ranks if (link := away(state, rank)) is not None]
    if gone:
        link, rank = min(gone, key=lambda pair: pair[0].since)
        more = f" +{len(gone) - 1}" if len(gone) > 1 else ""
        return state.glyphs.state(FAIL, f"{rank.node} {link.condition} {age(link.since, state.now)}{more}")
    silent = [
        (state.age_s(rank.seen_at), rank)
        for rank in snapshot.ranks
        if rank.seen_at is not None and rank.phase in ("training", "validating", "saving")
    ]
    if silent and state.ranks_work:
        oldest, rank = max(silent, key=lambda pair: pair[0])
        if oldest > RANK_LIMIT_S:
            return state.glyphs.state(STALE, f"rank {rank.rank} silent {age(rank.seen_at, state.now)}")
    return Content("")


def _pair(label: str, value: str) -> Content:
    return Content.assemble((f"{label} ", MUTED), value)
