"""Pane 5: every run with its state, why it ended, how long it took and its losses; enter opens one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content

from engine.errors import plural
from tui.formatting import duration, loss, rate
from tui.glyphs import MUTED, STATES
from tui.state import DeckState
from tui.widgets.pane import Pane, RowList
from tui.widgets.run_summary import task_lines
from tui.widgets.text import Column, Text, lay_out, pair

if TYPE_CHECKING:
    from engine.models import RunRecord


class HistoryPane(Pane):
    NAME = "history"
    NUMBER = "5"
    HINTS = ("enter", "use")

    def compose(self) -> ComposeResult:
        yield Text(id="history-head", classes="head", wraps=True)
        yield RowList(id="history-rows")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Text(id="history-detail", wraps=True)

    def on_row_list_moved(self) -> None:
        self._detail()
        self.post_message(self.Selected(self.NAME, self.selected))

    @property
    def selected(self) -> str | None:
        return self.query_one(RowList).selected

    @property
    def opens(self) -> bool:
        return True

    def title(self, state: DeckState) -> str:
        return "history" if state.runs is None else f"history{state.glyphs.separator}{plural(len(state.runs), 'run')}"

    def draw(self, state: DeckState) -> None:
        runs = grouped(state.runs or ())
        head = self.query_one("#history-head", Text)
        if not runs:
            text = "no runs yet: n launches the first" if state.runs is not None else "reading the runs"
            head.put(Content.styled(text, MUTED))
            self.query_one(RowList).set_rows([])
            return
        line, rows = lay_out(_columns(state, runs), self.room - 1)
        head.put(line)
        self.query_one(RowList).set_rows([(run.id, row) for run, row in zip(runs, rows, strict=True)])
        self._detail()

    def _detail(self) -> None:
        run = next((run for run in self.state.runs or () if run.id == self.selected), None)
        if self.full and run is not None:
            self.query_one("#history-detail", Text).put(_detail(self.state, run, self.room))

    def text(self) -> str:
        runs = grouped(self.state.runs or ())
        head, rows = lay_out(_columns(self.state, runs), 400)
        return "\n".join(line.plain.rstrip() for line in (head, *rows))

    def copy_text(self) -> str:
        return self.selected or self.text()


def grouped(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Each task below the run whose result it uses, where that is listed."""
    tasks: dict[str | None, list[RunRecord]] = {run.id: [] for run in runs if run.task is None}
    for run in runs:
        tasks.get(run.source, []).append(run)
    return [record for run in runs if run.source not in tasks for record in (run, *tasks.get(run.id, ()))]


def _took(state: DeckState, run: RunRecord) -> str:
    return duration(((run.ended_at or state.now) - run.created_at).total_seconds())


def _columns(state: DeckState, runs: Sequence[RunRecord]) -> list[Column]:
    none, figure = state.glyphs.none, state.glyphs.known
    steps = [f"{run.iteration or 0:,}/{run.iterations:,}" if run.iterations else none for run in runs]
    where = [
        " ".join([f"rank {run.rank}" if run.rank is not None else "", run.host or ""]).strip() or none for run in runs
    ]
    branch = "`- " if state.glyphs.ascii else "└ "
    return [
        Column("state", [state.glyphs.state(STATES[run.state], run.state) for run in runs], 9),
        Column("run", [f"{branch if run.task is not None else ''}{run.id}" for run in runs], 9),
        Column("task", [run.task or "" for run in runs], 8, optional=True),
        Column("outcome", [", ".join((run.outcome or "").split(", ")[-2:]) for run in runs], 6, optional=True),
        Column("name", [run.name for run in runs], 1),
        Column("why it ended", [run.reason or none for run in runs], 6),
        Column("where", where, 3),
        Column("started", [state.ago(run.created_at) for run in runs], 5, right=True),
        Column("took", [_took(state, run) for run in runs], 7, right=True),
        Column("step", steps, 4, right=True),
        Column("loss", [figure(run.train_loss, loss) for run in runs], 8, right=True),
        Column("val", [figure(run.val_loss, loss) for run in runs], 7, right=True),
        Column("speed", [figure(run.tokens_per_second, rate) for run in runs], 2, right=True),
        Column("ranks", [str(run.world_size) for run in runs], 2, right=True),
    ]


def _detail(state: DeckState, run: RunRecord, width: int) -> Content:
    separator = state.glyphs.separator
    attempts = f"{separator}{plural(run.attempts, 'attempt')}" if run.attempts else ""
    lines = [
        Content.assemble((run.id, "bold"), "  ", state.glyphs.state(STATES[run.state], run.state)),
        pair("job", f"{run.name}{separator}{plural(run.world_size, 'rank')}{separator}{run.backend}{attempts}", width),
        pair("created", f"{run.created_at.astimezone():%Y-%m-%d %H:%M:%S}", width),
    ]
    if run.task is not None:
        lines.append(pair(run.task, f"of {run.source}{f': {run.outcome}' if run.outcome else ''}", width))
    if run.cause:
        lines.append(pair("note" if run.reason == "completed" else "first cause", run.cause, width))
    if run.fix:
        lines.append(pair("fix", run.fix, width))
    if run.excluded:
        lines.append(pair("left out", f"{', '.join(run.excluded)}: the files there differ", width))
    if run.unconfirmed:
        lines.append(pair("unconfirmed", f"the stop could not be proved on {', '.join(run.unconfirmed)}", width))
    lines += task_lines(state, run.id, width)
    return Content("\n").join(lines)
