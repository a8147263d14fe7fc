"""Pane 5: every run with its state, why it ended, how long it took and its losses, by a filter and in an order of one's
own; and the description of one. Of ten thousand rows those in sight are laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from engine import api
from engine.errors import InputError, plural, reason_text
from tui.formatting import checkpoint_text, duration, loss, rate
from tui.glyphs import MUTED, STATES
from tui.state import DeckState
from tui.widgets import run_summary
from tui.widgets.chart import Chart, SeriesSource
from tui.widgets.logs_pane import FilterBar
from tui.widgets.pane import Pane, RowList
from tui.widgets.run_summary import task_lines
from tui.widgets.text import Column, TableForm, Text, lay_out, pair

if TYPE_CHECKING:
    from engine.models import RunRecord
    from engine.snapshots import RunSnapshot

_FILTER, _TAGS, _NOTE = "filter", "tags", "note"
_ORDERS: Final = ("-started", "name", "state", "-took", "-step", "loss", "val", "-speed", "-ranks", "lr")
"""Orders that a key goes through; the first is that of the list itself."""


def _seconds(state: DeckState, run: RunRecord) -> float:
    return ((run.ended_at or state.now) - run.created_at).total_seconds()


def _where(run: RunRecord) -> str:
    return " ".join([f"rank {run.rank}" if run.rank is not None else "", run.host or ""]).strip()


def _branch(state: DeckState) -> str:
    return "`- " if state.glyphs.ascii else "└ "


class _Field(NamedTuple):
    column: Column
    text: Callable[[DeckState, RunRecord], str]
    """Empty where there is nothing."""
    by: Callable[[DeckState, RunRecord], float] | None = None
    """The run with the highest has the longest text: of thousands the others are not written."""


_FIELDS: Final = (
    _Field(Column("run", (), 9), lambda state, run: f"{_branch(state) if run.task is not None else ''}{run.id}"),
    _Field(Column("task", (), 8, optional=True), lambda _, run: run.task or ""),
    _Field(Column("outcome", (), 6, optional=True), lambda _, run: ", ".join((run.outcome or "").split(", ")[-2:])),
    _Field(Column("name", (), 1), lambda _, run: run.name),
    _Field(Column("tags", (), 6, optional=True), lambda _, run: ", ".join(run.tags)),
    _Field(Column("why it ended", (), 6), lambda _, run: reason_text(run.reason)),
    _Field(Column("where", (), 3), lambda _, run: _where(run)),
    _Field(
        Column("started", (), 5, right=True, reserved=len("59 min ago")),
        lambda state, run: state.ago(run.created_at),
        lambda state, run: 0.0,
    ),
    _Field(Column("took", (), 7, right=True), lambda state, run: duration(_seconds(state, run)), _seconds),
    _Field(
        Column("step", (), 4, right=True),
        lambda _, run: f"{run.iteration or 0:,}/{run.iterations:,}" if run.iterations else "",
    ),
    _Field(Column("loss", (), 8, right=True), lambda state, run: state.glyphs.known(run.train_loss, loss)),
    _Field(Column("val", (), 7, right=True), lambda state, run: state.glyphs.known(run.val_loss, loss)),
    _Field(
        Column("speed", (), 2, right=True, reserved=len("0.0 tok/s")),
        lambda state, run: state.glyphs.known(run.tokens_per_second, rate),
        lambda _, run: run.tokens_per_second or 0.0,
    ),
    _Field(Column("ranks", (), 2, right=True), lambda _, run: str(run.world_size), lambda _, run: run.world_size),
)
_COLUMNS: Final = (Column("", (), 9, optional=True), Column("state", (), 9), *(field.column for field in _FIELDS))


class RunPrompt(FilterBar):
    """The entry of a filter, of tags or of a note."""

    PROMPTS: ClassVar[Mapping[str, tuple[str, str]]] = {
        _FILTER: ("/", "state:failed lr<1e-4 tag:night; or, not, ( ); empty shows all"),
        _TAGS: ("T", "tags with blanks between them; empty removes all"),
        _NOTE: ("N", "a line about the run; empty removes it"),
    }

    def check(self, text: str) -> None:
        if self.kind == _FILTER:
            api.run_filter(text, datetime.now(UTC))
        elif self.kind == _TAGS:
            for tag in text.split():
                api.validate_identifier(tag, "tag")


class HistoryPane(Pane):
    NAME = "history"
    NUMBER = "5"
    HINTS = ("compare", "describe", "mark", "filter_runs")

    @dataclass
    class Annotated(Message):
        """A run's tags or note were entered."""

        run: str
        kind: str
        """"tags" or "note"."""
        text: str

    @dataclass
    class Asked(Message):
        """A run is to be described."""

        run: str

    def __init__(self) -> None:
        super().__init__()
        self.filter = ""
        self.order = _ORDERS[0]
        self._seen: tuple[object, ...] = ()
        self._runs: list[RunRecord] = []
        self._ids: list[str] = []
        """Those that are listed, in order."""
        self._widest: list[int] = []
        self._described: RunSnapshot | None = None

    def compose(self) -> ComposeResult:
        yield Text(id="history-head", classes="head", wraps=True)
        yield RowList(id="history-rows")
        yield RunPrompt(self._answer, id="history-prompt")
        with VerticalScroll(classes="detail", can_focus=False):
            yield Text(id="history-detail", wraps=True)
        yield Chart(id="history-chart")

    def on_row_list_moved(self) -> None:
        self._detail()
        self.post_message(self.Selected(self.NAME, self.selected))
        if self.state.detail and self.selected is not None:
            self.post_message(self.Asked(self.selected))

    @property
    def selected(self) -> str | None:
        return self.query_one(RowList).selected

    @property
    def opens(self) -> bool:
        return True

    @property
    def keys_go_to(self) -> Widget:
        return self.query_one(RowList)

    @property
    def record(self) -> RunRecord | None:
        """The selected run's."""
        return self.state.listed.by_id.get(self.selected or "")

    def title(self, state: DeckState) -> str:
        if state.runs is None:
            return "history"
        self._choose(state)
        count = plural(len(state.runs), "run")
        parts = ["history", f"{len(self._runs):,} of {count}" if self.filter else count]
        parts += [self.filter] if self.filter else []
        name, descending = self.order.removeprefix("-"), self.order.startswith("-")
        if self.order != _ORDERS[0]:
            parts.append(f"by {name} {state.glyphs.down if descending else state.glyphs.up}")
        parts += [f"{len(state.marked)} marked"] if state.marked else []
        return state.glyphs.separator.join(parts)

    def draw(self, state: DeckState) -> None:
        self._choose(state)
        alone = state.detail and self.full
        self.set_class(alone, "-alone")
        head, rows = self.query_one("#history-head", Text), self.query_one(RowList)
        head.display = rows.display = not alone
        shown = self._described if alone else None
        curve = shown is not None and shown.record.id == self.selected and bool(shown.series.train or shown.series.val)
        self.query_one(Chart).display = curve
        self.set_class(curve, "-charted")
        if not self._runs:
            filtered = self.filter and state.runs
            none = (
                "no run matches: / changes the filter, esc removes it"
                if filtered
                else "no runs yet"
                + state.key(": n launches the first" if state.config is not None else ": d runs the demo")
            )
            head.put(Content.styled(none if state.runs is not None else "reading the runs", MUTED))
            rows.set_rows([])
            return
        widest = [int(bool(state.marked)), *self._widest]
        empty = {place for place, width in enumerate(widest) if not width}
        form = TableForm.fit(_COLUMNS, widest, empty, self.room - 1)
        head.put(form.header)
        runs, marked = self._runs, frozenset(state.marked)

        def line(index: int) -> Content:
            return form.line(cells(state, runs[index], marked=runs[index].id in marked))

        rows.show_rows(self._ids, line)
        self._detail()

    def _choose(self, state: DeckState) -> None:
        """Filter and order the runs where they, or what is asked for, are others than before."""
        seen = (state.runs, self.filter, self.order)
        if all(one is other for one, other in zip(seen, self._seen, strict=False)) and self._seen:
            return
        runs = list(state.runs or ())
        try:
            taken = api.run_filter(self.filter, state.now)
            runs = [run for run in runs if taken(run)]
            self._runs = grouped(runs) if self.order == _ORDERS[0] else api.sorted_runs(runs, self.order, state.now)
        except InputError:
            self._runs = runs
        self._seen, self._ids = seen, [run.id for run in self._runs]
        self._widest = _widest(state, self._runs)

    def _detail(self) -> None:
        run = self.record
        if self.full and run is not None:
            # Less a scrollbar.
            room = self.room - 1
            lines = _detail(self.state, run, room)
            if self.state.detail and self._described is not None and self._described.record.id == run.id:
                lines = described(self.state, run, self._described, room)
            self.query_one("#history-detail", Text).put(Content("\n").join(lines))

    def describe(self, snapshot: RunSnapshot, series: SeriesSource) -> None:
        """Take what was read of a run that is to be described."""
        self._described = snapshot
        chart = self.query_one(Chart)
        chart.open(series)
        chart.show(snapshot, run_summary.marks(snapshot), self.state.glyphs)
        self.refresh_pane()

    def ask(self, kind: str) -> None:
        """Open the prompt of "filter", or of the selected run's "tags" or "note"."""
        run = self.record
        texts = {_FILTER: self.filter, _TAGS: " ".join(run.tags) if run else "", _NOTE: (run.note or "") if run else ""}
        self.query_one(RunPrompt).open(kind, texts[kind])

    def _answer(self, kind: str, text: str) -> None:
        if kind == _FILTER:
            self.filter = text.strip()
            self.refresh_pane()
        elif self.selected is not None:
            self.post_message(self.Annotated(self.selected, kind, text))

    def sort(self, *, reverse: bool) -> None:
        if reverse:
            self.order = self.order.removeprefix("-") if self.order.startswith("-") else f"-{self.order}"
        else:
            named = [order.removeprefix("-") for order in _ORDERS]
            self.order = _ORDERS[(named.index(self.order.removeprefix("-")) + 1) % len(_ORDERS)]
        self.refresh_pane()

    def back(self) -> bool:
        """Close the prompt, or remove the filter: one of them; False when there is none."""
        prompt = self.query_one(RunPrompt)
        if prompt.is_open:
            prompt.close()
        elif self.filter and self.full and not self.state.detail:
            self.filter = ""
            self.refresh_pane()
        else:
            return False
        return True

    def text(self) -> str:
        self._choose(self.state)
        rows = [cells(self.state, run, marked=False) for run in self._runs]
        columns = [Column(column.title, [row[i] for row in rows]) for i, column in enumerate(_COLUMNS)]
        head, lines = lay_out(columns, 400)
        return "\n".join(line.plain.rstrip() for line in (head, *lines))

    def copy_parts(self) -> dict[str, str]:
        """The commands of a described run, else the id of the selected one."""
        snapshot = self._described
        if self.state.detail and snapshot is not None and snapshot.record.id == self.selected:
            return {command.split()[1]: command for command in _commands(snapshot)}
        return {"run": self.selected or self.text()}


