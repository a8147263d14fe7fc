"""The table of actions: the source of the key bindings, the key bar, the help screen, the command palette, the hints
on the panes' borders, and docs/keys.md (`python -m tui.actions`).

A key may belong to several actions (`n` is the next match during a search, otherwise launch): the first one in the
table that applies to the state takes it. An action that applies but is disabled gives its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine import api
from engine.errors import plural
from tui.fixes import CableSetup, CopyFix, HostKeyFix, fix_for
from tui.state import VIEWS, DeckState

if TYPE_CHECKING:
    from engine.api import QueueItem

Why = Callable[[DeckState], str | None]
"""Returns in a few words why an action cannot be done now; None when it can."""


def _first(*conditions: Why) -> Why:
    """The first reason that one of them has."""
    return lambda state: next((why for condition in conditions if (why := condition(state)) is not None), None)


def _loading(state: DeckState) -> str | None:
    return None if state.ready else "the engine is still loading"


def _busy(state: DeckState) -> str | None:
    return f"{state.busy} is under way" if state.busy else None


def _nothing_to(what: str) -> Why:
    return lambda state: f"there is no configuration to {what}" if state.config is None else None


def _running(why: str) -> Why:
    return lambda state: f"{state.running.id} {why}" if state.running is not None else None


def _not_ended(state: DeckState) -> str | None:
    return (
        f"{state.running.id} has not ended: {state.stop_key(state.running.id)}" if state.running is not None else None
    )


def _nothing_to_launch(state: DeckState) -> str | None:
    if state.config is None:
        return state.fault or "there is no configuration: no flightdeck.toml here"
    return None


def _failures(state: DeckState) -> str | None:
    failures = state.failures()
    return f"preflight has {plural(failures, 'failure')}: r checks again" if failures else None


def _abort(state: DeckState) -> str | None:
    if state.active:
        return None
    if state.running is not None:
        return f"{state.running.id} is not shown: {state.stop_key(state.running.id)}"
    return f"{state.snapshot.record.id} has ended" if state.snapshot is not None else "no run is under way"


def _checked_by_run(state: DeckState) -> str | None:
    if state.pane != "preflight":
        return None
    return _running("uses the ranks and ports now; its own checks are shown")(state)


_measure: Final = _first(_loading, _nothing_to("measure"), _running("uses the nodes now: wait for its end"), _busy)


def _scale(state: DeckState) -> str | None:
    return _measure(state) if state.calibrating is None else None


def _calibrate(state: DeckState) -> str | None:
    if state.calibrating is None and state.config is not None and state.config.job.framework == "torch":
        return "single nodes are measured with MLX: ranks of a PyTorch job have equal shares"
    return _scale(state)


def _log(state: DeckState) -> str | None:
    return None if state.has_log else "no log yet: no run is shown"


def _use(state: DeckState) -> str | None:
    return "no run is shown: 5 lists them" if state.used_run is None else None


def _again(state: DeckState) -> str | None:
    run, shown = state.used_run, state.snapshot.record if state.snapshot is not None else None
    record = shown if shown is not None and shown.id == run else state.listed.by_id.get(run or "")
    if record is None:
        return "no run is shown: 5 lists them"
    return None if record.state.ended else f"{record.id} is {record.state}: {state.stop_key(record.id)}"


def _edit(state: DeckState) -> str | None:
    named = state.config is not None and state.config.file is not None
    return None if named else "there is no file: i writes one"


def _chat(state: DeckState) -> str | None:
    if state.snapshot is None:
        return "no run is shown: 5 lists them"
    if state.snapshot.record.task is not None:
        return None
    if state.active:
        return "the run has not ended"
    trained = state.snapshot.trained
    return trained.unserved if trained is not None else "the run has saved no weights"


def _chart(state: DeckState) -> str | None:
    if state.view == "compare":
        return None
    if state.snapshot is None:
        return "no run is shown: 5 lists them"
    if state.snapshot.record.task is not None:
        return "a task trains nothing"
    return None if state.metrics else "no figures yet"


def _samples(state: DeckState) -> str | None:
    if state.snapshot is None:
        return "no run is shown: 5 lists them"
    return None if state.snapshot.samples else "no answers yet: the job's sample_prompts are answered while it trains"


def _run_selected(state: DeckState) -> str | None:
    return None if state.run is not None else "there is no run here"


def _comparable(state: DeckState) -> bool:
    return len(state.marked) > 1 and not state.detail


def _deletable(state: DeckState) -> str | None:
    chosen = state.marked or ((state.run,) if state.run is not None else ())
    active = next((run.id for run in state.listed.active if run.id in chosen), None)
    return _run_selected(state) or (f"{active} has not ended: {state.stop_key(active)}" if active else None)


def _item(state: DeckState) -> str | None:
    return None if state.queued is not None else "the queue is empty"


def _of_item(state: DeckState) -> QueueItem:
    assert state.queued is not None
    return state.queued


def _not_started(state: DeckState) -> str | None:
    item = _of_item(state)
    return None if item.state in ("waiting", "held") else f"item {item.id} is {item.state}"


def _fix(state: DeckState) -> str | None:
    return fix if isinstance(fix := fix_for(state), str) else None


def _skip(state: DeckState) -> str | None:
    check = state.selected_check
    if check is None:
        return "no check is selected"
    failed = check.status == "fail" or check.name in state.skips
    return None if failed else f"{api.check_label(check.name)} has not failed"


def _shell(state: DeckState) -> str | None:
    if state.config is None or state.node is None:
        return "no configuration says how to reach the node"
    facts = state.selected_facts
    if facts is not None and (facts.host_key or facts.changed_key):
        return "its host key has to be accepted first" if facts.host_key else "its host key has changed"
    return None


def _configured(state: DeckState) -> str | None:
    return "there is a configuration: n launches it" if state.config is not None else None


@dataclass(frozen=True)
class Action:
    id: str
    keys: tuple[str, ...]
    """Textual's key names."""
    label: str
    """One or two words, for the key bar."""
    help: str
    """One line, for the help screen, the palette and docs/keys.md."""
    group: str
    views: tuple[str, ...] = VIEWS
    panes: tuple[str, ...] | None = None
    """Panes in which it works; None is all."""
    dangerous: bool = False
    """Ends or overwrites something; never on a bare letter, always confirmed."""
    why_not: Why = lambda state: None
    when: Callable[[DeckState], bool] = lambda state: True
    """The key means this now, beyond views and panes."""
    palette: bool = True

    def offered(self, state: DeckState) -> bool:
        """Where the console only reads, what changes something, here or on a node, is neither shown nor done."""
        return not (state.read_only and (self.group in _ACTING or self.id in _WRITING))

    def applies(self, state: DeckState) -> bool:
        in_pane = self.panes is None or state.pane in self.panes
        return self.offered(state) and state.view in self.views and in_pane and self.when(state)

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
    "plus": "+",
    "minus": "-",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
    "equals_sign": "=",
    "escape": "esc",
}


