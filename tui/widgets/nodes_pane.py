"""Pane 1: every node with what the last probe and its telemetry say, its rank and step, and how old each is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from textual.app import ComposeResult
from textual.containers import Container, VerticalScroll
from textual.content import Content

from tui.glyphs import MUTED
from tui.state import DeckState
from tui.widgets.columns import Table
from tui.widgets.node_cells import NodeRows, heads
from tui.widgets.node_detail import detail, joined
from tui.widgets.node_state import node_names
from tui.widgets.pane import Pane
from tui.widgets.row_list import RowList
from tui.widgets.text import Text
from tui.widgets.topology import least_width

if TYPE_CHECKING:
    from tui.app import FlightDeckApp


WIDE: Final = 110
"""From this room on a node and the topology stand side by side."""
GUTTER: Final = 3
TEXT_WIDTH: Final = 100
"""Of what is copied and saved."""


class NodesPane(Pane):
    """The nodes of the configuration, else those of the shown run."""

    NAME = "nodes"
    NUMBER = "1"
    HINTS = ("enter", "mend", "shell", "recheck")
    UNSEEN = frozenset({"check", "checks", "checks_at", "not_checked", "has_log", "searching", "busy", "runs"})

    def __init__(self) -> None:
        super().__init__()
        self._cells = NodeRows()
        self._table = Table()
        self._drawn: tuple[object, ...] = ()
        self._joined: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        yield Text(id="nodes-head", classes="head")
        yield RowList(id="nodes-rows")
        with VerticalScroll(classes="detail", can_focus=False), Container(id="nodes-parts"):
            yield Text(id="nodes-detail")
            yield Text(id="nodes-joined")

    def on_row_list_moved(self, event: RowList.Moved) -> None:
        cast("FlightDeckApp", self.app).change(node=event.rows.selected)

    @property
    def opens(self) -> bool:
        return not (self.full and self.state.detail)

    def title(self, state: DeckState) -> str:
        said = ["nodes"]
        if state.detail and self.full and state.node:
            said.append(state.node)
        if state.probing:
            total = len(node_names(state))
            said.append(f"probing {total - len(state.asked)}/{total}")
        if state.frozen and state.listening:
            said.append("frozen")
        return state.glyphs.separator.join(said)

    def draw(self, state: DeckState) -> None:
        nodes = node_names(state)
        head, rows = self.query_one("#nodes-head", Text), self.query_one(RowList)
        alone = self.full and state.detail
        head.display = rows.display = not alone
        self.set_class(alone, "-alone")
        # The list that had the focus is not on the screen then; the keys still come here.
        self.set_class(alone and state.pane == self.NAME, "-keys")
        if not nodes:
            said = "no nodes: there is no configuration" if state.ready else "loading"
            head.put(Content.styled(said, MUTED))
            rows.set_rows([])
            for part in ("#nodes-detail", "#nodes-joined"):
                self.query_one(part, Text).put(Content(""))
            return
        if not alone:
            shown, none = heads(state, full=self.full), state.glyphs.none
            line, lines = self._table.lay_out(
                shown, self._cells.of(state, nodes, shown, rows.in_sight), self.room, none=none
            )
            head.put(line)
            rows.set_rows(lines)
        if self.full and state.node in nodes:
            self._draw_detail(state, state.node)

    def _draw_detail(self, state: DeckState, node: str) -> None:
        """Both parts, each only when something in it has changed: 64 nodes speak, one is looked at."""
        room = self.room - 1
        left = (room - GUTTER) * 48 // 100
        right = room - GUTTER - left
        wide = room >= WIDE and (state.topology is None or least_width(state.topology) <= right)
        self.set_class(wide, "-wide")
        if not wide:
            left = right = room
        values, facts = state.telemetry.get(node), state.facts.get(node)
        own: tuple[object, ...] = (node, left, facts, values, state.now, state.snapshot, state.topology, state.glyphs)
        if not _alike(own, self._drawn):
            self._drawn = own
            self.query_one("#nodes-detail", Text).put(detail(state, node, left))
        wired = (state.wiring, state.unwired, state.backend)
        links: tuple[object, ...] = (right, state.topology, *wired, state.probing, state.config, state.glyphs)
        if not _alike(links, self._joined):
            self._joined = links
            self.query_one("#nodes-joined", Text).put(joined(state, right))

    def move(self, name: str) -> bool:
        """With one node alone, left and right go to the one before and after; everything else scrolls."""
        rows = self.query_one(RowList)
        if not (self.full and self.state.detail):
            return super().move(name)
        if name in ("left", "right"):
            rows.move("up" if name == "left" else "down")
            self.query_one(".detail").scroll_home(animate=False)
            return True
        self.scroll_text(self.query_one(".detail"), name)
        return True

    def copy_text(self) -> str:
        """A node's fix where it has a problem with one, else all that is known of the node."""
        facts = self.state.selected_facts
        if facts is not None and facts.problem:
            key = facts.host_key.fingerprint if facts.host_key else None
            return key or facts.fix or facts.problem
        return detail(self.state, self.state.node, TEXT_WIDTH).plain if self.state.node else self.text()

    def text(self) -> str:
        nodes, shown = node_names(self.state), heads(self.state, full=True)
        head, rows = Table().lay_out(shown, NodeRows().of(self.state, nodes, shown), 400)
        table = [line.plain.rstrip() for line in (head, *(line for _, line in rows))]
        told = [detail(self.state, node, TEXT_WIDTH) for node in nodes]
        return "\n\n".join(["\n".join(table), joined(self.state, TEXT_WIDTH).plain, *(part.plain for part in told)])


def _alike(now: tuple[object, ...], before: tuple[object, ...]) -> bool:
    """The same objects: comparing facts field by field costs more than drawing them."""
    return len(now) == len(before) and all(
        one is other or (isinstance(one, (int, str)) and one == other) for one, other in zip(now, before, strict=True)
    )
