"""The dialogs of the fix action: comparing and accepting a node's host key, and running fix commands on nodes with
their output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Button, Input

from engine import api
from tui.fixes import CheckFix, FixCommand
from tui.formatting import duration
from tui.glyphs import FAIL, MUTED, OK, RUNNING
from tui.screens.dialog import Confirm, Dialog, button
from tui.state import DeckState
from tui.widgets.text import folded, pair

if TYPE_CHECKING:
    from engine.models import CheckResult, HostKeyChange, HostKeyOffer


COMPARE = "ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub"
"""Run on the node itself, prints its fingerprint."""


class UnknownKey(Confirm):
    """Answers "go" when the person accepts the key."""

    def __init__(self, node: str, offer: HostKeyOffer, width: int) -> None:
        lines = [
            pair("node", f"{node} ({offer.target})", width, style="bold"),
            pair("it shows", offer.fingerprint, width, style="bold"),
            pair("compare with", compare_command(offer.key), width),
            pair("", f"typed on {node} itself, at its own keyboard", width),
            pair("effect", "the key goes into Flight Deck's known_hosts, and the node is probed", width),
            pair("if it differs", "another machine answers in its place: cancel", width),
        ]
        super().__init__(f"accept the host key of {node}?", lines, "They are the same, accept it")


class ChangedKey(Dialog):
    """Shows the change, and how a person who knows its reason removes the old key by hand."""

    def __init__(self, node: str, change: HostKeyChange, home: Path, width: int) -> None:
        lines = [
            pair("node", f"{node} ({change.target})", width, style="bold"),
            pair("accepted is", change.accepted, width),
            pair("it shows", change.found, width, style="bold $error"),
            Content(""),
            pair("", "Flight Deck does not connect to it, and never accepts a changed key.", width),
            pair("find out why", "it was installed again, or another machine answers in its place", width),
            pair("then by hand", forget_command(change.target, home), width),
            pair("", "(and without -f, where ssh itself knows the old key); then r probes again and asks", width),
        ]
        super().__init__(f"the host key of {node} has changed", lines, button("Close", "close"))


def compare_command(key: str) -> str:
    """The command that prints the fingerprint of a key of this kind on its own machine."""
    kind = key.split(" ", 1)[0].removeprefix("ssh-").split("-", 1)[0]
    return COMPARE.format(kind=kind if kind in ("ed25519", "rsa", "dsa", "ecdsa") else "ed25519")


def forget_command(target: str, home: Path) -> str:
    """The command that removes the accepted key of `[user@]host[:port]`."""
    host, _, port = target.rpartition("@")[2].partition(":")
    name = f"'[{host}]:{port}'" if port else host
    return f"ssh-keygen -R {name} -f {home / 'known_hosts'}"


SHOWN_LINES: Final = 200
"""The last lines of a command's output; the saved file has all of them."""


class ConfirmFix(Confirm):
    """Long commands are folded until a key shows them whole."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("o", "unfold", show=False)]

    def __init__(self, title: str, lines: Sequence[Content], whole: Sequence[Content]) -> None:
        super().__init__(title, lines, "Run it", dangerous=True)
        self._whole = whole

    def action_unfold(self) -> None:
        self.set_body(self._whole)


def confirm_fix(fix: CheckFix, hosts: dict[str, str], width: int, *, asks: bool) -> ConfirmFix:
    """The commands, their nodes and what they change; the focus is on Cancel. `asks`: for the password of sudo."""
    lines, whole = (_fix_lines(fix, hosts, width, asks=asks, fold=fold) for fold in (True, False))
    if lines != whole:
        lines.append(pair("", "o shows the whole command", width, style=MUTED))
    return ConfirmFix(f"run the fix on {', '.join(fix.commands)}?", lines, whole)


def _fix_lines(fix: CheckFix, hosts: dict[str, str], width: int, *, asks: bool, fold: bool) -> list[Content]:
    lines = []
    for node, command in fix.commands.items():
        text = folded(command, width) if fold else command
        host = hosts.get(node, node)
        lines.append(pair(f"on {node}"[:13], text + (f"\n({host})" if host != node else ""), width))
        # A report of an earlier release has none.
        lines.append(pair("effect", fix.effects.get(node, "not recorded: read the command"), width))
    lines += [
        pair("fixes", fix.check, width),
        pair("runs", "once, as its user, in a login shell", width),
        *([pair("asks for", "the password of sudo, in this terminal", width)] if asks else []),
        pair("then", "its output and exit code are shown, and the check can be run again", width),
    ]
    return lines


def confirm_setup(commands: Mapping[str, Sequence[str]], width: int) -> Confirm:
    """The commands that give each Thunderbolt cable a network of its own; the focus is on Cancel."""
    lines = [pair(f"on {node}"[:13], "\n".join(lines), width) for node, lines in commands.items()]
    effect = "takes the Thunderbolt bridge down, and gives each cable a network of its own; a restart takes it back"
    lines += [
        pair("effect", effect, width),
        pair("asks for", "the password of sudo, on each Mac in turn, in this terminal", width),
        pair("then", "the nodes are probed again", width),
    ]
    return Confirm(f"set up the cables of {', '.join(commands)}?", lines, "Set up", dangerous=True)


class SkipCheck(Dialog):
    """Answers the reason, which is not empty."""

    FOCUS = "Input"

    def __init__(self, check: CheckResult, width: int) -> None:
        lines = [
            pair("check", f"{api.check_label(check.name)}: {check.summary}", width),
            pair("effect", "the next launch goes on although it fails; the audit log keeps the reason", width),
            pair("take back", "s again, or r: it is checked again", width),
            Content(""),
            Content("why?"),
        ]
        super().__init__(f"skip {api.check_label(check.name)} at the next launch?", lines, button("Cancel", "cancel"))

    def compose_body(self) -> ComposeResult:
        yield from super().compose_body()
        yield Input(placeholder="a reason; enter skips it", compact=True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if reason := event.value.strip():
            self.dismiss(reason)


class FixDialog(Dialog):
    """Answers "again" to check again. Leaving it while something runs does not end that."""

    def __init__(self, commands: Sequence[FixCommand], state: DeckState, width: int, again: str) -> None:
        self._commands = list(commands)
        self._width = width
        self._again = button(again, "again", "success")
        self._again.disabled = True
        super().__init__("fix", self._output_lines(state), button("Close, it goes on", "close"), self._again)
        self._opened = state

    def on_mount(self) -> None:
        # All may have ended in the terminal.
        self.call_after_refresh(self.show, self._opened)

    def show(self, state: DeckState) -> None:
        """Redraw; called while the dialog is open."""
        self.set_body(self._output_lines(state))
        if all(command.ended for command in self._commands) and self._again.disabled:
            self.query_one("#close", Button).label = "Close"
            self._again.disabled = False
            self._again.focus()

    def _output_lines(self, state: DeckState) -> list[Content]:
        lines: list[Content] = []
        for command in self._commands:
            if not command.ended:
                mark = state.glyphs.state(RUNNING, f"running {duration(state.age_s(command.started))}")
            else:
                mark = state.glyphs.state(OK if command.succeeded else FAIL, command.outcome)
            lines.append(Content.assemble((command.node, "bold"), "  ", mark))
            lines.append(pair("command", folded(command.line, self._width), self._width))
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
