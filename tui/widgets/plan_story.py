"""The training plan in words: a few lines beside what would be launched, and the whole of it with its reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from tui.formatting import plural, shortened
from tui.glyphs import FAIL, MUTED, WARN, Glyph
from tui.state import DeckState
from tui.widgets.pairs import pair

if TYPE_CHECKING:
    from engine.planning.document import TrainingPlan

_LABEL = 16
_SHOWN = 1
"""Refusals on the dashboard; the full view has all."""
_LINES = 2
"""Of each of them there."""


def brief(state: DeckState, width: int) -> list[Content]:
    """What the plan adds to what would be launched: memory, or what stands in the way, and where to read on."""
    plan = state.plan
    if plan is None:
        return [Content.styled("planning", MUTED)] if state.planning else []
    shown = plan.refusals[:_SHOWN]
    lines = [] if shown else [pair("memory", _memory(plan), width)]
    for refusal in shown:
        text = shortened(f"{refusal.name}: {refusal.text}", _LINES * max(16, width - 16))
        lines.append(pair(_marked(state, FAIL, "refused"), text, width, style="$error"))
    told = [plural(len(plan.refusals) - len(shown), "more refusal")] if len(plan.refusals) > len(shown) else []
    told += [plural(len(plan.warnings), "warning")] if plan.warnings else []
    if plan.advice:
        told.append(f"{len(plan.advice)} pieces of advice" if len(plan.advice) > 1 else "one piece of advice")
    lines.append(pair("plan", ": ".join(filter(None, ["4 explains it", ", ".join(told)])), width))
    return lines


def whole(state: DeckState, width: int) -> list[Content]:
    """The plan, what stands in its way, and the reason of each choice with where its figure came from."""
    from engine.planning.explain import explained, summary

    plan = state.plan
    assert plan is not None
    lines = []
    for refusal in plan.refusals:
        override = f" (in spite of it: {refusal.override})" if refusal.override else ""
        text = f"{refusal.name}: {refusal.text}{override}"
        lines.append(pair(_marked(state, FAIL, "refused"), text, width, style="$error", indent=_LABEL))
    lines += [pair(label, text, width, indent=_LABEL) for label, text in summary(plan)]
    lines.append(Content(""))
    for warning in plan.warnings:
        text = f"{warning.name}: {warning.text}"
        lines.append(pair(_marked(state, WARN, "warn"), text, width, style="$warning", indent=_LABEL))
    for section, rows in explained(plan):
        lines += [Content(""), Content.styled(section, "bold")]
        lines += [pair("", f"{label}: {text}" if label else text, width, indent=2) for label, text in rows]
    command = plan.distributed_config.mlx_launch_command
    if command is not None:
        lines += [Content(""), Content.styled("without Flight Deck", "bold"), pair("", command, width, indent=2)]
    return lines


def _memory(plan: TrainingPlan) -> str:
    # After the first paint: a plan is there, so its module is loaded.
    from engine.planning.explain import summary

    return dict(summary(plan))["memory"]


def _marked(state: DeckState, glyph: Glyph, word: str) -> str:
    return f"{state.glyphs.shape(glyph)} {word}"
