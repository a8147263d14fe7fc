"""Pane 4: the plan while nothing runs; then the chart, the ranks and the run's figures; and, when something is
wrong, the first cause and its fix above the log that proves it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content

from tui.glyphs import MUTED, STATES
from tui.state import DeckState
from tui.widgets import plan_summary, run_summary
from tui.widgets.chart import LEAST_ROWS, Chart
from tui.widgets.pane import Pane
from tui.widgets.run_summary import figures, own_program, rank_line, rank_table
from tui.widgets.text import Text

TALL = 12
"""Rows of a pane with room for a line a rank, and for the path of what was trained and the command that uses it."""
SCROLLBAR_CELLS = 1
"""Left free beside the summary: a long fix scrolls, and its lines are broken before that is known."""
SHORT_SCREEN = 30
"""On a screen with fewer rows than this the plan goes without blank lines."""


class RunPane(Pane, can_focus=True):
    """The shown run."""

    NAME = "run"
    NUMBER = "4"
    HINTS = ("samples", "next_metric", "metric_grid", "maximise", "enter")
    samples_shown = False
    """The answers to sample_prompts are in place of all else."""

    def compose(self) -> ComposeResult:
        yield Text(id="summary")
        yield Chart(id="chart")
        yield Text(id="ranks")
        yield Text(id="figures")
        yield Text(id="watch")

    @property
    def full(self) -> bool:
        return self.state.view == "run"

    @property
    def opens(self) -> bool:
        return super().opens or self.state.proof is not None

    @property
    def chart(self) -> Chart:
        return self.query_one(Chart)

    def move(self, name: str) -> bool:
        direction = {"left": -1, "right": 1}.get(name)
        if direction is None or not (self.full and self.chart.display):
            return super().move(name)
        self.chart.move_cursor(direction)
        return True

    def toggle_samples(self) -> None:
        self.samples_shown = not self.samples_shown
        self.scroll_home(animate=False)
        self.refresh_pane()

    def title(self, state: DeckState) -> str:
        if state.snapshot is None:
            return "run"
        record, separator = state.snapshot.record, state.glyphs.separator
        most = max(state.snapshot.most_attempts, record.attempts)
        attempt = f"{separator}attempt {record.attempts} of {most}" if record.attempts > 1 else ""
        samples = f"{separator}samples" if self.samples_shown and state.snapshot.samples else ""
        return f"run{separator}{run_summary.title(record)}{attempt}{samples}"

    def draw(self, state: DeckState) -> None:
        snapshot = state.snapshot
        self.set_class(snapshot is None, "-plan")
        alone = None
        if snapshot is None:
            width, short = self.scrollable_content_region.width, self.screen.size.height < SHORT_SCREEN
            alone = plan_summary.overview(state, width, short=short, full=self.full)
        elif self.samples_shown and snapshot.samples:
            alone = run_summary.samples(snapshot, self.room - SCROLLBAR_CELLS)
        if snapshot is None or alone is not None:
            self.chart.display = False
            for selector, lines in (("#summary", alone or []), ("#ranks", []), ("#figures", []), ("#watch", [])):
                self._put(selector, lines)
            return
        has_loss = bool(snapshot.series.train or snapshot.series.val)
        self.chart.show(snapshot, run_summary.marks(snapshot), state.glyphs)
        if self.full and self.chart.view.grid and state.metrics:
            for selector in ("#summary", "#ranks", "#figures", "#watch"):
                self._put(selector, [])
            self.chart.display = True
            return
        charted = has_loss or (self.full and bool(state.metrics))
        room, height = self.room - SCROLLBAR_CELLS, self.content_size.height
        tall = height >= TALL
        attempts = run_summary.attempts(snapshot, room, every=self.full)
        summary = [*run_summary.outcome(state, snapshot, room), *(attempts if state.active else [])]
        summary += run_summary.alarms(state, snapshot, room)
        summary += run_summary.task_results(state, snapshot, room)
        if snapshot.record.task is not None:
            summary = [*(summary or [_waiting(state)]), run_summary.next_key(state, snapshot, room)]
        elif not summary and not has_loss:
            summary = [_waiting(state)]
        self._put("#summary", summary)
        # Without a curve the log gets the room: it shows a failure, or the output of a program of one's own.
        self.set_class(not has_loss and (not state.active or own_program(snapshot)), "-summary")
        # The style sheet gives it half of the pane at least; what has no room below it is scrolled to.
        self.chart.display = charted and height >= 2 * LEAST_ROWS
        # Maximised it shows each rank and each check, else those of which not all is well.
        folded = self.chart.display and not self.screen.has_class("-maximised")
        if folded and (not tall or run_summary.ranks_well(state, snapshot)):
            ranks = [rank_line(state, snapshot, room)] if tall or state.active else []
        else:
            ranks = rank_table(state, snapshot, room, headed=self.full)
        self._put("#ranks", ranks)
        self._put("#figures", [figures(state, snapshot, room, peak=not tall)] if has_loss else [])
        rest = run_summary.left(state, snapshot, room, tall=tall)
        rest += [] if state.active else attempts
        if self.full:
            rest += run_summary.task_lines(state, snapshot.record.id, room)
        rest += run_summary.trackers(snapshot, room)
        verified = run_summary.verification(state, snapshot, room, every=self.full and not folded)
        if self.full and tall and folded:
            verified += run_summary.verified_line(state, snapshot, room)
        self._put("#watch", [*verified, *rest])

    def _put(self, selector: str, lines: list[Content]) -> None:
        text = self.query_one(selector, Text)
        text.display = bool(lines)
        text.put(Content("\n").join(lines))

    def text(self) -> str:
        state, snapshot = self.state, self.state.snapshot
        if snapshot is None:
            return "\n".join(line.plain for line in plan_summary.overview(state, self.room, full=True))
        lines = [
            Content(f"run {snapshot.record.id} ({snapshot.record.name}): {snapshot.record.state}"),
            *run_summary.outcome(state, snapshot, self.room),
            *run_summary.alarms(state, snapshot, 200),
            *run_summary.task_results(state, snapshot, 200),
            *run_summary.samples(snapshot, 200),
            *run_summary.left(state, snapshot, 200, tall=True),
            *run_summary.trackers(snapshot, 200),
            figures(state, snapshot, 200),
            *run_summary.verification(state, snapshot, 200, every=True),
            *rank_table(state, snapshot, 200, headed=True),
            Content("iteration  train loss"),
            *(Content(f"{iteration:>9}  {loss:.6f}") for iteration, loss in snapshot.series.train),
        ]
        return "\n".join(line.plain.rstrip() for line in lines)

    def copy_parts(self) -> dict[str, str]:
        """The commands for a run that has ended (they are what one pastes), else everything."""
        snapshot = self.state.snapshot
        commands = run_summary.commands(self.state, snapshot) if snapshot is not None else {}
        return commands if len(commands) == 1 else {**commands, "everything": self.text()}


def _waiting(state: DeckState) -> Content:
    assert state.snapshot is not None
    record = state.snapshot.record
    stages = {
        "planned": "waiting for its supervisor",
        "preflight": "preflight checks run first (pane 2)",
        "launching": "the launcher starts the ranks",
        "running": "the ranks load the model; a loss comes with the first report",
    }
    if record.task is not None:
        stages["running"] = "the ranks load the model; each result is shown as it comes"
    if own_program(state.snapshot):
        activity = state.snapshot.activity or "your own program"
        stages["running"] = f"{activity.removeprefix('running, ')}: see the log"
    mark = state.glyphs.state(STATES[record.state], record.state)
    return Content.assemble(mark, "  ", (stages.get(record.state, ""), MUTED))
