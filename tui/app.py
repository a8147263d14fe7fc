"""The console's app: it turns actions into requests of the engine client and puts into the state what the client and
the poller post.

Imports stay small here: the engine (pydantic, the store) is loaded by the poller's thread after the first paint.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shlex
import signal
import string
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text
from textual.app import App, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.events import Event, InputEvent, Key
from textual.worker import Worker

from engine import api
from engine.errors import ConfigError, InputsChanged, plural
from tui.actions import ACTIONS, Action
from tui.chart_files import COLUMNS, NO_PNG, png_possible, write_chart
from tui.encoding import prepare
from tui.engine_client import (
    BATCH_S,
    EngineClient,
    Notice,
    TelemetryReceived,
)
from tui.fixes import CableSetup, CheckFix, CopyFix, FixCommand, HostKeyFix, fix_for
from tui.formatting import shortened, size, terminal_notification
from tui.gc_pauses import GcScheduler
from tui.glyphs import FEW_COLOURS, Glyphs, utf8_terminal, warning_of_16
from tui.poller import (
    POLL_S,
    ConfigEdited,
    EngineFailed,
    EngineReady,
    QueueRead,
    RunPoller,
    RunsRead,
    SnapshotTaken,
    Trouble,
)
from tui.screens.chat import Chat
from tui.screens.configuration import Configuration, Row, editor_at, fault_rows, value_rows
from tui.screens.copies import ModelCopies
from tui.screens.deck import DeckScreen
from tui.screens.dialog import (
    Confirm,
    Dialog,
    QueueForm,
    Welcome,
    confirm_abort,
    confirm_delete,
    confirm_incomplete,
    confirm_launch,
    confirm_programs,
    text_width,
)
from tui.screens.fix import ChangedKey, FixDialog, SkipCheck, UnknownKey, confirm_fix, confirm_setup
from tui.screens.help import ActionProvider, Help, PaletteEntry
from tui.screens.settings import SettingsForm, starts
from tui.screens.setup import Setup
from tui.screens.stopping import Stopping
from tui.screens.use import (
    FORMS,
    PLACES,
    TARGETS,
    Choices,
    DialogChoice,
    RunUse,
    confirm_task,
    forms,
    publish_command,
    uses,
)
from tui.state import ENGINE_ERRORS, DeckState, StateStore
from tui.widgets.chart import Chart
from tui.widgets.compare_pane import ComparePane
from tui.widgets.history_pane import HistoryPane
from tui.widgets.logs_pane import Entry
from tui.widgets.text import pair

if TYPE_CHECKING:
    from engine.api import Config, Engine, TaskRequest
    from engine.models import NodeFacts, NodeTelemetry
    from engine.snapshots import Notification

SLOW_S: Final = 0.5
"""Between two reads or redraws over a slow link."""
RECENT_S: Final = 16 * 3600.0
"""A run that has ended within this time before is shown first."""
TICK_S: Final = 1.0
"""How often ages are redrawn."""
CALM_S: Final = 5.0
"""The same while nothing goes on."""
NOTICE_S: Final = 6.0
LEAVING_S: Final = 5.0
"""How long an orderly end after a signal may take."""
_RESTORE: Final = b"\x1b[?1003l\x1b[?1006l\x1b[?1000l\x1b[?2004l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[0m"
"""Ends what Textual has switched on: mouse, pasting in brackets, kitty's keys, the other screen; shows the cursor."""
_WAITS: Final = (
    '"$@"; code=$?; trap : INT; printf "ended with $code; enter returns to Flight Deck "; read _; exit $code'
)
"""Runs the program that is given as its arguments, in a shell; ctrl+c after its end leaves its exit code."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class FlightDeckApp(App[None]):
    """The console. `start` is launched at once; `follow` names a run to show first."""

    TITLE = "MLX Flight Deck"
    CSS_PATH = "app.tcss"
    COMMANDS: ClassVar[set[Any]] = {ActionProvider}
    COMMAND_PALETTE_BINDING = "ctrl+p"
    # In dialogs too.
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+z", "suspend", show=False)]

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        config: Config | Path | None = None,
        overrides: Mapping[str, Any] = {},
        *,
        start: Config | None = None,
        follow: str | None = None,
        slow_link: bool = False,
        read_only: bool = False,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        super().__init__()
        glyphs = Glyphs(ascii=not utf8_terminal())
        self.store = StateStore(DeckState(now=clock(), glyphs=glyphs, read_only=read_only), self._changed)
        self._clock = clock
        self._slow_link = slow_link
        self._start = start
        self._follow = follow
        self._first_shown = self._asked = self._leaving = self._edited_here = False
        self._setup = ""
        """ "waits" for the engine, "written" until its file is read."""
        self._taken_at = datetime.min.replace(tzinfo=UTC)
        """When the last snapshot was shown."""
        self._latest: SnapshotTaken | None = None
        self._shown: str | None = None
        self._first: str | None = None
        """The ended run with which the console began."""
        self._opened: set[str] = set()
        """Runs that were shown once: they are not shown again by themselves."""
        self._chatted: str | None = None
        """The run whose result was last asked."""
        self._first_config: Config | None = None
        """As it was read first, or launched last."""
        self._due = False
        self._started_by = os.getppid()
        make = engine if callable(engine) else lambda: engine
        self.poller = RunPoller(
            (lambda: api.ReadOnlyEngine(make())) if read_only else make,
            start if config is None else config,
            self.post_message,
            poll_s=SLOW_S if slow_link else POLL_S,
            adopts=not read_only,
        )
        self.poller.overrides = overrides
        telemetry_s = SLOW_S if slow_link else BATCH_S
        self.client = EngineClient(self.store, clock, self.post_message, telemetry_s=telemetry_s)
        self._gc = GcScheduler()
        self._calibrating: Worker[None] | None = None
        self._telemetry: dict[str, NodeTelemetry] = {}
        if slow_link:
            self.animation_level = "none"

    async def on_event(self, event: Event) -> None:
        if isinstance(event, InputEvent):
            # Textual takes waiting keys one after the other: without a pause here no signal would come through.
            await asyncio.sleep(0)
            if self._leaving:
                return
        entry = self.focused if isinstance(event, Key) and event.key == "enter" else None
        await super().on_event(event)
        if isinstance(entry, Entry):
            # The next key is not for the prompt any more.
            await entry.drained()

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        if self.has_class(FEW_COLOURS):
            variables["warning"] = warning_of_16(variables)
        return variables

    def exit(self, *arguments: Any, **named: Any) -> None:
        self._leaving = True
        super().exit(*arguments, **named)

    @property
    def state(self) -> DeckState:
        return self.store.state

    def get_default_screen(self) -> DeckScreen:
        return DeckScreen(self.store, self, redraw_s=SLOW_S if self._slow_link else None)

    @property
    def deck(self) -> DeckScreen:
        """The screen below any dialog."""
        deck = self.screen_stack[0]
        assert isinstance(deck, DeckScreen)
        return deck

    def on_mount(self) -> None:
        self.set_interval(TICK_S, self._tick)
        few = not self.is_headless and self.console.color_system in (None, "standard")
        self.set_class(self.no_color or few, FEW_COLOURS)
        if few:
            self.refresh_css(animate=False)
        # After `fg` the terminal's alternate screen is empty, and Textual draws only what has changed.
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True), immediate=True)
        self.call_after_refresh(self._start_reading)

    def _start_reading(self) -> None:
        self.set_timer(0.02, self.poller.start)

    async def on_unmount(self) -> None:
        self._gc.stop()
        self.poller.stop()
        await self.client.close()

    def _changed(self) -> None:
        """Redraw once, however many changes come together."""
        if not self._due:
            self._due = True
            self.call_next(self._show)

    def _show(self) -> None:
        self._due = False
        if not self.screen_stack or not self.deck.is_mounted:
            return
        self.deck.show(self.state)
        self._show_dialog()

    def _show_dialog(self) -> None:
        # One that was just pushed has no widgets yet: the next tick draws it.
        if isinstance(self.screen, (Stopping, FixDialog)) and self.screen.is_mounted:
            # What a person waits for there goes on, also where the display is frozen.
            latest = self._latest
            shown = latest.snapshot if latest is not None and latest.run == self._shown else self.state.snapshot
            self.screen.show(replace(self.state, now=self._clock(), snapshot=shown))

    def _tick(self) -> None:
        if self._abandoned:
            # Whoever has no controlling terminal gets no signal for that.
            signal.raise_signal(signal.SIGHUP)
        self._gc.tick()
        self._update_telemetry()
        now, state = self._clock(), self.state
        calm = state.running is None and state.busy is None and not state.probing and len(self.screen_stack) < 2
        # What has come meanwhile has had the ages redrawn, too; where a report comes each second, only reports do that.
        recent = 0.0 <= (now - self._taken_at).total_seconds() < TICK_S
        age_s = abs((now - state.now).total_seconds())
        if state.frozen and self.screen_stack:
            self._show_dialog()
        elif not state.frozen and not recent and age_s >= (CALM_S if calm else TICK_S) - TICK_S / 2:
            self.store.change(now=now)

    @property
    def _abandoned(self) -> bool:
        """Its terminal is gone, or the server that shows it in a browser."""
        if self.is_headless or self.is_web:
            return self.is_web and os.getppid() != self._started_by
        return sys.__stdin__ is not None and not sys.__stdin__.isatty()

    def _update_telemetry(self) -> None:
        """Telemetry is on while the nodes are on the screen or a run is active."""
        # The clock ticks until the end, when the screens have gone already.
        if self.screen_stack:
            self.client.update_telemetry(needed=self.state.running is not None or self.deck.nodes_shown)

    def on_deck_screen_panes_placed(self) -> None:
        self._update_telemetry()

    def say(self, text: str, *, severity: str = "information") -> None:
        """Show one plain line in a corner, for a few seconds."""
        self.notify(text, severity=severity, timeout=NOTICE_S, markup=False)  # type: ignore[arg-type]

    # Messages of the poller and the client

    def on_engine_ready(self, message: EngineReady) -> None:
        self.client.loaded = message.engine
        self._gc.start()
        self.store.change(ready=True)
        if message.config is None or message.accepted:
            self._take_config(message)
        else:
            self._ask_config(message, message.config)
        if self._start is not None:
            self._first_shown = True
            self._open_started(self.client.launch(self._start))
        elif self._setup:
            self._first_shown = True
            self.do_setup()
        elif self._follow is not None:
            self._first_shown = True
            self.open_run(self._follow)

    def on_config_edited(self, message: ConfigEdited) -> None:
        """The file as it is now counts, or, while it has faults, what was read before; both are said."""
        edited_here, self._edited_here = self._edited_here, False
        if message.ready is None or message.ready.config is None:
            self.store.change(fault=f"edited, and faulty: what was read before still counts\n{message.fault}")
            where = "the plan" if self.state.config is None else "E"
            self.say(f"the edited configuration has faults: {where} shows them", severity="warning")
            if edited_here and len(self.screen_stack) == 1 and self.state.config is not None:
                self.do_configuration()
        elif message.ready.accepted and self._setup:
            self._setup, self._first_config = "", None
            self._take_config(message.ready)
            self.deck.go("preflight")
            self._request(self.client.preflight())
        elif message.ready.accepted:
            before = self.state.config.file if self.state.config is not None else None
            self._take_config(message.ready)
            edits = ", ".join(self.state.edits) or "no value differs from what was read first, or launched last"
            how = f"was edited: {edits}"
            self.say(f"{message.ready.config.file} {how if before == message.ready.config.file else 'counts now'}")
        else:
            self._ask_config(message.ready, message.ready.config)

    def _ask_config(self, message: EngineReady, config: Config) -> None:
        """Somebody else may have written the file, and a probe runs the interpreters that it names, a check its sync
        script and a model's own code."""
        self._asked = True
        unaccepted = f"{config.file} names programs that nobody has accepted yet"
        self.store.change(asking=not self.state.read_only, fault=unaccepted)
        if self.state.read_only:
            return

        def answered(go: str | None) -> None:
            self.store.change(asking=False)
            if not go:
                self.store.change(fault=f"{config.file} was not accepted: start again to be asked again")
                return
            try:
                self.client.engine.nodes.accept(config.digest)
            except Exception as error:  # a full disk: it is asked again next time
                self.say(str(error), severity="warning")
            self._take_config(message)

        programs = message.engine.nodes.programs(config)
        self.push_screen(confirm_programs(config.file, programs, self._text_width), answered)

    def _take_config(self, message: EngineReady) -> None:
        config = message.config
        if self._first_config is None or (config is not None and config.file != self._first_config.file):
            self._first_config = config
        edits = api.changed_keys(self._first_config, config) if config is not None and self._first_config else ()
        facts = {facts.node: facts for facts in message.facts}
        self.store.change(config=config, facts=facts, prediction=message.prediction, fault=None, edits=tuple(edits))
        self.store.change(scaling=message.scaling, plan=None, checks=(), checks_at=None)
        if config is not None:
            self.theme = config.ui.theme
            if config.ui.ascii:
                self.store.change(glyphs=Glyphs(ascii=True))
            self.set_class(self.state.glyphs.ascii, "-ascii")
            self.client.stop_telemetry()
            self._request(self.client.probe())
            self._request(self._compare_with_run())
            self._update_telemetry()

    async def _compare_with_run(self) -> None:
        """Look whether the configuration differs from that of the shown run."""
        run, config = self._shown, self.state.config
        differs = run is not None and config is not None and await self.client.differs(run, config)
        if (run, config) == (self._shown, self.state.config):
            self.store.change(differs=differs)

    def on_engine_failed(self, message: EngineFailed) -> None:
        """The faults go to the terminal, one line each, where they can be read beside the file."""
        self.exit(return_code=message.exit_code, message=Text(message.fault))

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        before, self._latest = self._latest, message
        if before is not None and before.run == message.run:
            self._show_news(before.snapshot.notifications, message.snapshot.notifications)
        if message.run == self._shown and not self.state.frozen:
            self._taken_at = self._clock()
            self.store.change(snapshot=message.snapshot, now=self._taken_at)

    def _show_news(self, before: Sequence[Notification], now: Sequence[Notification]) -> None:
        """Each notification that is new, and the channels by which one was not told."""
        for place, news in enumerate(now):
            config = self.state.config if place >= len(before) else None
            if config is not None and config.notify.terminal and self._driver is not None:
                self._driver.write(terminal_notification(f"{news.title}: {news.text}"))
            for problem in news.problems if news not in before else ():
                self.say(f"{news.event} was not told by {problem}", severity="warning")

    def on_runs_read(self, message: RunsRead) -> None:
        before = None if self.state.runs is None else {run.id for run in self.state.runs} | self._opened
        if not self.state.frozen:
            # The live figures of the shown run are drawn with its snapshot, which comes each time that they change.
            shown, pairs = self._shown, zip(self.state.runs or (), message.runs, strict=False)
            alike = self.state.active and len(self.state.runs or ()) == len(message.runs)
            alike = alike and all(a is b or (a.id, a.state) == (shown, b.state) for a, b in pairs)
            (self.store.keep if alike else self.store.change)(runs=message.runs)
            if before is not None and not self.state.active and self.state.busy is None:
                # Started by a command: what is shown must be what goes on. A chat starts its server itself.
                new = (run for run in message.runs if run.id not in before and not run.state.ended)
                started = next((run for run in new if (run.task, run.source) != ("serve", self._chatted)), None)
                if started is not None and self._shown in (None, self._first) and len(self.screen_stack) == 1:
                    self.open_run(started.id, view=None)
                elif started is not None:
                    # What a person has opened stays.
                    self.say(f"{started.id} has started: 5 lists it")
        if not self._first_shown:
            self._first_shown = True
            self._show_first(message)

    def on_queue_read(self, message: QueueRead) -> None:
        if not self.state.frozen:
            self.store.change(queue=message.queue)

    def _show_first(self, message: RunsRead) -> None:
        """Show the newest active run, else how the last one of this night or day has ended, else the plan, in the view
        that a key may have opened meanwhile; without a configuration the history, or where there is none the welcome.
        """
        active = next((run for run in message.runs if not run.state.ended), None)
        newest = next((run for run in message.runs if run.task is None), None)
        if active is not None:
            self.open_run(active.id, view=None)
        elif newest is not None and newest.ended_at is not None and self.state.age_s(newest.ended_at) < RECENT_S:
            self._first = newest.id
            self.open_run(newest.id, view=None)
        elif self.state.config is None and not self._asked:
            if message.runs:
                self.deck.go("history")
            elif not self.state.read_only:
                self.push_screen(Welcome(), self._take_answer)

    def _take_answer(self, answer: str | None) -> None:
        if answer == "demo":
            self.do_demo()
        elif answer == "setup":
            self.do_setup()
        elif answer == "quit":
            self.do_quit()

    def on_trouble(self, message: Trouble) -> None:
        self.say(message.text, severity="warning")

    def on_notice(self, message: Notice) -> None:
        self.say(message.text, severity=message.severity)

    def on_telemetry_received(self, message: TelemetryReceived) -> None:
        self._telemetry = message.newest
        if not self.state.frozen:
            self.store.change(telemetry=message.newest)

    # The shown run

    def open_run(self, run: str, *, view: str | None = "dashboard", back_to: str | None = None) -> None:
        """Show a run in a view, None for the one that is open by then, and follow it while it is active. `back_to`: the
        view that esc leads to then."""
        self._show_run(partial(self._open_run, run, view, back_to))

    async def _open_run(self, run: str, view: str | None = "dashboard", back_to: str | None = None) -> bool:
        """False when there is no such run: what is shown stays."""
        opened = await self.client.open_run(run)
        if opened is None:
            return False
        run_dir, series = opened
        # One that is shown already is read again only when it changes.
        snapshot = self.state.snapshot if self._shown == run_dir.id else None
        self._shown = run_dir.id
        self._opened.add(run_dir.id)
        self.store.change(snapshot=snapshot, has_log=True, searching=False, back_to=back_to)
        self.poller.follow(run_dir.id)
        self._request(self._compare_with_run())
        self.deck.logs.view.open(run_dir)
        self.deck.run_chart.open(series)
        if view is not None and self.state.view not in ("run", view):
            self.deck.go(view)
        return True

    def close_run(self) -> None:
        """From a task back to the run whose result it uses, from any other run to the plan."""
        source = self.state.snapshot.record.source if self.state.snapshot is not None else None
        if self.state.back_to is not None:
            source = None
        self._show_run(partial(self._close_run, source))

    def _show_run(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """The newest takes the place of one that goes on, or has not begun."""
        self.run_worker(work, group="open", exclusive=True)  # type: ignore[arg-type]

    async def _close_run(self, source: str | None) -> None:
        if source is not None and await self._open_run(source):
            return
        self._shown = None
        self.poller.follow(None)
        self.deck.logs.view.open(None)
        self.deck.run_chart.open(None)
        self.store.change(snapshot=None, has_log=False, searching=False)
        if self.state.plan is None:
            self._request(self.client.plan())

    # Actions

    def perform(self, action: Action) -> None:
        """Do it, or say why it cannot be done now."""
        if not action.offered(self.state):
            self.say(f"{action.label}: this console only reads", severity="warning")
            return
        self.deck.take_selection()
        why = action.why_not(self.state)
        if why is not None:
            self.say(f"{action.label}: {why}", severity="warning")
        elif not self.deck.do(action):
            getattr(self, f"do_{action.id}")()

    def palette_entries(self) -> Iterator[PaletteEntry]:
        """A disabled action is listed with its reason, and shows it when chosen."""
        for action in ACTIONS:
            if action.palette and action.offered(self.state):
                why = action.why_not(self.state)
                text = action.help + (f" (now: {why})" if why else "")
                yield PaletteEntry(f"{action.label} ({action.shown_key})", text, partial(self.perform, action))
        for run in self.state.runs or ():
            yield PaletteEntry(f"open {run.id}", f"{run.state}, {run.name}", partial(self.open_run, run.id))

    @property
    def _text_width(self) -> int:
        """Cells of a dialog's lines."""
        return text_width(self.size.width)

    def _confirm(self, dialog: Dialog, agreed: Callable[[], object]) -> None:
        """Do it once a person has agreed. Shown at once: a key typed right behind must reach the dialog."""

        def answered(answer: str | None) -> None:
            if answer is not None:
                agreed()

        self.push_screen(dialog, answered)

    def _request(self, work: Coroutine[Any, Any, object]) -> None:
        self.run_worker(work, group="requests", exit_on_error=True)

    def _open_started(self, work: Coroutine[Any, Any, str | None]) -> None:
        """Show the run that a request has started."""

        async def start() -> None:
            if (run := await work) is not None:
                self.open_run(run)

        self._request(start())

    def do_launch(self) -> None:
        config = self.state.config
        assert config is not None

        def answered(answer: str | None) -> None:
            if answer == "go":
                self._launch(config)
            elif answer == "settings":
                self._ask_settings(config)

        self.push_screen(confirm_launch(self.state, self._text_width), answered)

    def do_enqueue(self) -> None:
        config = self.state.config
        assert config is not None

        form = QueueForm(self.state, self._text_width)
        self._confirm(form, lambda: self._request(self.client.enqueue(config, form.wishes)))

    def do_item_up(self) -> None:
        self._move_item(-1)

    def do_item_down(self) -> None:
        self._move_item(1)

    def _move_item(self, by: int) -> None:
        item, queue = self.state.queued, self.state.queue
        assert item is not None and queue is not None
        movable = [one.id for one in queue.items if one.state in ("waiting", "held")]
        self._request(self.client.change_queue("move", item.id, max(1, movable.index(item.id) + 1 + by)))

    def do_hold_item(self) -> None:
        item = self.state.queued
        assert item is not None
        self._request(self.client.change_queue("release" if item.state == "held" else "hold", item.id))

    def do_cancel_item(self) -> None:
        item = self.state.queued
        assert item is not None

        lines = [pair("effect", "it leaves the queue; its configuration's file stays", self._text_width)]
        dialog = Confirm(f"cancel item {item.id} ({item.name})?", lines, "Cancel it", dangerous=True)
        self._confirm(dialog, lambda: self._request(self.client.change_queue("cancel", item.id)))

    def _launch(self, config: Config, changes: Mapping[str, Any] | None = None) -> None:
        self._first_config = config
        self.store.change(edits=())
        if changes:
            self._first_config = api.with_settings(config, changes, "settings")
            # Read again, the file must not have the former values put over it.
            self.poller.overrides = self._first_config.overrides
        self._open_started(self.client.launch_with(config, changes) if changes else self.client.launch(config))

    def _ask_settings(self, config: Config) -> None:
        effect = f"changes are written into {config.file}" if config.file else "changes are of this launch alone"
        title = f"launch {config.job.name} with these settings?"
        form = SettingsForm(title, config, self._text_width, self.client.plan_of, effect)
        self._confirm(form, lambda: self._launch(config, form.changes))

    def do_again(self) -> None:
        run, snapshot = self.state.used_run, None
        assert run is not None

        async def read() -> Sequence[DialogChoice] | None:
            nonlocal snapshot
            snapshot = await self.client.read_run(run)
            return starts(snapshot, self.state.taken) if snapshot is not None else None

        def chosen(key: str | None) -> None:
            if key == "r":
                self._open_started(self.client.resume(run))
            elif key == "s":
                self._open_started(self._repeat(run, {}))
            elif key == "c":
                self._request(self._ask_changes(run))

        self.push_screen(Choices(f"start {run} again", self.state, self._text_width, read=read), chosen)

    async def _ask_changes(self, run: str) -> None:
        config = await self.client.configuration(run)
        if config is None:
            return
        effect = f"a new run with the configuration of {run}; its file stays as it is"
        title = f"run {run} again with these settings?"
        form = SettingsForm(title, config, self._text_width, self.client.plan_of, effect)
        self._confirm(form, lambda: self._open_started(self._repeat(run, form.changes)))

    async def _repeat(self, run: str, settings: Mapping[str, Any], *, accept_changed: bool = False) -> str | None:
        """Where its data or versions have changed, a person is asked."""
        started, width = await self.client.repeat(run, settings, accept_changed=accept_changed), self._text_width
        if not isinstance(started, InputsChanged):
            return started
        lines = [pair("changed", text, width, style="$warning") for text in started.why.split("; ")]
        lines.append(pair("effect", "a new run with what there is now: its losses cannot be compared exactly", width))
        dialog = Confirm(f"{run} cannot be repeated as it was", lines, "Go on all the same")
        self._confirm(dialog, lambda: self._open_started(self._repeat(run, settings, accept_changed=True)))
        return None

    def do_edit(self) -> None:
        assert self.state.config is not None and self.state.config.file is not None
        self._open_editor(self.state.config.file, None)

    def _open_editor(self, file: Path, line: int | None) -> None:
        """The faults that it leaves are shown once the file has been read again."""
        self._edited_here = True
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        self._in_terminal("the editor", "this machine", f"editing {file}", partial(editor_at, editor, file, line))

    def do_configuration(self) -> None:
        """The values that count, or the faults of the file as it is now."""
        assert self.state.config is not None and self.state.config.file is not None
        self._request(self._show_configuration(self.state.config.file, self.size.width))

    async def _show_configuration(self, file: Path, width: int) -> None:
        chosen = self.state.plan.chosen if self.state.plan is not None else {}

        def read() -> tuple[str, list[Row]]:
            try:
                return file.name, value_rows(api.effective(file, self.poller.overrides, chosen=chosen), width)
            except ConfigError as error:
                return f"{file.name} is refused", fault_rows(api.placed(error), width)

        title, rows = await asyncio.to_thread(read)
        screen = Configuration(title, rows, editable=not self.state.read_only)
        self.push_screen(screen, lambda line: self._open_editor(*line) if line is not None else None)

    def do_models(self) -> None:
        self._show_copies()

    def _show_copies(self, push: str | None = None) -> None:
        assert self.state.config is not None
        if not self.is_screen_installed("copies"):
            made = ModelCopies(self.client, self.state.config, read_only=self.state.read_only)
            self.install_screen(made, "copies")
        screen = self.get_screen("copies", ModelCopies)
        screen.open(self.state.config, push)
        self.push_screen(screen, lambda view: self.deck.go(view) if view is not None else None)

    def do_switch(self) -> None:
        shown = self.state.config.file if self.state.config is not None else None
        self._request(self._switch(shown.parent if shown is not None else Path.cwd(), shown))

    async def _switch(self, folder: Path, shown: Path | None) -> None:
        listed = await asyncio.to_thread(api.configurations, folder)
        files = dict(zip(string.digits[1:] + string.ascii_uppercase, listed, strict=False))
        choices = [
            DialogChoice(key, file.path.name, file.about, "it is shown" if file.path == shown else file.fault or None)
            for key, file in files.items()
        ]
        if choices:
            screen = Choices("configurations", self.state, self._text_width, choices)
            self.push_screen(screen, lambda key: self.poller.read_file(files[key].path) if key is not None else None)
        else:
            self.say(f"no configuration in {folder}: i writes one")

    def do_setup(self) -> None:
        """A key that comes before the engine waits for it."""
        if not self.state.ready:
            self._setup = "waits"
            self.say("set-up opens once the engine is loaded")
            return
        self._setup = ""
        config = self.state.config
        target = config.file if config is not None and config.file is not None else Path.cwd() / "flightdeck.toml"

        def written(file: Path | None) -> None:
            if file is not None:
                self._setup = "written"
                self.poller.read_file(file)

        in_terminal = partial(self._in_terminal, waits=True)
        self.push_screen(Setup(self.client, target, self.state.glyphs, in_terminal), written)

    def do_abort(self) -> None:
        assert self.state.snapshot is not None
        run = self.state.snapshot.record.id

        def show_progress() -> None:
            dialog = Stopping(self.state, lambda: self._request(self.client.abort(run, now=True)))
            self.push_screen(dialog, self._take_answer)

        def abort() -> None:
            if self.state.active:
                self._request(self.client.abort(run, now=False))
                show_progress()

        if self.state.snapshot.stop is not None:
            show_progress()
        else:
            self._confirm(confirm_abort(self.state, self._text_width), abort)

    def do_recheck(self) -> None:
        self._request(self.client.preflight() if self.state.pane == "preflight" else self.client.probe())

    def do_calibrate(self) -> None:
        """Start to measure; while that goes on, stop it."""
        if self._calibrating is not None and not self._calibrating.is_finished:
            self._calibrating.cancel()
        else:
            self._calibrate(quick=False)

    def do_calibrate_quick(self) -> None:
        self._calibrate(quick=True)

    def _calibrate(self, *, quick: bool) -> None:
        self._calibrating = self.run_worker(self.client.calibrate(quick=quick), group="calibration")

    def do_scaling(self) -> None:
        self._calibrating = self.run_worker(self.client.measure_scaling(), group="calibration")

    def do_demo(self) -> None:
        self._request(self._demo())

    async def _demo(self) -> None:
        if (run := await self.client.demo()) is not None:
            self.open_run(run)
        if self.state.config is not None:
            await self.client.probe()

    def do_chat(self) -> None:
        assert self.state.snapshot is not None
        record = self.state.snapshot.record
        self._chat(record.source or record.id)

    def _chat(self, run: str) -> None:
        self._chatted = run
        self.push_screen(Chat(self.client, run))

    def do_use(self) -> None:
        """Opened at once, so that a letter typed right after the key reaches it."""
        run, use = self.state.used_run, None
        assert run is not None

        async def read() -> Sequence[DialogChoice] | None:
            nonlocal use
            use = await self.client.read_use(run)
            return uses(use, self.state) if use is not None else None

        def chosen(key: str | None) -> None:
            if key is not None and use is not None:
                self._use(use, key)

        self.push_screen(Choices(f"use {run}", self.state, self._text_width, read=read), chosen)

    def _use(self, use: RunUse, key: str) -> None:
        if key == "c":
            self._chat(use.run)
        elif key == "e":
            self._ask_task(use, api.TaskRequest("evaluate", divided=True), "eval")
        elif key == "f":
            form = Choices(f"fuse {use.run}", self.state, self._text_width, forms(use))
            self.push_screen(form, lambda form: self._ask_fuse(use, form))
        elif key == "s":
            self._ask_task(use, api.serve_request("127.0.0.1", api.SERVE_PORT), "serve")
        elif key == "F":
            self._request(self.client.fetch(use.run))
        elif key == "p":
            places = Choices(f"publish {use.run}", self.state, self._text_width, PLACES)
            self.push_screen(places, lambda place: self._publish(use, TARGETS.get(place or "")))

    def _ask_fuse(self, use: RunUse, form: str | None) -> None:
        if form is not None:
            options = FORMS[form]
            words = "".join(f" --{name}" + f" {value}" * (value is not True) for name, value in options.items())
            self._ask_task(use, api.TaskRequest("fuse", {"keep": api.KEEP, **options}, divided=None), f"fuse{words}")

    def _ask_task(self, use: RunUse, request: TaskRequest, command: str) -> None:
        dialog = confirm_task(request.kind, use, command, self._text_width)
        self._confirm(dialog, lambda: self._open_started(self.client.start_task(use.run, request)))

    def _publish(self, use: RunUse, target: str | None) -> None:
        """On the Hub only by command: it needs a name there."""

        async def publish(target: str) -> None:
            if commands := await self.client.publish(use.run, target):
                self._show_commands(f"{use.run} is published", commands)

        if target == "hub":
            self._show_commands(f"{use.run} on the Hub", [publish_command(use)])
        elif target is not None:
            self._request(publish(target))

    def _show_commands(self, title: str, commands: Sequence[str]) -> None:
        text = "\n".join(commands)
        lines = pair("in a shell", text, self._text_width)
        self._confirm(Confirm(title, [lines], "Copy"), lambda: self._put_into_clipboard(text))

    def do_skip(self) -> None:
        """Skip the check under the cursor at the next launch, or no longer."""
        check = self.state.selected_check
        assert check is not None
        if check.name in self.state.skips:
            skips = {name: why for name, why in self.state.skips.items() if name != check.name}
            self.store.change(skips=skips)
            return

        def answered(reason: str | None) -> None:
            if reason is not None:
                self.store.change(skips={**self.state.skips, check.name: reason})

        self.push_screen(SkipCheck(check, self._text_width), answered)

    def do_describe(self) -> None:
        if self.state.view != "history":
            self.deck.go("history")
        self.store.change(detail=True)
        assert self.state.run is not None
        self._request(self._describe(self.state.run))

    def on_history_pane_asked(self, message: HistoryPane.Asked) -> None:
        self._request(self._describe(message.run))

    async def _describe(self, run: str) -> None:
        if (read := await self.client.describe(run)) is not None:
            self.deck.history.describe(*read)

    def do_compare(self) -> None:
        self._request(self._compare(self.state.marked))

    async def _compare(self, runs: Sequence[str]) -> None:
        if (read := await self.client.compare(runs)) is not None:
            self.deck.query_one(ComparePane).open(*read)
            self.deck.go("compare")

    def on_history_pane_annotated(self, message: HistoryPane.Annotated) -> None:
        run = self.state.listed.by_id.get(message.run)
        if run is not None:
            tags, note = (message.text.split(), None) if message.kind == "tags" else (None, message.text)
            self._request(self.client.annotate(run, tags=tags, note=note))

    def do_delete_run(self) -> None:
        assert self.state.run is not None
        self._request(self._ask_deletion(self.state.marked or (self.state.run,)))

    async def _ask_deletion(self, runs: Sequence[str]) -> None:
        """Say what it frees first."""
        if deletions := await self.client.delete(runs, go=False):
            measured = [deletion.run for deletion in deletions]
            dialog = confirm_delete(deletions, self._text_width)
            self._confirm(dialog, lambda: self._request(self._delete(measured)))

    async def _delete(self, runs: Sequence[str], *, anyway: bool = False) -> None:
        if not (deletions := await self.client.delete(runs, go=True, anyway=anyway)):
            return
        gone = [deletion.run for deletion in deletions if deletion.deleted]
        self.store.change(marked=tuple(run for run in self.state.marked if run not in gone), detail=False)
        if self._shown in gone:
            self.close_run()
        left = [deletion for deletion in deletions if not deletion.deleted]
        if left:
            kept = [deletion.run for deletion in left]
            dialog = confirm_incomplete(left, self._text_width)
            self._confirm(dialog, lambda: self._request(self._delete(kept, anyway=True)))
        elif gone:
            freed = size(sum(deletion.freed for deletion in deletions))
            self.say(f"deleted {plural(len(gone), 'run')}: {freed} freed")

    def do_fix(self) -> None:
        fix = fix_for(self.state)
        if isinstance(fix, CheckFix):
            self._ask_fix(fix)
        elif isinstance(fix, CableSetup):
            self._ask_setup(fix)
        elif isinstance(fix, HostKeyFix):
            self._ask_key(fix.facts)
        elif isinstance(fix, CopyFix):
            self._show_copies(fix.name)

    def _ask_key(self, facts: NodeFacts) -> None:
        width, offer = self._text_width, facts.host_key
        if offer is not None:
            accept = partial(self.client.accept_host_key, facts.node, offer)
            self._confirm(UnknownKey(facts.node, offer, width), lambda: self._request(accept()))
        elif facts.changed_key is not None:
            self.push_screen(ChangedKey(facts.node, facts.changed_key, self.client.engine.home, width))

    def _ask_fix(self, fix: CheckFix) -> None:
        config = self.state.config
        assert config is not None
        width = self._text_width
        hosts = {node.name: "this machine" if node.local else node.ssh for node in config.nodes}
        again = "Probe again" if self.state.pane == "nodes" else "Check again"

        def run() -> None:
            commands = [FixCommand(node, line, self._clock()) for node, line in fix.commands.items()]
            for command in filter(lambda command: api.asks_for_password(command.line), commands):
                self._run_in_terminal(config, command)
            self._confirm(FixDialog(commands, self.state, width, again), self.do_recheck)
            self._request(self._fix(config, commands))

        asks = any(map(api.asks_for_password, fix.commands.values()))
        self._confirm(confirm_fix(fix, hosts, width, asks=asks), run)

    async def _fix(self, config: Config, commands: Sequence[FixCommand]) -> None:
        """The output is saved; where the dialog was closed, the outcome is a notice."""
        await self.client.fix(config, commands)
        self._show_dialog()
        parts = [f"on {c.node}: {c.line}\n{c.outcome}\n" + "\n".join(c.output) for c in commands]
        path = self._save("\n\n".join(parts), "fix")
        if not isinstance(self.screen, FixDialog):
            outcomes = "; ".join(f"{command.node}: {command.outcome}" for command in commands)
            kept = f" (output in {path})" if path is not None else ""
            succeeded = all(command.succeeded for command in commands)
            self.say(f"fix: {outcomes}{kept}", severity="information" if succeeded else "error")

    def _run_in_terminal(self, config: Config, command: FixCommand) -> None:
        """A fix with sudo, which asks for its password there."""
        notice = f"on {command.node}: {command.line}"
        program = partial(self.client.engine.nodes.fix_argv, config, command.node, command.line)
        command.code = self._in_terminal("the fix", command.node, notice, program, waits=True)
        if command.code is None:
            command.problem = "not run"
        else:
            command.output = ("shown in the terminal",)
        command.ended = True

    def _ask_setup(self, setup: CableSetup) -> None:
        config, engine = self.state.config, self.client.engine
        assert config is not None

        def run() -> None:
            for node, commands in setup.commands.items():
                notice = f"giving the Thunderbolt cables of {node} networks of their own"
                program = partial(engine.nodes.setup_argv, config, node, commands)
                self._in_terminal("the set-up", node, notice, program, waits=True)
            self.do_recheck()

        self._confirm(confirm_setup(setup.commands, self._text_width), run)

    def do_shell(self) -> None:
        config, node, engine = self.state.config, self.state.node, self.client.engine
        assert config is not None and node is not None
        notice = f"a shell on {node}; leave it (exit, ctrl+d) to come back to Flight Deck"
        self._in_terminal("the shell", node, notice, partial(engine.nodes.shell_argv, config, node))

    def _in_terminal(
        self, what: str, node: str, notice: str, program: Callable[[], list[str]], *, waits: bool = False
    ) -> int | None:
        """Hand the terminal over to a program until it ends; its exit code, None when it could not be started. With
        `waits` a person reads what it printed."""
        code = None
        try:
            argv = program()
            with self._suspended():
                print(notice, flush=True)
                code = subprocess.call(["/bin/sh", "-c", _WAITS, "sh", *argv] if waits else argv)
        except SuspendNotSupported:
            self.say(f"this terminal cannot be handed over; in another one: {shlex.join(argv)}", severity="warning")
        except Exception as error:  # InputError, or no such program: the console stays
            self.say(f"{what.removeprefix('the ')}: {error}", severity="error")
        else:
            if code:
                self.say(f"{what} on {node} ended with {code}", severity="warning")
        self.refresh(layout=True)
        return code

    @contextlib.contextmanager
    def _suspended(self) -> Iterator[None]:
        """The terminal is another program's: nothing is read meanwhile, and its ctrl+c does not reach the console."""
        with self.suspend():
            self.poller.pause()
            self.client.stop_telemetry()
            # A handler and not SIG_IGN, which the program would inherit.
            before = signal.signal(signal.SIGINT, lambda *_: None)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, before)
                self.poller.resume()

    def do_freeze(self) -> None:
        frozen = not self.state.frozen
        self.store.change(frozen=frozen)
        self.deck.logs.view.freeze(frozen)
        if not frozen:
            if self._latest is not None:
                self.on_snapshot_taken(self._latest)
            self.store.change(telemetry=self._telemetry)

    def do_copy(self) -> None:
        parts = list(self.deck.pane(self.state.pane).copy_parts().items())
        keys = string.digits[1:] + string.ascii_uppercase
        choices = [
            DialogChoice(key, name, text.partition("\n")[0]) for key, (name, text) in zip(keys, parts, strict=False)
        ]

        def chosen(key: str | None) -> None:
            if key is not None:
                self._copy(parts[keys.index(key)][1])

        if len(parts) == 1:
            self._copy(parts[0][1])
        else:
            self.push_screen(Choices("copy", self.state, self._text_width, choices), chosen)

    def _copy(self, text: str) -> None:
        """To the clipboard, and to a file; in a browser to its clipboard alone."""
        path = None if self.state.read_only else self._save(text, self.state.pane)
        if path is not None or self.state.read_only:
            self._put_into_clipboard(text)
            first, *more = text.splitlines() or [""]
            rest = f" and {plural(len(more), 'more line')}" if more else ""
            self.say(f"copied {shortened(first, 40)!r}{rest}" + (f", and kept in {path}" if path is not None else ""))

    def _put_into_clipboard(self, text: str) -> None:
        if self.is_web or not copy_to_pasteboard(text):
            self.copy_to_clipboard(text)

    def do_save(self) -> None:
        path = self._save(self.deck.pane(self.state.pane).text(), self.state.pane)
        if path is not None:
            self.say(f"saved to {path}")

    def do_export_chart(self) -> None:
        self._request(self._export_chart(self.deck.chart))

    async def _export_chart(self, chart: Chart) -> None:
        record = self.state.snapshot.record if self.state.snapshot is not None else None
        title = f"{record.name} ({record.id})" if record is not None else ""
        title = self.deck.pane("compare").title(self.state) if self.state.view == "compare" else title

        def write() -> Path:
            pictures = chart.read_pictures(COLUMNS)
            path = new_file(self.client.engine.home / "saved", "chart", self._clock(), ".svg")
            write_chart(pictures, title, path)
            if png_possible():
                write_chart(pictures, title, path.with_suffix(".png"))
            return path

        try:
            path = await asyncio.to_thread(write)
        except ENGINE_ERRORS as error:
            self.say(f"the chart could not be saved: {error}", severity="error")
        else:
            self.say(f"saved to {path}" + (" and .png" if png_possible() else f"; {NO_PNG}"))

    def _save(self, text: str, name: str) -> Path | None:
        if not self.state.ready:
            self.say("the engine is still loading", severity="warning")
            return None
        try:
            return save_text(text, self.client.engine.home / "saved", name, self._clock())
        except OSError as error:
            self.say(f"could not be saved: {error}", severity="error")
            return None

    def do_notify_test(self) -> None:
        config = self.state.config
        assert config is not None
        self._request(self.client.test_notifications(config))

    def do_help(self) -> None:
        self.push_screen(Help(self.state))

    def do_palette(self) -> None:
        self.action_command_palette()

    def do_quit(self) -> None:
        """Leave the console; runs go on, and a line on the terminal names them, as one does a copy, which does not."""
        running = [run.id for run in self.state.listed.active]
        if self.state.active and self.state.snapshot is not None and self.state.snapshot.record.id not in running:
            running.insert(0, self.state.snapshot.record.id)
        lines = [f"{', '.join(running)} goes on; flightdeck shows it again, flightdeck abort stops it"] * bool(running)
        if self.is_screen_installed("copies") and (begun := self.get_screen("copies", ModelCopies).begun):
            lines.append(f"{begun} was under way; flightdeck models shows what is there")
        self.exit(message=Text("\n".join(lines)) if lines else None)

    async def action_quit(self) -> None:
        self.do_quit()

    def do_suspend(self) -> None:
        """As the terminal does for a program that leaves ctrl+z to it: the whole job is stopped, until `fg`."""
        if self._driver is not None and self._driver.can_suspend:
            os.killpg(0, signal.SIGTSTP)
        else:
            self.say("this terminal cannot suspend a program", severity="warning")

    def action_suspend(self) -> None:
        self.do_suspend()

    def action_help_quit(self) -> None:
        """ctrl+c."""
        self.say(f"q quits the console (the run goes on){self.state.key('; ctrl+x aborts the run')}")


