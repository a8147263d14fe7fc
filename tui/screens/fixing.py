"""Fix commands running on nodes: what runs where, what each has printed, how it ended; then to check again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from textual.content import Content
from textual.widgets import Button

from tui.formatting import duration
from tui.glyphs import FAIL, MUTED, OK, RUNNING
from tui.screens.confirm import Confirm
from tui.screens.dialog import Dialog
from tui.state import DeckState
from tui.widgets.pairs import pair

SHOWN_LINES: Final = 200
"""Of a command's output, its last ones; all of it is in the file."""


@dataclass
class Command:
    """One command on one node; `output` is plain, a line a string."""

    node: str
    line: str
    started: datetime
    output: tuple[str, ...] = ()
    code: int | None = None
    problem: str | None = None
    """Why it has no exit code."""
    ended: bool = False

    @property
    def good(self) -> bool:
        return self.ended and self.code == 0

    @property
    def told(self) -> str:
        """How it ended, in words."""
        return self.problem or ("succeeded" if self.code == 0 else f"exit {self.code}")


def ask(check: str, commands: dict[str, str], hosts: dict[str, str], width: int) -> Confirm:
    """What would run where; the focus is on Cancel."""
    lines = [
        pair(f"on {node}"[:13], f"{command}\n({hosts.get(node, node)})", width) for node, command in commands.items()
    ]
    lines += [
        pair("mends", check, width),
        pair("effect", "runs once, as the node's user, in a login shell; it cannot be taken back", width),
        pair("then", "its output and exit code are shown, and the check can be run again", width),
    ]
    return Confirm(f"run the fix on {', '.join(commands)}?", lines, "Run it", dangerous=True)


class Fixing(Dialog[str]):
    """Answers "again" to check again. Leaving it while something runs does not end that."""

    def __init__(self, commands: Sequence[Command], state: DeckState, width: int, again: str) -> None:
        self._commands = list(commands)
        self._width = width
        self._again = again
        super().__init__("fix", self._told(state))

    def buttons(self) -> Sequence[Button]:
        return [
            Button("Close, it goes on", id="close", compact=True),
            Button(self._again, id="again", compact=True, variant="success", disabled=True),
        ]

    def show(self, state: DeckState) -> None:
        """Take what the commands have come to; called while the dialog is open."""
        self.say(self._told(state))
        again = self.query_one("#again", Button)
        if all(command.ended for command in self._commands) and again.disabled:
            self.query_one("#close", Button).label = "Close"
            again.disabled = False
            again.focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id)

    def _told(self, state: DeckState) -> list[Content]:
        lines: list[Content] = []
        for command in self._commands:
            if not command.ended:
                mark = state.glyphs.state(RUNNING, f"running {duration(state.age_s(command.started))}")
            else:
                mark = state.glyphs.state(OK if command.good else FAIL, command.told)
            lines.append(Content.assemble((command.node, "bold"), "  ", mark))
            lines.append(pair("command", command.line, self._width))
            hidden = len(command.output) - SHOWN_LINES
            if hidden > 0:
                lines.append(pair("output", f"{hidden} lines before these are in the file", self._width, style=MUTED))
            shown = command.output[-SHOWN_LINES:]
            lines += [pair("output" if not number and hidden <= 0 else "", line, self._width)
                      for number, line in enumerate(shown)]  # fmt: skip
            if command.ended and not command.output:
                lines.append(pair("output", "none", self._width, style=MUTED))
            lines.append(Content(""))
        return lines[:-1]
