"""The command palette: every action of the table by name, and every run to open."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, cast

from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.types import IgnoreReturnCallbackType

from tui.actions import ACTIONS

if TYPE_CHECKING:
    from tui.app import FlightDeckApp


class Commands(Provider):
    """What the palette offers. A disabled action is listed with its reason, and says it when chosen."""

    def _offers(self) -> Iterator[tuple[str, str, IgnoreReturnCallbackType]]:
        deck = cast("FlightDeckApp", self.app)
        state = deck.state
        for action in ACTIONS:
            if action.palette:
                why = action.why_not(state)
                told = action.help + (f" (now: {why})" if why else "")
                yield f"{action.label} ({action.shown_key})", told, partial(deck.perform, action)
        for run in state.runs or ():
            yield f"open {run.id}", f"{run.state}, {run.name}", partial(deck.open_run, run.id)

    async def discover(self) -> Hits:
        for name, told, command in self._offers():
            yield DiscoveryHit(Content(name), command, text=name, help=told)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for name, told, command in self._offers():
            score = max(matcher.match(name), matcher.match(told) * 0.8)
            if score > 0:
                yield Hit(score, Content(name), command, text=name, help=told)