def shown_key(key: str) -> str:
    return _SHOWN.get(key, key)


_ACTING: Final = ("run", "nodes")
"""Groups of which every action changes something, or has nodes work."""
_WRITING: Final = (
    *("item_up", "item_down", "hold_item", "cancel_item"),
    *("tag_run", "note_run", "delete_run", "export_chart", "save"),
)
"""Those of other groups that do."""
LOG_VIEWS: Final = ("dashboard", "run")
CHART_VIEWS: Final = (*LOG_VIEWS, "compare")

ACTIONS: Final[tuple[Action, ...]] = (
    Action("next_match", ("n",), "next", "Next match of the search", "logs", LOG_VIEWS, why_not=_log,
           when=lambda state: state.searching and state.pane == "logs", palette=False),
    Action("launch", ("n",), "launch", "Launch the plan, after a confirmation", "run",
           why_not=_first(_loading, _busy, _nothing_to_launch, _not_ended, _failures),
           when=lambda state: state.running is None),
    Action("enqueue", ("n",), "queue", "Put the plan into the queue while another run goes on; asks when, how long",
           "run", why_not=_first(_loading, _nothing_to_launch, _failures),
           when=lambda state: state.running is not None and not (state.searching and state.pane == "logs")),
    Action("abort", ("ctrl+x",), "abort", "Abort the shown run, after a confirmation", "run", dangerous=True,
           why_not=_abort),
    Action("use", ("u",), "use", "Evaluate, fuse, serve, fetch or publish what a run has trained",
           "run", panes=("run", "logs", "history"), why_not=_first(_loading, _use)),
    Action("again", ("R",), "again", "Start a run that has ended again: resumed, the same, or with changes", "run",
           panes=("run", "logs", "history"), why_not=_first(_loading, _again, _busy)),
    Action("edit", ("e",), "edit", "Edit the configuration in $EDITOR; it is read again at once", "run",
           why_not=_first(_loading, _edit)),
    Action("notify_test", ("ctrl+t",), "notify", "Send a test by each channel of [notify]", "run",
           why_not=_first(_loading, _nothing_to("test"))),
    Action("switch", ("F",), "file", "Switch to another configuration of the folder", "run",
           why_not=_first(_loading, _busy)),
    Action("setup", ("i",), "set up", "Set up the nodes and the job step by step, and write flightdeck.toml", "run",
           why_not=_busy),
    Action("recheck", ("r",), "re-check", "Run the preflight checks again (in preflight), else probe the nodes", "run",
           why_not=_first(_loading, _nothing_to("check"), _checked_by_run, _busy)),
    Action("demo", ("d",), "demo", "Run the demo, where there is no configuration", "run",
           why_not=_first(_loading, _configured, _busy, _not_ended),
           when=lambda state: state.ready and state.config is None),
    Action("chat", ("c",), "chat", "Ask what the shown run has trained, beside its base model", "run", LOG_VIEWS,
           panes=("run", "logs"), why_not=_first(_loading, _chat)),
    Action("calibrate", ("c",), "calibrate", "Measure every node and link, or stop measuring", "nodes",
           panes=("calibration",), why_not=_calibrate),
    Action("calibrate_quick", ("C",), "quick", "Measure every node and link, 10 s a node", "nodes",
           panes=("calibration",), why_not=_calibrate, when=lambda state: state.calibrating is None),
    Action("scaling", ("S",), "scaling", "Time the job's real steps over 1, 2, … ranks", "nodes",
           panes=("calibration",), why_not=_scale, when=lambda state: state.calibrating is None),
    Action("fix", ("x",), "fix", "Fix what is selected: run a fix, set up cables, or compare a host key; asks first",
           "nodes", panes=("nodes", "preflight"), why_not=_first(_loading, _fix)),
    Action("skip", ("s",), "skip", "Skip the selected check at the next launch, with a reason; or no longer", "nodes",
           panes=("preflight",), why_not=_first(_loading, _skip)),
    Action("shell", ("s",), "shell", "Open a shell on the selected node; the console waits for its end", "nodes",
           panes=("nodes",), why_not=_first(_loading, _shell)),
    Action("view_nodes", ("1",), "nodes", "Nodes, full screen", "views"),
    Action("view_preflight", ("2",), "preflight", "Preflight, full screen", "views"),
    Action("view_calibration", ("3",), "calibration", "Calibration and shares, full screen", "views"),
    Action("view_run", ("4",), "run", "The run: loss, ranks and logs, full screen", "views"),
    Action("view_history", ("5",), "history", "Every run; enter describes one", "views"),
    Action("view_queue", ("6",), "queue", "The queue: what waits, and for what", "views"),
    Action("open_item", ("enter",), "open", "Show the run of the selected item", "queue", panes=("queue",),
           why_not=_first(_item, lambda state: None if _of_item(state).run else "it has not started")),
    Action("item_up", ("K",), "up", "The selected item starts earlier", "queue", panes=("queue",),
           why_not=_first(_loading, _item, _not_started)),
    Action("item_down", ("J",), "down", "The selected item starts later", "queue", panes=("queue",),
           why_not=_first(_loading, _item, _not_started)),
    Action("hold_item", ("H",), "hold", "Hold the selected item, or release it", "queue", panes=("queue",),
           why_not=_first(_loading, _item, _not_started)),
    Action("cancel_item", ("ctrl+k",), "cancel", "Take the selected item out of the queue, after a confirmation",
           "queue", panes=("queue",), dangerous=True, why_not=_first(_loading, _item, _not_started)),
    Action("models", ("7",), "models", "Models and data sets of the nodes: copy, verify, remove", "display",
           why_not=_first(_loading, _nothing_to("ask"))),
    Action("configuration", ("E",), "values", "Each value of the configuration, and where it was set", "display",
           why_not=_first(_loading, _edit)),
    Action("compare", ("enter",), "compare", "Compare the marked runs: curves, what differs, and why", "history",
           panes=("history",), why_not=_first(_loading, _busy), when=_comparable),
    Action("describe", ("enter",), "describe", "Settings, result and commands of the selected run; enter opens it",
           "history", panes=("history",), why_not=_first(_loading, _run_selected),
           when=lambda state: not state.detail and not _comparable(state)),
    Action("open", ("enter",), "open", "Show the described run on the dashboard", "history", panes=("history",),
           why_not=_run_selected, when=lambda state: state.detail, palette=False),
    Action("mark", ("space",), "mark", "Mark the selected run; enter compares the marked ones", "history",
           panes=("history",), why_not=_run_selected),
    Action("filter_runs", ("slash",), "filter", "Show only runs that match: state:failed lr<1e-4 tag:night",
           "history", panes=("history",), why_not=_loading),
    Action("sort_runs", ("o",), "sort", "Order the runs by the next column", "history", panes=("history",)),
    Action("reverse_runs", ("O",), "reverse", "Reverse the order of the runs", "history", panes=("history",)),
    Action("tag_run", ("T",), "tag", "Tags of the selected run", "history", panes=("history",),
           why_not=_first(_loading, _run_selected)),
    Action("note_run", ("N",), "note", "A note on the selected run", "history", panes=("history",),
           why_not=_first(_loading, _run_selected)),
    Action("delete_run", ("ctrl+k",), "delete", "Delete the selected or marked runs, here and on their nodes",
           "history", panes=("history",), dangerous=True, why_not=_first(_loading, _deletable, _busy)),
    Action("pin_run", ("p",), "pin", "Draw the next run over the others", "history", ("compare",)),
    Action("next_pane", ("tab",), "pane", "Next pane (next tab on a small terminal)", "move", palette=False),
    Action("previous_pane", ("shift+tab",), "pane back", "Previous pane", "move", palette=False),
    Action("down", ("j", "down"), "down", "Move down", "move", palette=False),
    Action("up", ("k", "up"), "up", "Move up", "move", palette=False),
    Action("left", ("h", "left"), "left", "Move left: in a log, or a full chart's cursor; else to the pane before",
           "move", palette=False),
    Action("right", ("l", "right"), "right", "Move right: in a log, or a full chart's cursor; else to the next pane",
           "move", palette=False),
    Action("page_down", ("pagedown", "ctrl+d"), "page down", "A page down", "move", palette=False),
    Action("page_up", ("pageup", "ctrl+u"), "page up", "A page up", "move", palette=False),
    Action("top", ("g", "home"), "top", "To the top", "move", palette=False),
    Action("bottom", ("G", "end"), "bottom", "To the bottom", "move", palette=False),
    Action("enter", ("enter",), "open",
           "Open what is selected; on a failed run, jump to the line that proves it", "move", palette=False,
           when=lambda state: state.pane not in ("history", "queue")),
    Action("back", ("escape",), "back", "One step back; never quits", "move", palette=False),
    Action("search", ("slash",), "search", "Search the log", "logs", LOG_VIEWS, why_not=_log),
    Action("previous_match", ("N",), "previous", "Previous match of the search (n: next)", "logs", LOG_VIEWS,
           why_not=_log, palette=False),
    Action("filter", ("ampersand",), "filter", "Show only the lines that match; a leading ! inverts", "logs",
           LOG_VIEWS, why_not=_log),
    Action("follow", ("f",), "follow", "Follow the log's end (TAIL), or stop following", "logs", LOG_VIEWS,
           why_not=_log),
    Action("next_error", ("right_curly_bracket",), "error", "Next error in the log", "logs", LOG_VIEWS, why_not=_log),
    Action("previous_error", ("left_curly_bracket",), "error back", "Previous error in the log", "logs",
           LOG_VIEWS, why_not=_log),
    Action("previous_rank", ("left_square_bracket",), "rank", "Log of the rank before", "logs", LOG_VIEWS,
           why_not=_log),
    Action("next_rank", ("right_square_bracket",), "rank", "Log of the next rank", "logs", LOG_VIEWS, why_not=_log),
    Action("all_ranks", ("a",), "all ranks", "Log of all ranks, merged", "logs", LOG_VIEWS, why_not=_log),
    Action("wrap", ("w",), "wrap", "Wrap long lines", "logs", LOG_VIEWS, why_not=_log),
    Action("timestamps", ("t",), "timestamps", "Show when each line arrived", "logs", LOG_VIEWS, why_not=_log),
    Action("alike", ("equals_sign",), "alike", "Show lines that all ranks print alike once, or each rank's", "logs",
           LOG_VIEWS, why_not=_log),
    Action("next_metric", ("m",), "metric", "Next metric of the run (in the grid: its next page)", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("metric_grid", ("M",), "grid", "Small charts of all metrics, or one", "chart", CHART_VIEWS, why_not=_chart),
    Action("chart_axis", ("X",), "x axis", "x in iterations, tokens or active time", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("chart_average", ("A",), "average", "Moving average in a band from minimum to maximum", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("log_axis", ("L",), "log axis", "Logarithmic y axis", "chart", CHART_VIEWS, why_not=_chart),
    Action("zoom_in", ("plus",), "zoom in", "Show half of what is shown, around the cursor", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("zoom_out", ("minus",), "zoom out", "Show twice as much", "chart", CHART_VIEWS, why_not=_chart),
    Action("pan_left", ("less_than_sign",), "pan", "Go back by half of what is shown", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("pan_right", ("greater_than_sign",), "pan", "Go on by half of what is shown", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("fit_chart", ("0",), "fit", "Show everything from the first x to the last", "chart", CHART_VIEWS,
           why_not=_chart),
    Action("export_chart", ("P",), "chart file", "Save the chart as SVG, and as PNG where Pillow is installed", "chart",
           CHART_VIEWS, why_not=_chart),
    Action("samples", ("s",), "samples", "Answers of the run while it trains, or the chart", "display", LOG_VIEWS,
           why_not=_samples),
    Action("maximise", ("z",), "maximise", "Give the pane the whole screen, and back", "display"),
    Action("freeze", ("space",), "freeze", "Hold the display still; data keeps arriving", "display",
           when=lambda state: state.pane != "history"),
    Action("copy", ("y",), "copy", "Copy what is selected (clipboard, and always a file)", "display"),
    Action("save", ("ctrl+s",), "save pane", "Save the pane's text to a file", "display"),
    Action("help", ("question_mark",), "help", "This help", "console"),
    Action("palette", ("ctrl+p", "colon"), "commands", "Find any command by name", "console", palette=False),
    Action("suspend", ("ctrl+z",), "suspend", "Suspend the console; the shell's fg brings it back", "console"),
    Action("quit", ("q",), "quit", "Quit the console, never the run", "console"),
)  # fmt: skip

BY_ID: Final = {action.id: action for action in ACTIONS}

GROUPS: Final = {
    "run": "Run",
    "nodes": "Nodes",
    "views": "Views",
    "history": "History",
    "queue": "Queue",
    "move": "Move",
    "logs": "Logs",
    "chart": "Chart",
    "display": "Display",
    "console": "Console",
}

_BAR: Final[dict[str, tuple[str, ...]]] = {
    "dashboard": ("demo", "setup", "launch", "enqueue", "abort", "recheck", "help", "palette", "quit"),
    "nodes": ("recheck", "fix", "shell", "models", "copy", "back", "launch", "help", "quit"),
    "preflight": ("recheck", "fix", "skip", "copy", "back", "launch", "help", "quit"),
    "calibration": ("calibrate", "calibrate_quick", "scaling", "copy", "back", "launch", "help", "quit"),
    "run": ("abort", "search", "follow", "next_metric", "back", "help", "quit"),
    "history": ("compare", "describe", "open", "mark", "filter_runs", "use", "again", "back", "help", "quit"),
    "queue": ("open_item", "item_up", "item_down", "hold_item", "cancel_item", "enqueue", "back", "help", "quit"),
    "compare": ("next_metric", "chart_average", "pin_run", "copy", "back", "help", "quit"),
}
_PLAN_BAR: Final = ("launch", "recheck", "maximise", "copy", "back", "help", "quit")
"""The run's view while it shows the plan."""
_LOG_BAR: Final = ("search", "filter", "follow", "next_error", "all_ranks", "back", "help", "quit")


def keys() -> Iterator[str]:
    """Every key that means something, once."""
    return iter(dict.fromkeys(key for action in ACTIONS for key in action.keys))


def action_for(key: str, state: DeckState) -> Action | None:
    """The action of `key` now, whether or not it can be done."""
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
        order = _with(order, abort=(*_chat_first(state), "launch"))
    elif state.view == "dashboard" and state.snapshot is not None and not state.active:
        # The plan of the next launch is behind a run that has ended.
        uses = _chat_first(state)
        order = _with(order, demo=(), launch=(*uses, "launch"), abort=() if uses else ("abort",), help=("back", "help"))
    return [BY_ID[name] for name in order if BY_ID[name].applies(state)]


def _with(order: Iterable[str], **others: tuple[str, ...]) -> list[str]:
    """`order` with `others` in place of those that they are named after."""
    return [other for name in order for other in others.get(name, (name,))]


def _chat_first(state: DeckState) -> tuple[str, ...]:
    return (*(("chat", "use") if _chat(state) is None else ()), *(("again",) if _again(state) is None else ()))


def _behind(state: DeckState) -> str:
    if state.back_to is not None:
        return state.back_to
    return "its run" if state.snapshot is not None and state.snapshot.record.task is not None else "plan"


def label(action: Action, state: DeckState, *, short: bool = False) -> str:
    """The action's name in the key bar, which may depend on the state."""
    if action.id == "fix":
        names = {HostKeyFix: "host key", CableSetup: "set up cables", CopyFix: "bring it"}
        return names.get(type(fix := fix_for(state)), "fix" if isinstance(fix, str) else "run the fix")
    special = {
        "quit": "quit (the run goes on)" if state.running is not None and not short else None,
        "enter": "the line that proves it" if state.pane == "run" and state.proof is not None else None,
        "back": _behind(state) if state.view == "dashboard" else None,
        "recheck": "probe" if state.pane != "preflight" else None,
        "calibrate": "stop measuring" if state.calibrating is not None else None,
        "freeze": "thaw" if state.frozen else None,
    }
    return special.get(action.id) or action.label


def hint(state: DeckState, separator: str, *names: str) -> str:
    """A pane border's hint: those of the named actions that can be done now."""
    named = [BY_ID[name] for name in names]
    possible = [action for action in named if action.applies(state) and action.why_not(state) is None]
    return separator.join(f"{action.shown_key} {label(action, state)}" for action in possible)


def markdown() -> str:
    """The key table of docs/keys.md."""
    rows = ["| key | what it does |", "|---|---|"]
    for group in GROUPS:
        for action in ACTIONS:
            if action.group == group:
                shown = " ".join(f"`{shown_key(key)}`" for key in action.keys)
                rows.append(f"| {shown} | {action.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
