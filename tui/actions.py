"""The one table of what a person can do: it makes the bindings, the key bar, the help screen, the palette, the hints on
the panes' borders, and the README's key table (`python -m tui.actions`).

A key may belong to several actions (`n` is the next match while a search is on, else launch): the first one in the
table that applies to the state takes it. An action that applies but cannot be done now says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tui.mending import Key, mending
from tui.state import VIEWS, DeckState

Why = Callable[[DeckState], str | None]
"""Says in a few words why an action cannot be done now; None when it can."""


def _always(state: DeckState) -> str | None:
    return None


def _launch(state: DeckState) -> str | None:
    if not state.ready:
        return "the engine is still loading"
    if state.busy:
        return f"{state.busy} is under way"
    if state.config is None:
        return state.fault or "there is no configuration: no flightdeck.toml here"
    if state.running is not None:
        return f"{state.running.id} has not ended: ctrl+x aborts it"
    if failures := state.failures():
        return f"preflight has {failures} failure{'s' if failures > 1 else ''}: r checks again"
    return None


def _abort(state: DeckState) -> str | None:
    if state.snapshot is None:
        return "no run is shown"
    if not state.active:
        return f"{state.snapshot.record.id} has ended"
    return None


def _recheck(state: DeckState) -> str | None:
    if not state.ready:
        return "the engine is still loading"
    if state.config is None:
        return "there is no configuration to check"
    if state.pane == "preflight" and state.running is not None:
        return f"{state.running.id} uses the ranks and ports now; its own checks are shown"
    if state.busy:
        return f"{state.busy} is under way"
    return None


def _calibrate(state: DeckState) -> str | None:
    if state.calibrating is not None:
        return None
    if not state.ready:
        return "the engine is still loading"
    if state.config is None:
        return "there is no configuration to measure"
    if state.running is not None:
        return f"{state.running.id} uses the nodes now: wait for its end"
    if state.busy:
        return f"{state.busy} is under way"
    return None


def _log(state: DeckState) -> str | None:
    return None if state.has_log else "no log yet: no run is shown"


def _plot(state: DeckState) -> str | None:
    if state.snapshot is None or not (state.snapshot.series.train or state.snapshot.series.val):
        return "no loss yet"
    return None


def _enter(state: DeckState) -> str | None:
    return None


def _mend(state: DeckState) -> str | None:
    if not state.ready:
        return "the engine is still loading"
    found = mending(state)
    return found if isinstance(found, str) else None


def _shell(state: DeckState) -> str | None:
    if not state.ready:
        return "the engine is still loading"
    if state.config is None or state.node is None:
        return "there is no configuration that says how the node is reached"
    facts = state.selected_facts
    if facts is not None and (facts.host_key or facts.changed_key):
        return "its host key has to be accepted first" if facts.host_key else "its host key has changed"
    return None


def _demo(state: DeckState) -> str | None:
    if not state.ready:
        return "the engine is still loading"
    if state.config is not None:
        return "there is a configuration: n launches it"
    if state.busy:
        return f"{state.busy} is under way"
    if state.running is not None:
        return f"{state.running.id} has not ended: ctrl+x aborts it"
    return None


@dataclass(frozen=True)
class Action:
    """One thing a person can do."""

    id: str
    keys: tuple[str, ...]
    """Textual's key names."""
    label: str
    """A word or two, for the key bar."""
    help: str
    """One line, for the help screen, the palette and the README."""
    group: str
    views: tuple[str, ...] = VIEWS
    panes: tuple[str, ...] | None = None
    """Panes in which it works; None is all."""
    dangerous: bool = False
    """Ends or overwrites something; never on a bare letter, always asked again."""
    why_not: Why = _always
    when: Callable[[DeckState], bool] = lambda state: True
    """Beyond views and panes: whether the key means this at all now."""
    palette: bool = True

    def applies(self, state: DeckState) -> bool:
        in_pane = self.panes is None or state.pane in self.panes
        return state.view in self.views and in_pane and self.when(state)

    @property
    def shown_key(self) -> str:
        return shown_key(self.keys[0])


_SHOWN: Final = {
    "question_mark": "?",
    "colon": ":",
    "slash": "/",
    "ampersand": "&",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "escape": "esc",
}


def shown_key(key: str) -> str:
    """A Textual key name as people write it."""
    return _SHOWN.get(key, key)


LOG_VIEWS: Final = ("dashboard", "run")

