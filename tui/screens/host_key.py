"""A node's host key: one that nobody has accepted yet is compared and accepted here; a changed one only explained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from textual.content import Content
from textual.widgets import Button

from tui.screens.dialog import Dialog
from tui.widgets.pairs import pair

if TYPE_CHECKING:
    from engine.models import HostKeyChange, HostKeyOffer

COMPARE = "ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub"
"""Prints a node's own fingerprint, on the node itself."""


class UnknownKey(Dialog[bool]):
    """Answers True when the person accepts the key; the focus is on Cancel."""

    def __init__(self, node: str, offer: HostKeyOffer, width: int) -> None:
        lines = [
            pair("node", f"{node} ({offer.target})", width, style="bold"),
            pair("it shows", offer.fingerprint, width, style="bold"),
            pair("compare with", compare(offer.key), width),
            pair("", f"typed on {node} itself, at its own keyboard", width),
            pair("effect", "the key goes into Flight Deck's known_hosts, and the node is probed", width),
            pair("if it differs", "another machine answers in its place: cancel", width),
        ]
        super().__init__(f"accept the host key of {node}?", lines)

    def buttons(self) -> Sequence[Button]:
        return [
            Button("Cancel", id="cancel", compact=True),
            Button("They are the same, accept it", id="go", compact=True, variant="success"),
        ]

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "go")


class ChangedKey(Dialog[None]):
    """Says what has changed and how a person, who knows why, removes the old key by hand."""

    def __init__(self, node: str, change: HostKeyChange, home: Path, width: int) -> None:
        lines = [
            pair("node", f"{node} ({change.target})", width, style="bold"),
            pair("accepted is", change.accepted, width),
            pair("it shows", change.found, width, style="bold $error"),
            Content(""),
            pair("", "Flight Deck does not connect to it, and never accepts a changed key.", width),
            pair("find out why", "it was installed anew, or another machine answers in its place", width),
            pair("then by hand", forget(change.target, home), width),
            pair("", "(and without -f, where ssh itself knows the old key); then r probes and asks anew", width),
        ]
        super().__init__(f"the host key of {node} has changed", lines)

    def buttons(self) -> Sequence[Button]:
        return [Button("Close", id="close", compact=True)]

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(None)


def compare(key: str) -> str:
    """The command that prints the fingerprint of a key of this kind on its own machine."""
    kind = key.split(" ", 1)[0].removeprefix("ssh-").split("-", 1)[0]
    return COMPARE.format(kind=kind if kind in ("ed25519", "rsa", "dsa", "ecdsa") else "ed25519")


def forget(target: str, home: Path) -> str:
    """The command that removes the accepted key of `[user@]host[:port]`."""
    host, _, port = target.rpartition("@")[2].partition(":")
    name = f"'[{host}]:{port}'" if port else host
    return f"ssh-keygen -R {name} -f {home / 'known_hosts'}"
