"""The question before something is started or ended: its target, its effect, and what can be recovered."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content
from textual.widgets import Button

from tui.formatting import plural
from tui.screens.dialog import Dialog
from tui.state import DeckState
from tui.widgets.pairs import pair
from tui.widgets.rank_lines import own_program
from tui.widgets.run_story import hosts, newest_checkpoint, what


class Confirm(Dialog[bool]):
    """Answers True when the person goes on; the focus is on Cancel."""

    def __init__(self, title: str, lines: Sequence[Content], go: str, *, dangerous: bool = False) -> None:
        super().__init__(title, lines)
        self._go = go
        self._dangerous = dangerous

    def buttons(self) -> Sequence[Button]:
        return [
            Button("Cancel", id="cancel", compact=True),
            Button(self._go, id="go", compact=True, variant="error" if self._dangerous else "success"),
        ]

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "go")


def launch(state: DeckState, width: int) -> Confirm:
    """What will be launched, on what, and what happens first."""
    assert state.config is not None
    config = state.config
    first = "preflight: every check runs again before a rank starts; a failed one stops the launch"
    ranks = plural(len(config.nodes), "rank")
    launcher = "mlx.launch starts" if config.cluster.launcher == "mlx.launch" else "Flight Deck itself starts"
    lines = [
        *(pair(label, text, width) for label, text in what(config, state)),
        pair("hosts", hosts(config), width),
        pair("first", first, width),
        pair("then", f"{launcher} {ranks}, and the run outlives this console", width),
        pair("stop it", "ctrl+x, at any time", width),
    ]
    return Confirm(f"launch {config.job.name}?", lines, "Launch")


def abort(state: DeckState, width: int) -> Confirm:
    """Which run, what the abort does, and what is left of it afterwards."""
    assert state.snapshot is not None
    snapshot, record = state.snapshot, state.snapshot.record
    nodes = ", ".join(dict.fromkeys(rank.node for rank in snapshot.ranks)) or plural(record.world_size, "node")
    progress = (
        f"iteration {record.iteration:,} of {record.iterations:,}" if record.iteration and record.iterations else ""
    )
    if own_program(snapshot):
        effect = "TERM to your program on every rank, then KILL for what is left"
        kept = "what your program has saved itself, or saves when it gets TERM"
    else:
        effect = "all ranks finish their step, save and leave; then TERM, then KILL for what is left"
        checkpoint = newest_checkpoint(snapshot)
        kept = (
            f"the checkpoint of iteration {checkpoint:,}; later steps only if the ranks save within the grace"
            if checkpoint is not None
            else "no checkpoint yet: what was trained is kept only if the ranks save within the grace"
        )
    lines = [
        pair("run", f"{record.id} ({record.state})", width, style="bold"),
        pair("on", nodes, width),
        *([pair("progress", progress, width)] if progress else []),
        pair("effect", effect, width),
        pair("proof", "the processes that carry this run's mark are listed until there is none", width),
        pair("recover", kept, width),
    ]
    return Confirm(f"abort {record.id}?", lines, "Abort the run", dangerous=True)