ACTIONS: Final[tuple[Action, ...]] = (
    Action("next_match", ("n",), "next", "Next match of the search", "logs", LOG_VIEWS, why_not=_log,
           when=lambda state: state.searching and state.pane == "logs", palette=False),
    Action("launch", ("n",), "launch", "Launch the plan, after a confirmation", "run", why_not=_launch),
    Action("abort", ("ctrl+x",), "abort", "Abort the shown run, after a confirmation", "run", dangerous=True,
           why_not=_abort),
    Action("recheck", ("r",), "re-check", "Run the preflight checks again (in preflight), else probe the nodes", "run",
           why_not=_recheck),
    Action("demo", ("d",), "demo", "Run the demo, where there is no configuration", "run", why_not=_demo,
           when=lambda state: state.ready and state.config is None),
    Action("calibrate", ("c",), "calibrate", "Measure every node and link, or stop measuring", "nodes",
           panes=("calibration",), why_not=_calibrate),
    Action("calibrate_quick", ("C",), "quick", "Measure every node and link, 10 s a node", "nodes",
           panes=("calibration",), why_not=_calibrate, when=lambda state: state.calibrating is None),
    Action("mend", ("x",), "mend", "Mend what is selected: run the fix on its node, or compare a host key; asks first",
           "nodes", panes=("nodes", "preflight"), why_not=_mend),
    Action("shell", ("s",), "shell", "Open a shell on the selected node; the console waits for its end", "nodes",
           panes=("nodes",), why_not=_shell),
    Action("view_nodes", ("1",), "nodes", "Nodes, full screen", "views"),
    Action("view_preflight", ("2",), "preflight", "Preflight, full screen", "views"),
    Action("view_calibration", ("3",), "calibration", "Calibration and shares, full screen", "views"),
    Action("view_run", ("4",), "run", "The run: loss, ranks and logs, full screen", "views"),
    Action("view_history", ("5",), "history", "Every run; enter opens one", "views"),
    Action("next_pane", ("tab",), "pane", "Next pane (next tab on a small terminal)", "move", palette=False),
    Action("previous_pane", ("shift+tab",), "pane back", "Previous pane", "move", palette=False),
    Action("down", ("j", "down"), "down", "Move down", "move", palette=False),
    Action("up", ("k", "up"), "up", "Move up", "move", palette=False),
    Action("left", ("h", "left"), "left", "Move left: along a line in a log, else to the pane before", "move",
           palette=False),
    Action("right", ("l", "right"), "right", "Move right: along a line in a log, else to the next pane", "move",
           palette=False),
    Action("page_down", ("pagedown", "ctrl+d"), "page down", "A page down", "move", palette=False),
    Action("page_up", ("pageup", "ctrl+u"), "page up", "A page up", "move", palette=False),
    Action("top", ("g", "home"), "top", "To the top", "move", palette=False),
    Action("bottom", ("G", "end"), "bottom", "To the bottom", "move", palette=False),
    Action("enter", ("enter",), "open",
           "Open what is selected; on a failed run, jump to the line that proves it", "move", why_not=_enter,
           palette=False),
    Action("back", ("escape",), "back", "One step back; never quits", "move", palette=False),
    Action("search", ("slash",), "search", "Search the log", "logs", LOG_VIEWS, why_not=_log),
    Action("previous_match", ("N",), "previous", "Previous match of the search (n: next)", "logs", LOG_VIEWS,
           why_not=_log, palette=False),
    Action("filter", ("ampersand",), "filter", "Show only the lines that match; a leading ! inverts", "logs",
           LOG_VIEWS, why_not=_log),
    Action("follow", ("f",), "follow", "Follow the log's end (TAIL), or stop following", "logs", LOG_VIEWS,
           why_not=_log),
    Action("next_error", ("e",), "error", "Next error in the log", "logs", LOG_VIEWS, why_not=_log),
    Action("previous_error", ("E",), "error back", "Previous error in the log", "logs", LOG_VIEWS, why_not=_log),
    Action("previous_rank", ("left_square_bracket",), "rank", "Log of the rank before", "logs", LOG_VIEWS,
           why_not=_log),
    Action("next_rank", ("right_square_bracket",), "rank", "Log of the next rank", "logs", LOG_VIEWS, why_not=_log),
    Action("all_ranks", ("a",), "all ranks", "Log of all ranks, merged", "logs", LOG_VIEWS, why_not=_log),
    Action("wrap", ("w",), "wrap", "Wrap long lines", "logs", LOG_VIEWS, why_not=_log),
    Action("timestamps", ("t",), "timestamps", "Show when each line arrived", "logs", LOG_VIEWS, why_not=_log),
    Action("log_axis", ("L",), "log axis", "Logarithmic loss axis", "display", LOG_VIEWS, why_not=_plot),
    Action("maximise", ("z",), "maximise", "Give the pane the whole screen, and back", "display"),
    Action("freeze", ("space",), "freeze", "Hold the display still; data keeps arriving", "display"),
    Action("copy", ("y",), "copy", "Copy what is selected (clipboard, and always a file)", "display"),
    Action("save", ("ctrl+s",), "save pane", "Save the pane's text to a file", "display"),
    Action("help", ("question_mark",), "help", "This help", "console"),
    Action("palette", ("ctrl+p", "colon"), "commands", "Find any command by name", "console", palette=False),
    Action("quit", ("q",), "quit", "Quit the console, never the run", "console"),
)  # fmt: skip

