"""What is shown when there is no flightdeck.toml: what this is, the demo, and the commands that write one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from textual.content import Content
from textual.widgets import Button

from tui.glyphs import MUTED
from tui.screens.dialog import Dialog

_INIT: Final = (
    ("flightdeck init ana@ultra.local bea@max.local", "these machines"),
    ("flightdeck init", "lists what ~/.ssh/config and Bonjour know"),
    ("flightdeck init 127.0.0.1", "this machine alone"),
)


class Welcome(Dialog[str]):
    """Answers "demo", "look" or "quit"."""

    def __init__(self) -> None:
        lines = [
            Content("There is no flightdeck.toml in this directory."),
            Content(""),
            Content.assemble(("The demo ", "bold"), "really trains a tiny model on two local ranks, in a minute;"),
            Content("it needs no network, GPU or SSH server."),
            Content(""),
            Content.assemble(("Your own machines ", "bold"), "need a flightdeck.toml. Quit, and let one be written:"),
            Content(""),
            *[
                line
                for command, what in _INIT
                for line in (Content.styled(f"  {command}", "bold"), Content.styled(f"      {what}", MUTED))
            ],
            Content(""),
            Content("It asks each for a python with MLX, and says what comes next."),
        ]
        super().__init__("MLX Flight Deck", lines)

    def buttons(self) -> Sequence[Button]:
        return [
            Button("Look around", id="look", compact=True),
            Button("Run the demo", id="demo", compact=True, variant="success"),
            Button("Quit", id="quit", compact=True),
        ]

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id)
