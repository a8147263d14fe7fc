"""The frame of every dialog (a title, lines of text, buttons, the safe one focused), the confirmations before a
launch or an abort, and the welcome when there is no flightdeck.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static
from textual.widgets.button import ButtonVariant

from engine import api
from engine.errors import InputError, plural
from tui.formatting import seconds_of, size
from tui.glyphs import MUTED
from tui.state import DeckState
from tui.widgets.plan_summary import edited, hosts, job_rows
from tui.widgets.run_summary import newest_checkpoint, own_program
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.snapshots import Deletion

WIDTH = 84
"""Cells of a dialog on a wide enough terminal."""
FRAME = 6
"""Lines of a dialog outside its body: border, padding, buttons and the line above them."""


def text_width(columns: int) -> int:
    """Cells of a line of a dialog's body on a terminal of `columns`, without frame and padding."""
    return min(WIDTH, int(columns * 0.96)) - 6


def button(label: str, id: str, variant: ButtonVariant = "default") -> Button:
    return Button(label, variant, id=id, compact=True)


class Dialog(ModalScreen[str]):
    """A modal box, which answers the id of the button that was pressed. `esc`, `q` and the buttons "cancel" and "close"
    leave it without doing anything."""

    FOCUS: ClassVar = "Button"
    """The first of these has the focus."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", "back", show=False),
        Binding("left,h,up,k", "app.focus_previous", show=False),
        Binding("right,l,down,j", "app.focus_next", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Content], *buttons: Button) -> None:
        """The first button gets the focus: make it the safe one."""
        super().__init__()
        self._heading = title
        self._lines = list(lines)
        self._buttons = buttons

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as box:
            box.border_title = Content(self._heading)
            with VerticalScroll(id="dialog-body", can_focus=False):
                yield from self.compose_body()
            with Horizontal(id="dialog-buttons"):
                yield from self._buttons

    def compose_body(self) -> ComposeResult:
        yield Static(Content("\n").join(self._lines), id="dialog-text", markup=False)

    def on_mount(self) -> None:
        for first in self.query(self.FOCUS)[:1]:
            first.focus()
        self._fit()

    def on_resize(self, event: Resize) -> None:
        self._fit()

    def _fit(self) -> None:
        """Keep the buttons on the screen: a long body scrolls."""
        self.query_one("#dialog-body").styles.max_height = max(3, self.app.size.height - FRAME)

    def set_body(self, lines: Sequence[Content]) -> None:
        self._lines = list(lines)
        # There is none where an answer comes while the dialog is taken down.
        for text in self.query("#dialog-text").results(Static):
            text.update(Content("\n").join(self._lines))

    @property
    def body(self) -> str:
        """The body as plain text."""
        return "\n".join(line.plain for line in self._lines)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id if event.button.id not in ("cancel", "close") else None)

    def action_leave(self) -> None:
        self.dismiss(None)


class Confirm(Dialog):
    """Answers "go" to go on; the focus is on Cancel."""

    def __init__(self, title: str, lines: Sequence[Content], go: str, *, dangerous: bool = False) -> None:
        variant: ButtonVariant = "error" if dangerous else "success"
        super().__init__(title, lines, button("Cancel", "cancel"), button(go, "go", variant))


class ConfirmLaunch(Dialog):
    """Answers "go", or "settings" to change them first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "settings", show=False)]

    def __init__(self, title: str, lines: Sequence[Content], *, settings: bool) -> None:
        """`settings`: it has some that can be changed here."""
        self._settings = settings
        change = [button("Change settings (c)", "settings")] * settings
        super().__init__(title, lines, button("Cancel", "cancel"), button("Launch", "go", "success"), *change)

    def action_settings(self) -> None:
        if self._settings:
            self.dismiss("settings")