BY_ID: Final = {action.id: action for action in ACTIONS}

GROUPS: Final = {
    "run": "Run",
    "nodes": "Nodes",
    "views": "Views",
    "move": "Move",
    "logs": "Logs",
    "display": "Display",
    "console": "Console",
}

_BAR: Final[dict[str, tuple[str, ...]]] = {
    "dashboard": ("demo", "launch", "abort", "recheck", "help", "palette", "quit"),
    "nodes": ("recheck", "mend", "shell", "copy", "back", "launch", "help", "quit"),
    "preflight": ("recheck", "mend", "copy", "back", "launch", "help", "quit"),
    "calibration": ("calibrate", "calibrate_quick", "copy", "back", "launch", "help", "quit"),
    "run": ("abort", "search", "follow", "log_axis", "back", "help", "quit"),
    "history": ("enter", "copy", "back", "launch", "help", "quit"),
}
_PLAN_BAR: Final = ("launch", "recheck", "maximise", "copy", "back", "help", "quit")
"""Of the run's view while it shows the plan."""
_LOG_BAR: Final = ("search", "filter", "follow", "next_error", "all_ranks", "back", "help", "quit")


def keys() -> Iterator[str]:
    """Every key that means something, once."""
    return iter(dict.fromkeys(key for action in ACTIONS for key in action.keys))


def action_for(key: str, state: DeckState) -> Action | None:
    """What `key` means now, whether or not it can be done."""
    return next((action for action in ACTIONS if key in action.keys and action.applies(state)), None)


def bar(state: DeckState) -> list[Action]:
    """The key bar's actions here and now, in order."""
    order: Iterable[str] = _LOG_BAR if state.pane == "logs" and state.view in LOG_VIEWS else _BAR[state.view]
    if state.pane == "logs" and state.searching and state.view in LOG_VIEWS:
        # Room for help and quit at 80 columns: what narrows a search further can wait for its end.
        order = ("next_match", "previous_match", *(name for name in order if name not in ("filter", "all_ranks")))
    elif state.view == "run" and state.pane != "logs" and state.snapshot is None:
        order = _PLAN_BAR
    elif state.view == "run" and state.pane != "logs" and not state.active:
        order = ("launch" if name == "abort" else name for name in order)
    elif state.view == "dashboard" and state.snapshot is not None and not state.active:
        # The plan of the next launch is behind a run that has ended.
        order = [other for name in order for other in (("back", name) if name == "help" else (name,))]
    return [BY_ID[name] for name in order if BY_ID[name].applies(state)]


def label(action: Action, state: DeckState, *, short: bool = False) -> str:
    """The key bar's words, which may depend on the state."""
    if action.id == "quit" and state.running is not None and not short:
        return "quit (the run goes on)"
    if action.id == "back" and state.view == "dashboard":
        return "plan"
    if action.id == "recheck":
        return "re-check" if state.pane == "preflight" else "probe"
    if action.id == "mend":
        return "host key" if isinstance(mending(state), Key) else "run the fix"
    if action.id == "calibrate" and state.calibrating is not None:
        return "stop measuring"
    if action.id == "freeze" and state.frozen:
        return "thaw"
    return action.label


def hint(state: DeckState, separator: str, *names: str) -> str:
    """A pane border's hint: those of the named actions that can be done now."""
    named = [BY_ID[name] for name in names]
    possible = [action for action in named if action.applies(state) and action.why_not(state) is None]
    return separator.join(f"{action.shown_key} {label(action, state)}" for action in possible)


def markdown() -> str:
    """The README's key table."""
    rows = ["| key | what it does |", "|---|---|"]
    for group in GROUPS:
        for action in ACTIONS:
            if action.group == group:
                shown = " ".join(f"`{shown_key(key)}`" for key in action.keys)
                rows.append(f"| {shown} | {action.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
