"""Pane 4: the plan while nothing runs; then the loss plot, the ranks and the run's figures; and, when something is
wrong, the first cause and its fix above the log that proves it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content

from tui.glyphs import MUTED, STATES
from tui.state import DeckState
from tui.widgets import run_story, run_watch
from tui.widgets.loss_plot import LossPlot
from tui.widgets.pane import Pane
from tui.widgets.rank_lines import figures, line, own_program, table
from tui.widgets.text import Text

PLOT_ROWS = 8
"""What is said goes first: with fewer rows left than this, ranks and figures included, there is no plot."""
LEAST_PLOT_ROWS = 6
"""With fewer, a blank line above it included, no plot can be drawn: what is verified gives way to it, but for what is
wrong."""
SCROLLBAR_CELLS = 1
"""Left free beside what is said: a long fix scrolls, and its lines are broken before it is known that it does."""
SHORT_SCREEN = 30
"""On a screen with fewer rows than this the plan goes without blank lines."""


class RunPane(Pane, can_focus=True):
    """The shown run."""

    NAME = "run"
    NUMBER = "4"
    HINTS = ("log_axis", "maximise", "enter")

    def compose(self) -> ComposeResult:
        yield Text(id="story")
        yield LossPlot(id="loss")
        yield Text(id="ranks")
        yield Text(id="figures")
        yield Text(id="watch")

    @property
    def full(self) -> bool:
        return self.state.view == "run"

    @property
    def plot(self) -> LossPlot:
        return self.query_one(LossPlot)

    def title(self, state: DeckState) -> str:
        if state.snapshot is None:
            return "run"
        record, separator = state.snapshot.record, state.glyphs.separator
        most = max(state.snapshot.most_attempts, record.attempts)
        attempt = f"{separator}attempt {record.attempts} of {most}" if record.attempts > 1 else ""
        return f"run{separator}{record.id}{attempt}"

    def draw(self, state: DeckState) -> None:
        snapshot = state.snapshot
        short = self.screen.size.height < SHORT_SCREEN
        self.set_class(snapshot is None, "-plan")
        if snapshot is None:
            self._put(
                "#story", run_story.plan(state, self.scrollable_content_region.width, short=short, full=self.full)
            )
            self.plot.display = False
            self._put("#ranks", [])
            self._put("#figures", [])
            self._put("#watch", [])
            return
        has_loss = bool(snapshot.series.train or snapshot.series.val)
        room = self.room - SCROLLBAR_CELLS
        story = [*run_story.end(state, snapshot, room), *run_story.attempts(snapshot, room, every=self.full)]
        story += run_watch.alarms(state, snapshot, room)
        self._put("#story", story)
        # Without a curve the room is the log's: it is what tells of a failure, or of a program of one's own.
        self.set_class(not has_loss and (not state.active or own_program(snapshot)), "-said")
        said = sum(len(text.plain.splitlines()) for text in story)
        self.plot.display = has_loss and self.content_size.height - said >= PLOT_ROWS
        if self.plot.display:
            self.plot.show(snapshot.series, state.glyphs)
        elif not story and not has_loss:
            self._put("#story", [_waiting(state)])
        tall = self.content_size.height >= 12
        whole = tall or not has_loss
        ranks = table(state, snapshot, self.room, headed=self.full) if whole else [line(state, snapshot, self.room)]
        self._put("#ranks", ranks)
        self._put("#figures", [figures(state, snapshot, self.room, peak=not whole)] if has_loss else [])
        verified = run_watch.verification(state, snapshot, self.room, every=self.full)
        left = self.content_size.height - said - len(ranks) - 1 - len(verified)
        if self.full and self.plot.display and left < LEAST_PLOT_ROWS:
            verified = run_watch.verification(state, snapshot, self.room, every=False)
        self._put("#watch", verified)

    def _put(self, selector: str, lines: list[Content]) -> None:
        text = self.query_one(selector, Text)
        text.display = bool(lines)
        text.put(Content("\n").join(lines))

    def text(self) -> str:
        state, snapshot = self.state, self.state.snapshot
        if snapshot is None:
            return "\n".join(line.plain for line in run_story.plan(state, self.room, full=True))
        lines = [
            Content(f"run {snapshot.record.id} ({snapshot.record.name}): {snapshot.record.state}"),
            *run_story.end(state, snapshot, self.room),
            *run_watch.alarms(state, snapshot, 200),
            figures(state, snapshot, 200),
            *run_watch.verification(state, snapshot, 200, every=True),
            *table(state, snapshot, 200, headed=True),
            Content("iteration  train loss"),
            *(Content(f"{iteration:>9}  {loss:.6f}") for iteration, loss in snapshot.series.train),
        ]
        return "\n".join(line.plain.rstrip() for line in lines)

    def copy_text(self) -> str:
        """The fix when the run failed (that is what one pastes), else everything."""
        snapshot = self.state.snapshot
        return (snapshot.fix if snapshot is not None else None) or self.text()


def _waiting(state: DeckState) -> Content:
    """While a run has no loss yet: what it is at."""
    assert state.snapshot is not None
    record = state.snapshot.record
    words = {
        "planned": "waiting for its supervisor",
        "preflight": "preflight checks run first (pane 2)",
        "launching": "the launcher starts the ranks",
        "running": "the ranks load the model; the first loss comes with the first report",
    }
    if own_program(state.snapshot):
        words["running"] = "your own program: what its ranks print is in the log below"
    mark = state.glyphs.state(STATES[record.state], record.state)
    return Content.assemble(mark, "  ", (words.get(record.state, ""), MUTED))
