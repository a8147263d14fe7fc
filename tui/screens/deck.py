"""The one screen with all the panes: the dashboard, and each pane as a full view. The panes live on across views, so a
cursor, a search or a place in a log is where it was left."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import ClassVar, Final, Protocol

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.css.query import NoMatches
from textual.events import DescendantFocus, Resize
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input

from tui.actions import Action, action_for, keys
from tui.state import VIEWS, DeckState, StateStore
from tui.widgets.bars import KeyBar, RunHeader, TabStrip
from tui.widgets.chart import Chart
from tui.widgets.checks_pane import ChecksPane
from tui.widgets.compare_pane import ComparePane
from tui.widgets.history_pane import HistoryPane
from tui.widgets.logs_pane import LogsPane
from tui.widgets.nodes_pane import NodesPane
from tui.widgets.pane import Pane, RowList
from tui.widgets.queue_pane import QueuePane
from tui.widgets.run_pane import RunPane
from tui.widgets.shares_pane import SharesPane

NARROW: Final = (100, 30)
"""Below this width or height the panes are tabs."""

LEFT: Final = ("nodes", "preflight", "calibration", "history")
RIGHT: Final = ("run", "logs")
_ORDER: Final = ("nodes", "preflight", "calibration", "history", "queue", "compare", "run", "logs")
_TABS: Final = (
    ("nodes", "nodes"),
    ("preflight", "preflight"),
    ("calibration", "calibration"),
    ("run", "run"),
    ("run", "logs"),
    ("history", "history"),
    ("queue", "queue"),
)

MOVES: Final = frozenset({"down", "up", "left", "right", "page_down", "page_up", "top", "bottom"})
"""Actions that a pane does by itself."""
_WAITING: Final = MOVES | {"mark"}
_PROMPTS: Final = ("slash", "ampersand", "T", "N")
_UNDER_CURSOR: Final = {"nodes": "node", "preflight": "check", "history": "run", "queue": "item"}
"""Pane → the part of the state that its cursor is in."""
_AT_ONCE: Final = ("ctrl+x", "tab", "shift+tab", *_PROMPTS)
"""Keys taken before what has the focus sees them. Those that open a prompt are among them so that what is typed right
behind them is text: as ordinary keys they wait in a queue, and the "n" of a fast "/train" would launch."""


def visible(view: str, maximised: str | None, width: int, height: int) -> frozenset[str]:
    """The panes that are on the screen."""
    if maximised is not None:
        return frozenset({maximised})
    if view == "run":
        return frozenset(RIGHT)
    if view != "dashboard":
        return frozenset({view})
    if width < NARROW[0] or height < NARROW[1]:
        return frozenset(RIGHT)
    return frozenset({*LEFT, *RIGHT})


class DeckActions(Protocol):
    """Actions that the app performs at once: a key typed right after `n` must reach the dialog."""

    def perform(self, action: Action) -> None: ...

    def open_run(self, run: str, *, view: str = "dashboard", back_to: str | None = None) -> None: ...

    def close_run(self) -> None: ...


class DeckScreen(Screen[None]):
    """Lays the panes out, hands them the state, and turns keys into actions."""

    class PanesPlaced(Message):
        """Other panes may be on the screen."""

    AUTO_FOCUS = ""
    """No other pane takes the keys when a dialog over a described run, or a node's details, is closed."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(key, f"press('{key}')", show=False, priority=key in _AT_ONCE) for key in keys()
    ]

    def __init__(self, store: StateStore, actions: DeckActions, *, redraw_s: float | None = None) -> None:
        super().__init__(id="deck")
        self._store = store
        self._actions = actions
        self._redraw_s = redraw_s
        self.maximised_pane: str | None = None
        self._waiting: list[str] | None = None
        """Keys of movements behind one that shows other panes, which have no rows yet; None when all are drawn."""

    def compose(self) -> ComposeResult:
        yield RunHeader()
        yield TabStrip()
        with Horizontal(id="panes"):
            with Vertical(id="left"):
                yield NodesPane()
                yield ChecksPane()
                yield SharesPane()
                yield HistoryPane()
                yield QueuePane()
                yield ComparePane()
            with Vertical(id="right"):
                yield RunPane()
                yield LogsPane(redraw_s=self._redraw_s)
        yield KeyBar()

    @property
    def state(self) -> DeckState:
        return self._store.state

    @property
    def nodes_shown(self) -> bool:
        """The nodes pane is on the screen; False also before the panes are mounted and after they have gone."""
        with contextlib.suppress(NoMatches):
            return self.pane("nodes").display
        return False

    @property
    def narrow(self) -> bool:
        return self.size.width < NARROW[0] or self.size.height < NARROW[1]

    def pane(self, name: str) -> Pane:
        return self.query_one(f"#{name}", Pane)

    @property
    def logs(self) -> LogsPane:
        return self.query_one(LogsPane)

    @property
    def history(self) -> HistoryPane:
        return self.query_one(HistoryPane)

    def on_mount(self) -> None:
        self.place_panes()
        self.focus_pane(self.state.pane)

    def on_resize(self, event: Resize) -> None:
        self.place_panes()
        self.call_after_refresh(self.show, self.state)

    def place_panes(self) -> None:
        """Put the panes of the view on the screen."""
        shown = visible(self.state.view, self.maximised_pane, self.size.width, self.size.height)
        for name in _ORDER:
            self.pane(name).display = name in shown
        self.query_one("#left").display = bool(shown - set(RIGHT))
        self.query_one("#right").display = bool(shown & set(RIGHT))
        self.query_one(TabStrip).display = self.narrow
        self.set_class(self.narrow, "-narrow")
        self.set_class(self.state.view != "dashboard" or self.maximised_pane is not None, "-full")
        self.set_class(self.maximised_pane is not None, "-maximised")
        self.post_message(self.PanesPlaced())
        if self.state.pane not in shown:
            self.focus_pane(next(name for name in ("run", *_ORDER) if name in shown))

    def show(self, state: DeckState) -> None:
        """Hand the state to what is on the screen."""
        self.query_one(RunHeader).show(state)
        self.query_one(TabStrip).show(state)
        self.query_one(KeyBar).show(state)
        for name in _ORDER:
            self.pane(name).show(state)

    def focus_pane(self, name: str) -> None:
        """Give a pane the keys."""
        pane = self.pane(name)
        inner = next(iter(pane.query(RowList)), None)
        target: Widget = inner if inner is not None else pane.keys_go_to
        self.set_focus(target, scroll_visible=False)
        self._store.change(pane=name)

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        for node in event.widget.ancestors_with_self:
            if isinstance(node, Pane) and self.state.pane != node.NAME:
                self._store.change(pane=node.NAME)

    def go(self, view: str, pane: str | None = None) -> None:
        """Show a view, with the keys in its own pane unless another is named."""
        self.maximised_pane = None
        self._store.change(view=view, detail=False)
        self.place_panes()
        self.focus_pane(pane or ("run" if view in ("run", "dashboard") else view))
        self._show_placed()

    def _show_placed(self) -> None:
        """Draw the panes that have just been placed, then do what was typed meanwhile."""
        self._waiting = self._waiting or []

        def drawn() -> None:
            self.show(self.state)
            waiting, self._waiting = self._waiting or [], None
            for key in waiting:
                self.action_press(key)

        self.call_after_refresh(drawn)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """In a prompt that is open, the keys that open one are text."""
        return not (action == "press" and parameters[0] in _PROMPTS and isinstance(self.focused, Input))

    def take_selection(self) -> None:
        """Put what is under the cursors now into the state, and whether a search is on: a key right behind a movement
        or a search must mean what is on the screen."""
        node, check = (self.pane(name).query_one(RowList).selected for name in ("nodes", "preflight"))
        run, item = self.query_one(HistoryPane).selected, self.query_one(QueuePane).selected
        searching = self.logs.view.state.search is not None
        seen = self.state
        if (node, check, run, item, searching) != (seen.node, seen.check, seen.run, seen.item, seen.searching):
            self._store.change(node=node, check=check, run=run, item=item, searching=searching)

    def on_pane_selected(self, event: Pane.Selected) -> None:
        self._store.change(**{_UNDER_CURSOR[event.pane]: event.row})

    def on_logs_pane_search_changed(self, event: LogsPane.SearchChanged) -> None:
        self._store.change(searching=event.searching)

    def action_press(self, key: str) -> None:
        self.take_selection()
        action = action_for(key, self.state) or action_for(key, replace(self.state, read_only=False))
        if action is not None and self._waiting is not None and (action.id in _WAITING or key == "enter"):
            self._waiting.append(key)
        elif action is not None:
            self._actions.perform(action)

    def on_key_bar_pressed(self, event: KeyBar.Pressed) -> None:
        self._actions.perform(event.action)

    def on_row_list_chosen(self) -> None:
        self.action_press("enter")

    def do(self, action: Action) -> bool:
        """Do what is a matter of this screen; False when it is not."""
        if action.group == "logs":
            self.focus_pane("logs")
            self.logs.do(action.id)
        elif action.group == "chart" and action.id != "export_chart":
            self.chart.do(action.id)
            if action.id == "metric_grid" and self.state.view == "run":
                # The grid has the pane to itself.
                self.pane("run").refresh_pane()
        elif action.group == "views":
            self._toggle_view(action.id.removeprefix("view_"))
        elif action.id in MOVES:
            self._move(action.id)
        elif (done := getattr(self, f"do_{action.id}", None)) is not None:
            done()
        else:
            return False
        return True

    def _toggle_view(self, view: str) -> None:
        again = self.state.view == view and not self.narrow and (view == "history" or self.maximised_pane is None)
        self.go("dashboard" if again else view, view if again and view != "history" else None)

    def do_next_pane(self) -> None:
        self._step(1)

    def do_previous_pane(self) -> None:
        self._step(-1)

    def _step(self, direction: int) -> None:
        if self.narrow and self.maximised_pane is None:
            view = "run" if self.state.view == "dashboard" else self.state.view
            here = next((i for i, tab in enumerate(_TABS) if tab == (view, self.state.pane)), 0)
            self.go(*_TABS[(here + direction) % len(_TABS)])
            return
        shown = [name for name in _ORDER if self.pane(name).display]
        here = shown.index(self.state.pane) if self.state.pane in shown else 0
        self.focus_pane(shown[(here + direction) % len(shown)])

    def _move(self, name: str) -> None:
        """Hand a movement to what has the keys: a list's cursor, a log, or a scrolled text."""
        pane = self.pane(self.state.pane)
        if pane.move(name):
            return
        if name in ("left", "right"):
            self._step(1 if name == "right" else -1)

    def do_enter(self) -> None:
        """Drill in: a failure jumps to its line, else the pane's full view or a node."""
        pane = self.state.pane
        if pane == "run" and (proof := self.state.proof) is not None and proof.offset is not None:
            self.focus_pane("logs")
            self.logs.view.jump_to(proof.source, proof.offset)
        elif pane == "logs":
            self.do_maximise()
        elif pane == "nodes" and self.state.view == "nodes" and self.state.node is not None:
            self._store.change(detail=True)
        elif self.state.view != pane and pane in VIEWS:
            self.go(pane)

    def do_back(self) -> None:
        """One step back: the log's own bars, the maximised pane, the view, the shown task, or run that has ended."""
        if self.state.pane == "logs" and self.logs.back():
            return
        if self.state.pane in ("run", "compare") and self.chart.back():
            self.pane(self.state.pane).refresh_pane()
            return
        if self.state.pane == "history" and self.history.back():
            return
        if self.maximised_pane is not None:
            self.do_maximise()
        elif self.state.detail:
            self._store.change(detail=False)
        elif self.state.view == "compare":
            self.go("history")
        elif self.state.pane == "history" and self.state.marked:
            self._store.change(marked=())
        elif self.state.view != "dashboard":
            self.go("dashboard", self.state.pane if not self.narrow and self.state.pane != "history" else None)
        elif (view := self.state.back_to) is not None:
            if not self.state.active:
                self._actions.close_run()
            self._store.change(back_to=None)
            self.go(view)
        elif (shown := self.state.snapshot) is not None and (not self.state.active or shown.record.task is not None):
            self._actions.close_run()

    def do_maximise(self) -> None:
        pane = self.state.pane
        self.maximised_pane = None if self.maximised_pane else pane
        self.place_panes()
        self.focus_pane(pane)
        self._show_placed()

    def do_samples(self) -> None:
        self.query_one(RunPane).toggle_samples()

    @property
    def chart(self) -> Chart:
        """That of the compared runs in their view, else the shown run's."""
        return self.query_one(ComparePane).chart if self.state.view == "compare" else self.run_chart

    @property
    def run_chart(self) -> Chart:
        return self.query_one(RunPane).chart

    def on_chart_metrics_read(self, event: Chart.MetricsRead) -> None:
        self._store.change(metrics=event.metrics)

    def do_open(self) -> None:
        if self.state.run is not None:
            self._actions.open_run(self.state.run, back_to=self.state.view if self.state.view == "history" else None)

    def do_open_item(self) -> None:
        if (item := self.state.queued) is not None and item.run is not None:
            self._actions.open_run(item.run, back_to="queue")

    def do_mark(self) -> None:
        run, marked = self.state.run, self.state.marked
        if run is not None:
            others = tuple(one for one in marked if one != run)
            self._store.change(marked=others if run in marked else (*marked, run))
            self.history.move("down")

    def do_filter_runs(self) -> None:
        self.history.ask("filter")

    def do_tag_run(self) -> None:
        self.history.ask("tags")

    def do_note_run(self) -> None:
        self.history.ask("note")

    def do_sort_runs(self) -> None:
        self.history.sort(reverse=False)

    def do_reverse_runs(self) -> None:
        self.history.sort(reverse=True)

    def do_pin_run(self) -> None:
        self.query_one(ComparePane).pin()