class QueueForm(Confirm):
    """The job, its nodes, what is before it, and what a person may wish of its time, which `wishes` has then."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", show=False),
        Binding("down", "app.focus_next", show=False),
    ]
    FIELDS: ClassVar[Mapping[str, tuple[str, str]]] = {
        "after": ("not before", '"22:00" or "2026-12-01 22:00"'),
        "budget_s": ("for", "30m, 8h or 2d: saved and stopped"),
    }

    def __init__(self, state: DeckState, width: int) -> None:
        config, running = state.config, state.running
        assert config is not None
        before = sum(item.open for item in state.queue.items) if state.queue is not None else 0
        going_on = f"{running.id} goes on" if running is not None else "nothing goes on"
        waits = f"; {plural(before, 'item')} before it" if before else ""
        self._about = [
            *(pair(label, text, width) for label, text in job_rows(config, state)),
            pair("hosts", hosts(config), width),
            pair("starts", f"when they are free: {going_on}{waits}", width),
        ]
        super().__init__(f"put {config.job.name} into the queue?", self._about, "Queue")
        self._width = width
        self.wishes: dict[str, object] = {}

    def compose_body(self) -> ComposeResult:
        yield from super().compose_body()
        for name, (label, takes) in self.FIELDS.items():
            with Horizontal(classes="setting"):
                yield Static(Content.styled(f"{label:<14}", MUTED))
                yield Input(name=name, compact=True)
                yield Static(Content.styled(takes, MUTED))

    def on_input_changed(self, event: Input.Changed) -> None:
        self.wishes, faults = {}, []
        readers: dict[str | None, Callable[[str], object]] = {"after": api.starting_time, "budget_s": seconds_of}
        for field in self.query(Input):
            try:
                if field.value.strip():
                    self.wishes[str(field.name)] = readers[field.name](field.value)
            except InputError as error:
                faults.append(pair("not possible", str(error), self._width, style="$error"))
        self._buttons[1].disabled = bool(faults)
        self.set_body([*self._about, *faults])

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if not self._buttons[1].disabled:
            self._buttons[1].focus()


def confirm_launch(state: DeckState, width: int) -> ConfirmLaunch:
    """The job, its nodes, what was changed, and what happens first."""
    assert state.config is not None
    config = state.config
    first = "preflight: every check runs again before a rank starts; a failed one stops the launch"
    ranks = plural(len(config.nodes), "rank")
    launcher = "Flight Deck itself starts" if config.starts_directly else "mlx.launch starts"
    lines = [
        *(pair(label, text, width) for label, text in job_rows(config, state)),
        *edited(state, width),
        pair("hosts", hosts(config), width),
        pair("first", first, width),
        pair("then", f"{launcher} {ranks}, and the run outlives this console", width),
        pair("stop it", "ctrl+x, at any time", width),
    ]
    if state.fault:
        lines += [pair("but", line, width, style="$warning") for line in state.fault.splitlines()]
    return ConfirmLaunch(f"launch {config.job.name}?", lines, settings=config.job.command is None)


def confirm_programs(file: Path | None, programs: Sequence[tuple[str, str]], width: int) -> Confirm:
    """All that a configuration makes run."""
    lines = [Content.styled(str(file), "bold"), Content("")]
    lines.append(Content("It makes these run, some as soon as its nodes are asked what they are:"))
    lines += [pair(label, text, width, style="bold") for label, text in programs]
    lines += [
        Content(""),
        Content.styled("Asked again only when other things would run, or their content has changed.", MUTED),
    ]
    return Confirm("run what this file names?", lines, "Run them")


def confirm_abort(state: DeckState, width: int) -> Confirm:
    """The run, the effect of the abort, and what is kept."""
    assert state.snapshot is not None
    snapshot, record = state.snapshot, state.snapshot.record
    nodes = ", ".join(dict.fromkeys(rank.node for rank in snapshot.ranks)) or plural(record.world_size, "node")
    progress = (
        f"iteration {record.iteration:,} of {record.iterations:,}" if record.iteration and record.iterations else ""
    )
    if own_program(snapshot):
        effect = "TERM to your program on every rank, then KILL for what is left"
        kept = "what your program has saved itself, or saves when it gets TERM"
    elif record.task is not None:
        effect = "all ranks leave; then TERM, then KILL for what is left"
        kept = f"the result of {record.source}, which it only reads"
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
        pair(
            "proof",
            "processes with this run's mark, their descendants and sessions are listed until none is left",
            width,
        ),
        pair("recover", kept, width),
    ]
    return Confirm(f"abort {record.id}?", lines, "Abort the run", dangerous=True)


def deletion_rows(deletions: Sequence[Deletion], width: int) -> list[Content]:
    """The space that each deletion frees, and what stays."""
    lines = []
    for deletion in deletions:
        lines.append(pair("run", deletion.run, width, style="bold"))
        for part in (deletion.here, *deletion.nodes):
            place, folders = part.node or "this machine", ", ".join(part.folders)
            text = f"{size(part.bytes)} in {folders}" if part.problem is None else f"{folders} stays: {part.problem}"
            lines.append(pair(place[:13], text, width, style="" if part.problem is None else "$warning"))
        for node, folder in deletion.kept:
            lines.append(pair("kept", f"{folder}{f' on {node}' if node else ''}, which is not the run's own", width))
    return lines


def confirm_delete(deletions: Sequence[Deletion], width: int) -> Confirm:
    """The space that is freed on each machine, and that nothing brings it back."""
    what = deletions[0].run if len(deletions) == 1 else plural(len(deletions), "run")
    freed = size(sum(deletion.freed for deletion in deletions))
    recover = "nothing brings it back, neither checkpoints nor weights nor logs"
    lines = [pair("frees", freed, width, style="bold"), pair("recover", recover, width), Content("")]
    return Confirm(f"delete {what}?", [*lines, *deletion_rows(deletions, width)], "Delete", dangerous=True)


def confirm_incomplete(deletions: Sequence[Deletion], width: int) -> Confirm:
    """The folders on nodes that could not be cleaned up."""
    nodes = ", ".join(dict.fromkeys(node for deletion in deletions for node in deletion.problems))
    texts = {
        "now": f"nothing is deleted here: what is on {nodes} would be forgotten",
        "later": "ctrl+k again, once they answer",
        "or": "delete it here, and remove those folders by hand",
    }
    lines = [pair(label, text, width) for label, text in texts.items()]
    rows = deletion_rows(deletions, width)
    return Confirm("not all was deleted", [*lines, Content(""), *rows], "Delete it here", dangerous=True)


class Welcome(Dialog):
    """Answers "setup", "demo" or "quit"."""

    # "d" and "i" are in the key bar below.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "dismiss('setup')", show=False),
        Binding("q", "dismiss('quit')", show=False),
        Binding("d", "dismiss('demo')", show=False),
    ]

    def __init__(self) -> None:
        lines = [
            Content("There is no flightdeck.toml in this directory."),
            Content(""),
            Content.assemble(("Set-up ", "bold"), "asks for your machines, a model and data, with what is found"),
            Content("and what fits; then all is checked, and what is amiss is fixed from here."),
            Content(""),
            Content.assemble(("The demo ", "bold"), "really trains a tiny model on two local ranks, in a minute;"),
            Content("it needs no network, GPU or SSH server."),
            Content(""),
            Content.styled("In a shell, `flightdeck init` does the same as set-up.", MUTED),
        ]
        super().__init__(
            "MLX Flight Deck",
            lines,
            button("Set up (i)", "setup", "success"),
            button("Run the demo (d)", "demo"),
            button("Look around", "close"),
            button("Quit (q)", "quit"),
        )
