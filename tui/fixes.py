"""The fix for the selected node or check: commands, a host key to accept, or cables to set up."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Final

from engine import api
from tui.state import DeckState

if TYPE_CHECKING:
    from engine.models import NodeFacts

_OURS: Final = "flightdeck "
"""A fix that begins so runs on this machine: the console does it itself, or a person does."""
_PUSH: Final = f"{_OURS}models push "
HERE: Final = "this machine"
_FIXED: Final = ("fail", "warn")


@dataclass(frozen=True)
class CheckFix:
    """Fix commands of a check, and what they change, by node."""

    check: str
    commands: dict[str, str]
    effects: dict[str, str]


@dataclass(frozen=True)
class HostKeyFix:
    """A host key to compare: `facts.host_key` or `facts.changed_key`."""

    facts: NodeFacts


@dataclass(frozen=True)
class CableSetup:
    """`Topology.setup`: commands by node, which need a terminal for their password."""

    commands: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class CopyFix:
    """A model or data set that the nodes lack, by its name."""

    name: str


@dataclass
class FixCommand:
    """One fix command on one node, running or ended; `output` has a plain string for each line."""

    node: str
    line: str
    started: datetime
    output: tuple[str, ...] = ()
    code: int | None = None
    problem: str | None = None
    """Why it has no exit code."""
    ended: bool = False

    @property
    def succeeded(self) -> bool:
        return self.ended and self.code == 0

    @property
    def outcome(self) -> str:
        return self.problem or ("succeeded" if self.code == 0 else f"exit {self.code}")


def fix_for(state: DeckState) -> CheckFix | HostKeyFix | CableSetup | CopyFix | str:
    """The fix for the selected node or check; else why there is none, in a few words."""
    if state.config is None:
        return "there is no configuration"
    if state.pane != "preflight":
        return _node_fix(state)
    check = state.selected_check
    if check is not None and check.status in _FIXED and (check.fix_command or "").startswith(_PUSH):
        return CopyFix(shlex.split(check.fix_command or "")[3])
    return _check_fix(state)


def pasted(state: DeckState, node: str, command: str) -> str:
    """A command of a node as a line for this machine's shell: by ssh, where the configuration has another machine."""
    line = api.as_shell_line(state.config, {node: command}) if state.config is not None else None
    return line or command


def _node_fix(state: DeckState) -> CheckFix | HostKeyFix | CableSetup | str:
    facts = state.selected_facts
    if state.node is None or facts is None:
        return "the node has not been probed"
    if facts.host_key is not None or facts.changed_key is not None:
        return HostKeyFix(facts)
    if facts.problem:
        return f"no command fixes this{f': {facts.fix}' if facts.fix else ''}"
    for check in state.shown_checks:
        command = check.fixes.get(state.node, _OURS) if check.status in _FIXED else _OURS
        if not command.startswith(_OURS) or command.startswith(api.MAKE_ENVIRONMENT):
            node, effects = (HERE if command.startswith(_OURS) else state.node), check.effects
            if (effect := effects.get(state.node)) is not None:
                effects = {node: effect}
            return CheckFix(api.check_label(check.name), {node: command}, effects)
    if state.topology is not None and state.node in state.topology.setup:
        return CableSetup(state.topology.setup)
    return f"no known problem on {state.node} has a fix command"


def _check_fix(state: DeckState) -> CheckFix | HostKeyFix | str:
    check = state.selected_check
    if check is None:
        return "no check is selected"
    if check.status not in _FIXED:
        return f"{api.check_label(check.name)} has nothing to fix"
    assert state.config is not None
    commands = {node: command for node, command in check.fixes.items() if not command.startswith(_OURS)}
    line = check.fix_command or ""
    if commands and line in ("", api.as_shell_line(state.config, check.fixes)):
        return CheckFix(api.check_label(check.name), commands, check.effects)
    if line and (line.startswith(api.MAKE_ENVIRONMENT) or not line.startswith(_OURS)):
        # More than what the nodes can do alone, such as a copy from one to another.
        return CheckFix(api.check_label(check.name), {HERE: line}, {HERE: check.fix_effect} if check.fix_effect else {})
    keys = [node for node, command in check.fixes.items() if command.startswith(_OURS)]
    shown = (state.facts.get(node) for node in keys)
    offer = next((facts for facts in shown if facts is not None and facts.host_key is not None), None)
    if offer is not None:
        return HostKeyFix(offer)
    return f"in a shell here: {check.fix_command} (y copies it)" if check.fix_command else "no command fixes this"
