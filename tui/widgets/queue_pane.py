"""Pane 6: the queue's items in their order, what each waits for, and the runs beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.app import ComposeResult
from textual.content import Content
from textual.widget import Widget

from engine.errors import duration_text, plural
from tui.formatting import item_state, item_why
from tui.glyphs import MUTED, PENDING, RUNNING, STATES, STOPPED, UNKNOWN, WARN
from tui.state import DeckState
from tui.widgets.pane import Pane, RowList
from tui.widgets.text import Column, Text, lay_out

if TYPE_CHECKING:
    from engine.api import QueueSnapshot


_GLYPHS: Final = {
    **STATES,
    "waiting": PENDING,
    "held": WARN,
    "started": RUNNING,
    "ended": UNKNOWN,
    "cancelled": STOPPED,
}


class QueuePane(Pane):
    NAME = "queue"
    NUMBER = "6"
    HINTS = ("open_item", "item_up", "item_down", "hold_item", "cancel_item")

    def compose(self) -> ComposeResult:
        yield Text(id="queue-head", classes="head")
        yield RowList(id="queue-rows")
        yield Text(id="queue-direct", wraps=True)

    def on_row_list_moved(self) -> None:
        self.post_message(self.Selected(self.NAME, self.selected))

    @property
    def selected(self) -> str | None:
        return self.query_one(RowList).selected

    @property
    def keys_go_to(self) -> Widget:
        return self.query_one(RowList)

    def title(self, state: DeckState) -> str:
        waiting = sum(item.open or item.state == "held" for item in state.queue.items) if state.queue is not None else 0
        return state.glyphs.separator.join(["queue", plural(waiting, "item")] if waiting else ["queue"])

    def draw(self, state: DeckState) -> None:
        head, rows, queue = self.query_one("#queue-head", Text), self.query_one(RowList), state.queue
        if queue is None or not queue.items:
            how = state.key(": n puts a run into it while another one goes on")
            head.put(Content.styled(f"the queue is empty{how}", MUTED))
            rows.set_rows([])
        else:
            header, lines = lay_out(_columns(state, queue), self.room - 1)
            head.put(header)
            rows.set_rows([(str(item.id), line) for item, line in zip(queue.items, lines, strict=True)])
        direct = [run.id for run in queue.direct] if queue is not None else [run.id for run in state.listed.active]
        text = f"{plural(len(direct), 'run')} beside the queue: {', '.join(direct)}" if direct else ""
        self.query_one("#queue-direct", Text).put(Content.styled(text, MUTED))

    def text(self) -> str:
        header, lines = lay_out(_columns(self.state, self.state.queue), 400) if self.state.queue else (Content(""), [])
        return "\n".join(line.plain.rstrip() for line in (header, *lines))


def _columns(state: DeckState, queue: QueueSnapshot) -> list[Column]:
    items = queue.items
    texts = [item_state(item) for item in items]
    states = [state.glyphs.state(_GLYPHS[text], text) for text in texts]
    budgets = [duration_text(item.budget_s) if item.budget_s else "" for item in items]
    return [
        Column("item", [str(item.id) for item in items], 9, right=True),
        Column("name", [item.name for item in items], 9),
        Column("state", states, 9),
        Column("nodes", [", ".join(item.hosts) for item in items], 3),
        Column("for", budgets, 4, optional=True),
        Column("why", [item_why(item, queue) for item in items], 8, grows=True),
    ]
