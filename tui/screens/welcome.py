"""What is shown when there is no flightdeck.toml: the demo, what writes a configuration, and the shortest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from textual.content import Content
from textual.widgets import Button

from tui.glyphs import MUTED
from tui.screens.dialog import Dialog

EXAMPLE: Final = """\
[[node]]
name = "local-0"

[[node]]
name = "local-1"

[job]
model = "~/models/Qwen3-0.6B"
data = "~/data/support"
iters = 200"""


class Welcome(Dialog[str]):
    """Answers "demo", "look" or "quit"."""

    def __init__(self) -> None:
        lines = [
            Content("There is no flightdeck.toml in this directory."),
            Content(""),
            Content.assemble(("The demo ", "bold"), "really trains a tiny model on two local ranks, in a minute;"),
            Content("it needs no network, GPU or SSH server."),
            Content(""),
            Content.assemble(("Your own Macs: ", "bold"), "leave this (Quit) and type one of"),
            Content.styled("  flightdeck init ana@ultra.local bea@max.local", "bold"),
            Content.styled("  flightdeck init      lists what ~/.ssh/config and Bonjour know", MUTED),
            Content("it writes a flightdeck.toml. One for this machine alone is as short as:"),
            Content(""),
            *[Content.styled("  " + line, MUTED) for line in EXAMPLE.splitlines()],
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