def save_text(text: str, directory: Path, name: str, now: datetime) -> Path:
    """Write `text` to a new 0600 file below `directory` and return its path."""
    path = new_file(directory, name, now, ".txt")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")
    return path


def new_file(directory: Path, name: str, now: datetime, suffix: str) -> Path:
    """A path below `directory` (made 0700 when missing) that is not taken."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    stem = f"{name}-{now:%Y%m%d-%H%M%S}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for free in names if not (path := directory / f"{free}{suffix}").exists())


def copy_to_pasteboard(text: str) -> bool:
    """Put `text` on a local Mac's pasteboard; False elsewhere, where OSC 52 asks the terminal to."""
    if sys.platform != "darwin" or "SSH_CONNECTION" in os.environ:
        return False
    try:
        done = subprocess.run(["pbcopy"], input=text.encode(), timeout=2, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def run_console(
    engine: Engine | Callable[[], Engine],
    config: Config | Path | None,
    overrides: Mapping[str, Any] = {},
    *,
    start: Config | None = None,
    slow_link: bool = False,
    read_only: bool = False,
) -> int:
    """Open the console and stay until it is left; returns its exit code, 1 after a crash, 128+n after a signal.

    `engine` may be a function and `config` a path, with other values of some of its keys (`overrides`): both are then
    loaded after the first paint, off the app's loop. `start` is launched at once; else the newest active run is shown.
    With `read_only` nothing can be changed.
    """
    prepare(sys.__stderr__, cells=True)  # where Textual draws
    app = FlightDeckApp(engine, config, overrides, start=start, slow_link=slow_link, read_only=read_only)
    asyncio.run(_run_with_signals(app))
    return app.return_code or 0


async def _run_with_signals(app: FlightDeckApp) -> None:
    """A signal leaves in order, so that the terminal is restored, from before the app takes it; the exit code is a
    shell's for the signal."""
    loop = asyncio.get_running_loop()

    def leave(number: int) -> None:
        # An app that is to exit mounts nothing any more, and a screen without its widgets would crash.
        if app.screen_stack and app.screen.is_mounted:
            app.exit(return_code=128 + number)
        else:
            loop.call_later(0.01, leave, number)

    def received(number: int, _: object) -> None:
        # A thread, and no handler of the loop's: under a flood of keys Textual's queues keep the loop for themselves.
        timer = threading.Timer(LEAVING_S, _leave_now, (app, 128 + number))
        timer.daemon = True
        timer.start()
        loop.call_soon_threadsafe(leave, number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, received)
    await app.run_async()


def _leave_now(app: FlightDeckApp, code: int) -> None:
    """End the process with keys still unread, of which a terminal that is gone may have left thousands."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        descriptor = sys.__stdin__.fileno() if sys.__stdin__ is not None else 0
        # A terminal that nobody reads must not hold this up.
        os.set_blocking(descriptor, False)
        if (before := getattr(app._driver, "attrs_before", None)) is not None:
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
        os.write(descriptor, _RESTORE)
        os.set_blocking(descriptor, True)
    os._exit(code)
