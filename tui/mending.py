"""What `x` would do about what is selected: run the fix commands of a failed check, or look at a node's host key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tui.state import DeckState

if TYPE_CHECKING:
    from engine.models import CheckResult, NodeFacts

_OURS: Final = "flightdeck "
"""A fix that begins so is for this machine: the console does it itself, or a person does."""


@dataclass(frozen=True)
class Fix:
    """Commands that mend something, by the node that each is for."""

    check: str
    commands: dict[str, str]


@dataclass(frozen=True)
class Key:
    """A host key to look at: `facts.host_key` or `facts.changed_key`."""

    facts: NodeFacts


def mending(state: DeckState) -> Fix | Key | str:
    """What can be done about the selected node or check; else why nothing can, in a few words."""
    if state.config is None:
        return "there is no configuration"
    return _of_check(state) if state.pane == "preflight" else _of_node(state)


def _of_node(state: DeckState) -> Fix | Key | str:
    facts = state.selected_facts
    if state.node is None or facts is None:
        return "the node has not been probed"
    if facts.host_key is not None or facts.changed_key is not None:
        return Key(facts)
    if facts.problem:
        return f"no command mends this{f': {facts.fix}' if facts.fix else ''}"
    for check in state.shown_checks:
        command = _commands(check).get(state.node)
        if command is not None:
            return Fix(check.name, {state.node: command})
    return f"nothing is known to be wrong with {state.node} that a command mends"


def _of_check(state: DeckState) -> Fix | Key | str:
    check = state.selected_check
    if check is None:
        return "no check is selected"
    if check.status not in ("fail", "warn"):
        return f"{check.name} has nothing to mend"
    commands = _commands(check)
    if commands:
        return Fix(check.name, commands)
    keys = [node for node, command in check.fixes.items() if command.startswith(_OURS)]
    shown = (state.facts.get(node) for node in keys)
    offer = next((facts for facts in shown if facts is not None and facts.host_key is not None), None)
    if offer is not None:
        return Key(offer)
    return "a person must do this; y copies the command" if check.fix_command else "no command mends this"


def _commands(check: CheckResult) -> dict[str, str]:
    if check.status not in ("fail", "warn"):
        return {}
    return {node: command for node, command in check.fixes.items() if not command.startswith(_OURS)}
