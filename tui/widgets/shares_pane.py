"""Pane 3: each node's share of the global batch, beside what was measured. Calibration itself is not in this release:
shares come from the configuration, and the compute times are those of the shown run's own last step."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.widgets import Static

from tui.glyphs import MUTED
from tui.state import DeckState
from tui.widgets.columns import Column, lay_out
from tui.widgets.node_state import node_names
from tui.widgets.pairs import pair
from tui.widgets.pane import Pane

ALL_SUM = "gradient_layer"
"""The preflight check that times a real all_sum over the real ring."""


class SharesPane(Pane, can_focus=True):
    """Shares as bars; "not measured" where nobody has measured."""

    NAME = "calibration"
    NUMBER = "3"
    HINTS = ("enter",)

    def compose(self) -> ComposeResult:
        yield Static("", id="shares", markup=False)

    def title(self, state: DeckState) -> str:
        return f"calibration{state.glyphs.separator}not measured"

    def draw(self, state: DeckState) -> None:
        self.query_one("#shares", Static).update(Content("\n").join(_lines(state, self.room, full=self.full)))

    def text(self) -> str:
        return "\n".join(line.plain for line in _lines(self.state, 100, full=True))


def shares(state: DeckState) -> list[float] | None:
    """Each node's part of the batch, summing to 1; None when the configuration is unknown."""
    if state.config is None:
        return None
    raw = [node.share if node.share is not None else 1.0 for node in state.config.nodes]
    return [share / sum(raw) for share in raw]


def _link(state: DeckState) -> str | None:
    """What preflight's real all_sum saw of the ring, in its own words."""
    passed = (check.summary for check in state.shown_checks if check.name == ALL_SUM and check.status == "pass")
    return next(passed, None)


def _lines(state: DeckState, width: int, *, full: bool) -> list[Content]:
    nodes, parts, none = node_names(state), shares(state), state.glyphs.none
    if not nodes:
        return [Content.styled("no nodes: there is no configuration", MUTED)]
    steps = {rank.node: rank.step_s for rank in (state.snapshot.ranks if state.snapshot else ())}
    times = [f"{none} s/step" if (time := steps.get(node)) is None else f"{time:.3f} s/step" for node in nodes]
    bars = [state.glyphs.bar(part, 20 if width > 70 else 10) for part in parts] if parts else [none] * len(nodes)
    columns = [
        Column("node", nodes, 9),
        Column("share", [Content.styled(bar, "$text-primary") for bar in bars], 7),
        Column("", [f"{part:.0%}" for part in parts] if parts else [none] * len(nodes), 9, right=True),
        Column("throughput", [f"{none} ex/s"] * len(nodes), 6, right=True),
        Column("compute a step", times, 8, right=True),
    ]
    head, rows = lay_out(columns, width)
    lines = [head, *rows] if full else rows
    if link := _link(state):
        lines.append(Content.assemble(("ring  ", MUTED), link, ("  (preflight)", MUTED)).truncate(width))
    else:
        lines.append(Content.styled(f"link {none}   speed-up {none}   not measured", MUTED))
    if full:
        fixed = state.config is not None and any(node.share is not None for node in state.config.nodes)
        why = "fixed by share in [[node]]" if fixed else "equal: no share is configured and nothing is calibrated"
        notes = (
            ("shares", why),
            ("compute a step", "of the shown run's last step: forward and backward, waiting for peers left out"),
            ("not measured", "examples/s with its spread, each link by itself, predicted speed-up"),
        )
        lines += [Content(""), *(pair(label, text, width, indent=16) for label, text in notes)]
    return lines