def grouped(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Each task below the run whose result it uses, where that is listed."""
    tasks: dict[str | None, list[RunRecord]] = {run.id: [] for run in runs if run.task is None}
    for run in runs:
        tasks.get(run.source, []).append(run)
    return [record for run in runs if run.source not in tasks for record in (run, *tasks.get(run.id, ()))]


def _widest(state: DeckState, runs: Sequence[RunRecord]) -> list[int]:
    """Cells of each column but that of the marks that hold all runs, so that none moves while one scrolls; 0 for one
    with nothing in it."""
    longest = [max((len(f"x {run.state}") for run in runs), default=0)]
    for field in _FIELDS:
        written = [max(runs, key=partial(field.by, state))] if field.by is not None and runs else runs
        longest.append(max((len(field.text(state, run)) for run in written), default=0))
    pairs = zip(longest, _COLUMNS[1:], strict=True)
    return [max(width, len(column.title), column.reserved) if width else 0 for width, column in pairs]


def cells(state: DeckState, run: RunRecord, *, marked: bool) -> list[Content]:
    """One row of the list."""
    mark = Content.styled("*" if state.glyphs.ascii else "●", "bold $text-accent") if marked else Content("")
    texts = (field.text(state, run) or ("" if field.column.optional else state.glyphs.none) for field in _FIELDS)
    return [mark, state.glyphs.state(STATES[run.state], run.state), *map(Content, texts)]


def _detail(state: DeckState, run: RunRecord, width: int) -> list[Content]:
    separator = state.glyphs.separator
    attempts = f"{separator}{plural(run.attempts, 'attempt')}" if run.attempts else ""
    lines = [
        Content.assemble((run.id, "bold"), "  ", state.glyphs.state(STATES[run.state], run.state)),
        pair("job", f"{run.name}{separator}{plural(run.world_size, 'rank')}{separator}{run.backend}{attempts}", width),
        pair("created", f"{run.created_at.astimezone():%Y-%m-%d %H:%M:%S}", width),
    ]
    for label, text in (("tags", ", ".join(run.tags)), ("your note", run.note)):
        if text:
            lines.append(pair(label, text, width))
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
    return lines + task_lines(state, run.id, width)


def described(state: DeckState, run: RunRecord, snapshot: RunSnapshot, width: int) -> list[Content]:
    """All of a run that is worth knowing before something is done with it."""
    lines = _detail(state, run, width)
    settings = state.glyphs.separator.join(f"{name} {_setting(value)}" for name, value in run.settings.items())
    if settings:
        lines.append(pair("settings", settings, width))
    lines += run_summary.attempts(snapshot, width, every=True)
    lines += run_summary.left(state, snapshot, width, tall=True)
    if snapshot.result is not None and (text := checkpoint_text(snapshot.result)) is not None:
        lines.append(pair("checkpoint", text, width))
    lines += run_summary.trackers(snapshot, width)
    for number, command in enumerate(_commands(snapshot)):
        lines.append(pair("commands" if not number else "", command, width, style="bold"))
    return lines


def _commands(snapshot: RunSnapshot) -> list[str]:
    run, trained = snapshot.record, snapshot.trained
    training, served = run.task is None, trained is not None and trained.unserved is None
    names = {"chat": training and served, "fetch": snapshot.fetch is not None}
    names |= {"resume": training and run.state != "succeeded", "repeat": training, "logs": True, "export": training}
    if not run.state.ended:
        names = {"abort": True, "logs": True}
    commands = {"fetch": snapshot.fetch or ""}
    return [commands.get(name, f"flightdeck {name} {run.id}") for name, possible in names.items() if possible]


def _setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
