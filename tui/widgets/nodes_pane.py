"""Pane 1: every node with what the last probe and its telemetry say, its rank and step, and how old each is."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tui.glyphs import MUTED
from tui.state import DeckState
from tui.widgets.columns import Table
from tui.widgets.node_cells import NodeRows, heads
from tui.widgets.node_detail import detail
from tui.widgets.node_state import node_names
from tui.widgets.pane import Pane
from tui.widgets.row_list import RowList

if TYPE_CHECKING:
    from tui.app import FlightDeckApp


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

    def compose(self) -> ComposeResult:
        yield Static("", id="nodes-head", classes="head", markup=False)
        yield RowList(id="nodes-rows")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Static("", id="nodes-detail", markup=False)

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
        head, rows = self.query_one("#nodes-head", Static), self.query_one(RowList)
        alone = self.full and state.detail
        head.display = rows.display = not alone
        self.set_class(alone, "-alone")
        if not nodes:
            said = "no nodes: there is no configuration" if state.ready else "loading"
            head.update(Content.styled(said, MUTED))
            rows.set_rows([])
            self.query_one("#nodes-detail", Static).update("")
            return
        if not alone:
            shown, none = heads(state, full=self.full), state.glyphs.none
            line, lines = self._table.lay_out(shown, self._cells.of(state, nodes, shown), self.room, none=none)
            head.update(line)
            rows.set_rows(lines)
        if self.full and state.node in nodes:
            self.query_one("#nodes-detail", Static).update(detail(state, state.node, self.room - 1))

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
        return detail(self.state, self.state.node, 100).plain if self.state.node else self.text()

    def text(self) -> str:
        nodes, shown = node_names(self.state), heads(self.state, full=True)
        head, rows = Table().lay_out(shown, NodeRows().of(self.state, nodes, shown), 400)
        table = [line.plain.rstrip() for line in (head, *(line for _, line in rows))]
        return "\n\n".join(["\n".join(table), *(detail(self.state, node, 100).plain for node in nodes)])
