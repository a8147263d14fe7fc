"""The dialog of an abort: its stages with their clock, an acknowledgement per rank, and the processes still alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Button

from tui.formatting import duration
from tui.glyphs import FAIL, MUTED, OK, PENDING, RUNNING, STOPPED, UNKNOWN, Glyph
from tui.screens.dialog import Dialog, button
from tui.state import DeckState
from tui.widgets.run_summary import own_program

if TYPE_CHECKING:
    from engine.snapshots import StopProgress

OWN_PROGRAM: Final = "signals the ranks' programs: TERM, then KILL"
"""A command of the user's own has no cooperative stop: its keeper signals at once."""
STAGES: Final = (
    ("stop", "INT", "the ranks finish their step and save"),
    ("term", "TERM", "to what has not left after that"),
    ("kill", "KILL", "to what is left"),
    ("verifying", "proof", "that no process of the run is alive"),
)


class Stopping(Dialog):
    """Shows the run's StopProgress; leaving it does not stop the abort. Answers "quit" to `q` after the run's end."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", show=False)]

    def __init__(self, state: DeckState, now: Callable[[], None]) -> None:
        self._now = now
        self._ended = False
        self._close = button("Close, the abort goes on", "close")
        self._end_now = button("Skip the save, end it now", "now", "error")
        super().__init__(f"aborting {_run(state)}", progress(state), self._close, self._end_now)

    def show(self, state: DeckState) -> None:
        """Redraw; called while the dialog is open."""
        self.set_body(progress(state))
        if not state.active and self.is_mounted:
            self._ended = True
            self._end_now.display = False
            self._close.label = "Close"
            self._close.focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button is self._end_now:
            event.prevent_default()
            self._now()
            self._end_now.disabled = True
            self._close.focus()

    def action_quit(self) -> None:
        """The key bar below offers it; while the abort goes on `q` only closes the dialog."""
        self.dismiss("quit" if self._ended else None)


def _run(state: DeckState) -> str:
    return state.snapshot.record.id if state.snapshot is not None else "the run"


def graces(state: DeckState) -> dict[str, float]:
    """Seconds before the next stage, where the configuration has them."""
    if state.config is None:
        return {}
    return {"stop": state.config.recovery.stop_grace_s, "term": state.config.recovery.term_grace_s}


def progress(state: DeckState) -> list[Content]:
    """The stages, the ranks, and the verdict, as lines."""
    snapshot = state.snapshot
    if snapshot is None:
        return [Content("no run is shown")]
    stop = snapshot.stop
    reached = _reached(stop, ended=not state.active)
    lines = []
    scripted = own_program(snapshot)
    for index, (stage, word, text) in enumerate(STAGES):
        if scripted and stage == "stop":
            word, text = "STOP", OWN_PROGRAM
        clock = ""
        if index < reached:
            needed = stop is not None and stage in (*stop.passed, stop.stage)
            glyph: Glyph = OK if needed else PENDING
            clock = "" if needed else "  not needed"
        elif index == reached and stop is not None:
            glyph = RUNNING
            clock = _clock(state, stop, stage)
        else:
            glyph = PENDING
        lines.append(Content.assemble(state.glyphs.state(glyph, f"{word:<6}"), (f" {text}", MUTED), (clock, "bold")))
    lines.append(Content(""))
    acknowledged = set(stop.acknowledged) if stop else set()
    for rank in snapshot.ranks:
        left = rank.rank in acknowledged or rank.phase == "ended"
        mark = state.glyphs.state(OK, "has left") if left else state.glyphs.state(PENDING, "has not acknowledged yet")
        lines.append(Content.assemble((f"rank {rank.rank} {rank.node:<12}", ""), mark))
    for process in stop.left if stop else ():
        lines.append(Content.assemble(("alive ", "$warning"), process))
    lines += [Content(""), *_verdict(state)]
    return lines


def _reached(stop: StopProgress | None, *, ended: bool) -> int:
    if ended or (stop is not None and stop.stage == "stopped"):
        return len(STAGES)
    names = [stage for stage, _, _ in STAGES]
    if stop is None or stop.stage not in names:
        return len(STAGES) - 1 if stop is not None and stop.stage == "unconfirmed" else 0
    return names.index(stop.stage)


def _clock(state: DeckState, stop: StopProgress, stage: str) -> str:
    passed = state.age_s(stop.since)
    grace = graces(state).get(stage)
    if grace is None or passed > grace:
        return f"  {duration(passed)}"
    return f"  {grace - passed:.0f} s left"


def _unproved(state: DeckState) -> list[str]:
    """Nodes without a proved stop, while the run's record does not name them yet."""
    assert state.snapshot is not None
    stop, ranks = state.snapshot.stop, state.snapshot.ranks
    left = [process.split(" ", 1)[0] for process in stop.left] if stop is not None else []
    gone = [rank.node for rank in ranks if rank.link is not None and rank.link.condition != "connected"]
    silent = [rank.node for rank in ranks if stop is None or rank.rank not in stop.acknowledged]
    return list(dict.fromkeys(left or gone or silent))


def _verdict(state: DeckState) -> list[Content]:
    assert state.snapshot is not None
    record, stop = state.snapshot.record, state.snapshot.stop
    if record.unconfirmed or (stop is not None and stop.stage == "unconfirmed"):
        nodes = ", ".join(record.unconfirmed or _unproved(state)) or "a node"
        text = f"stop unconfirmed on {nodes}: the supervisor retries, and the lease ends what is left there"
        return [Content.assemble(state.glyphs.state(FAIL, text))]
    if record.state == "aborted":
        return [state.glyphs.state(STOPPED, "aborted: no process of the run is left")]
    if not state.active:
        return [state.glyphs.state(UNKNOWN, f"the run has ended: {record.state}")]
    return [Content.styled("stop requested; esc closes this, the abort goes on", MUTED)]
