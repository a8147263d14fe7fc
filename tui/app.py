"""The console's app: it holds the state, takes what the bridge posts, and turns actions into requests to the engine.

Imports stay small here: the engine (pydantic, the store) is loaded by the bridge's thread after the first paint.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Final

from rich.text import Text
from textual.app import App, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.events import Event, InputEvent
from textual.worker import Worker

from tui import clipboard
from tui.actions import Action
from tui.bridge import POLL_S, Bridge
from tui.engine_loop import BATCH_S, EngineLoop
from tui.formatting import plural, shortened
from tui.glyphs import Glyphs, utf8_terminal
from tui.mending import Fix, Key, mending
from tui.messages import EngineFailed, EngineReady, RunsRead, SnapshotTaken, Trouble
from tui.palette import Commands
from tui.requests import abort, accept_host_key, calibrate, demo, fix, launch, listen, plan, preflight, probe
from tui.screens import confirm, fixing
from tui.screens.deck import DeckScreen
from tui.screens.dialog import text_width
from tui.screens.fixing import Command, Fixing
from tui.screens.help import Help
from tui.screens.host_key import ChangedKey, UnknownKey
from tui.screens.stopping import Stopping
from tui.screens.welcome import Welcome
from tui.state import ENDED, DeckState
from tui.tidying import Tidying

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.models import NodeFacts, NodeTelemetry
    from engine.session import Engine

SLOW_POLL_S: Final = 0.5
"""Between two looks at a run over a slow link."""
TICK_S: Final = 1.0
"""How often ages are drawn anew."""
NOTE_S: Final = 6.0
LINGER_S: Final = 5.0
"""Telemetry goes on for so long when nobody looks any more: views are changed faster than nodes are asked."""

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    return datetime.now(UTC)


class FlightDeckApp(App[int]):
    """The console. `start` is launched at once; `follow` names a run to show first."""

    TITLE = "MLX Flight Deck"
    CSS_PATH = "app.tcss"
    COMMANDS: ClassVar[set[Any]] = {Commands}
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "leave", show=False, priority=True),
        Binding("ctrl+c", "leave_hint", show=False),
    ]

    def __init__(
        self,
        engine: Engine | Callable[[], Engine],
        config: FlightConfig | Path | None = None,
        *,
        start: FlightConfig | None = None,
        follow: str | None = None,
        slow_link: bool = False,
        clock: Clock = utc_now,
    ) -> None:
        super().__init__()
        self.clock = clock
        self.slow_link = slow_link
        self.engine: Engine | None = None
        self._start = start
        self._follow = follow
        self._greeted = False
        self._latest: SnapshotTaken | None = None
        self._shown: str | None = None
        self._due = False
        self.bridge = Bridge(
            engine if callable(engine) else lambda: engine,
            start if config is None else config,
            self.post_message,
            poll_s=SLOW_POLL_S if slow_link else POLL_S,
        )
        self.engine_loop = EngineLoop()
        self._tidying = Tidying()
        self._listening: Worker[None] | None = None
        self._calibrating: Worker[None] | None = None
        self._listened_to: FlightConfig | None = None
        self._wanted_at = 0.0
        self._heard: dict[str, NodeTelemetry] = {}
        if slow_link:
            self.animation_level = "none"
        self.state = DeckState(now=clock(), glyphs=Glyphs(ascii=not utf8_terminal()))

    def get_default_screen(self) -> DeckScreen:
        return DeckScreen()

    @property
    def deck(self) -> DeckScreen:
        """The screen below any dialog."""
        deck = self.screen_stack[0]
        assert isinstance(deck, DeckScreen)
        return deck

    def on_mount(self) -> None:
        self.set_interval(TICK_S, self._tick)
        self.call_after_refresh(self._start_reading)

    def _start_reading(self) -> None:
        self.set_timer(0.02, self.bridge.start)

    async def on_event(self, event: Event) -> None:
        if isinstance(event, InputEvent):
            self._tidying.typed()
        await super().on_event(event)

    async def on_unmount(self) -> None:
        self._tidying.end()
        self.bridge.stop()
        await self.engine_loop.stop(self.engine.close if self.engine is not None else None)

    def change(self, **changes: Any) -> None:
        """Replace parts of the state; what is on the screen is drawn once, however many changes come together."""
        if all(getattr(self.state, name) is value for name, value in changes.items()):
            return
        self.state = replace(self.state, **changes)
        if not self._due:
            self._due = True
            self.call_next(self._show)

    def _show(self) -> None:
        self._due = False
        if not self.screen_stack or not self.deck.is_mounted:
            return
        self.deck.show(self.state)
        if isinstance(self.screen, (Stopping, Fixing)):
            self.screen.show(self.state)

    def _tick(self) -> None:
        self._tidying.tick()
        self.tend_telemetry()
        if not self.state.frozen:
            self.change(now=self.clock())

    def tend_telemetry(self) -> None:
        """Telemetry is on while the nodes are on the screen or a run goes on, and not otherwise."""
        config, engine = self.state.config, self.engine
        # The clock ticks until the end, when the screens have gone already.
        if config is None or engine is None or not self.screen_stack:
            return
        if self._listened_to is not config:
            self.stop_listening()
        if self.state.running is not None or self.deck.nodes_shown:
            self._wanted_at = monotonic()
            if self._listening is None:
                every_s = SLOW_POLL_S if self.slow_link else BATCH_S
                self._listening = self.run_worker(listen(self, config, every_s), group="telemetry")
                self._listened_to = config
        elif monotonic() - self._wanted_at > LINGER_S:
            self.stop_listening()
        self.change(listening=self._listening is not None)

    def stop_listening(self) -> None:
        """End telemetry, on the nodes too; it begins anew when it is wanted."""
        if self._listening is not None:
            self._listening.cancel()
            self._listening = None

    def heard(self, newest: dict[str, NodeTelemetry]) -> None:
        """The newest telemetry of each node."""
        self._heard = newest
        if not self.state.frozen:
            self.change(telemetry=newest)

    def say(self, text: str, *, severity: str = "information") -> None:
        """One plain line in a corner, for a few seconds."""
        self.notify(text, severity=severity, timeout=NOTE_S, markup=False)  # type: ignore[arg-type]

    # What the bridge posts

    def on_engine_ready(self, message: EngineReady) -> None:
        self.engine = message.engine
        config = message.config
        self._tidying.begin()
        facts = {facts.node: facts for facts in message.facts}
        self.change(ready=True, config=config, not_checked=message.not_checked, facts=facts, outlook=message.outlook)
        if config is not None:
            if config.ui.theme in self.available_themes:
                self.theme = config.ui.theme
            if config.ui.ascii:
                self.change(glyphs=Glyphs(ascii=True))
            self.set_class(self.state.glyphs.ascii, "-ascii")
            self._request(probe(self))
            self.tend_telemetry()
        if self._start is not None:
            self._greeted = True
            self._request(launch(self, self._start))
        elif self._follow is not None:
            self._greeted = True
            self.open_run(self._follow)

    def on_engine_failed(self, message: EngineFailed) -> None:
        """The faults go to the terminal, one line each, where they can be read beside the file."""
        self.exit(message.exit_code, message=Text(message.fault))

    def on_snapshot_taken(self, message: SnapshotTaken) -> None:
        self._latest = message
        if message.run == self._shown and not self.state.frozen:
            self.change(snapshot=message.snapshot, now=self.clock())

    def on_runs_read(self, message: RunsRead) -> None:
        if not self.state.frozen:
            self.change(runs=message.runs)
        if not self._greeted:
            self._greeted = True
            self._greet(message)

    def _greet(self, message: RunsRead) -> None:
        """What is shown first: the newest run that goes on, else the plan; a welcome where there is neither."""
        active = next((run for run in message.runs if run.state not in ENDED), None)
        if active is not None:
            self.open_run(active.id)
        elif self.state.config is None:
            self.push_screen(Welcome(), self._welcomed)

    def _welcomed(self, answer: str | None) -> None:
        if answer == "demo":
            self._request(demo(self))
        elif answer == "quit":
            self.do_quit()

    def on_trouble(self, message: Trouble) -> None:
        self.say(message.text, severity="warning")

    # The shown run

    def open_run(self, run: str) -> None:
        """Show a run on the dashboard, and follow it while it goes on."""
        assert self.engine is not None
        try:
            run_dir = self.engine.find(run)
        except Exception as error:  # RunNotFound, or a store that cannot be read: said, and the plan stays
            self.say(str(error), severity="error")
            return
        self._shown = run_dir.id
        self.change(snapshot=None, has_log=True, searching=False)
        self.bridge.follow(run_dir.id)
        self.deck.logs.open(run_dir)
        if self.deck.state.view != "run":
            self.deck.go("dashboard")

    def close_run(self) -> None:
        """Back to the plan."""
        self._shown = None
        self.bridge.follow(None)
        self.deck.logs.open(None)
        self.change(snapshot=None, has_log=False, searching=False)
        if self.state.plan is None:
            self._request(plan(self))

    # Actions

    def perform(self, action: Action) -> None:
        """Do it, or say why it cannot be done now."""
        self.deck.take_selection()
        why = action.why_not(self.state)
        if why is not None:
            self.say(f"{action.label}: {why}", severity="warning")
        elif not self.deck.do(action):
            getattr(self, f"do_{action.id}")()

    def _request(self, work: Coroutine[Any, Any, None]) -> None:
        self.run_worker(work, group="requests", exit_on_error=True)

    def do_launch(self) -> None:
        config = self.state.config
        assert config is not None

        def answered(go: bool | None) -> None:
            if go:
                self._request(launch(self, config))

        self.push_screen(confirm.launch(self.state, text_width(self.size.width)), answered)

    def do_abort(self) -> None:
        assert self.state.snapshot is not None
        run = self.state.snapshot.record.id

        def answered(go: bool | None) -> None:
            if go and self.state.active:
                self._request(abort(self, run, now=False))
                self.push_screen(Stopping(self.state, lambda: self._request(abort(self, run, now=True))))

        if self.state.snapshot.stop is not None:
            self.push_screen(Stopping(self.state, lambda: self._request(abort(self, run, now=True))))
        else:
            self.push_screen(confirm.abort(self.state, text_width(self.size.width)), answered)

    def do_recheck(self) -> None:
        self._request(preflight(self) if self.state.pane == "preflight" else probe(self))

    def do_calibrate(self) -> None:
        """Begin to measure; while that goes on, stop it."""
        if self._calibrating is not None and not self._calibrating.is_finished:
            self._calibrating.cancel()
        else:
            self._measure(quick=False)

    def do_calibrate_quick(self) -> None:
        self._measure(quick=True)

    def _measure(self, *, quick: bool) -> None:
        self._calibrating = self.run_worker(calibrate(self, quick=quick), group="calibration")

    def do_demo(self) -> None:
        self._request(demo(self))

    def do_mend(self) -> None:
        """Ask about the fix or the host key of what is selected."""
        found = mending(self.state)
        if isinstance(found, Fix):
            self._ask_fix(found)
        elif isinstance(found, Key):
            self._ask_key(found.facts)

    def _ask_key(self, facts: NodeFacts) -> None:
        assert self.engine is not None
        width, offer = text_width(self.size.width), facts.host_key

        def answered(go: bool | None) -> None:
            if go and offer is not None:
                self._request(accept_host_key(self, facts.node, offer))

        if offer is not None:
            self.push_screen(UnknownKey(facts.node, offer, width), answered)
        elif facts.changed_key is not None:
            self.push_screen(ChangedKey(facts.node, facts.changed_key, self.engine.home, width))

    def _ask_fix(self, found: Fix) -> None:
        config = self.state.config
        assert config is not None
        width = text_width(self.size.width)
        hosts = {node.name: "this machine" if node.local else node.ssh for node in config.nodes}
        again = "Probe again" if self.state.pane == "nodes" else "Check again"

        def answered(go: bool | None) -> None:
            if go:
                commands = [Command(node, line, self.clock()) for node, line in found.commands.items()]
                self.push_screen(Fixing(commands, self.state, width, again), done)
                self._request(fix(self, config, commands))

        def done(answer: str | None) -> None:
            if answer == "again":
                self.do_recheck()

        self.push_screen(fixing.ask(found.check, found.commands, hosts, width), answered)

    def fixing(self) -> None:
        """A command has come to something."""
        if isinstance(self.screen, Fixing):
            self.screen.show(self.state)

    def fixed(self, commands: Sequence[Command]) -> None:
        """All have ended: what they printed is kept, and said where nobody looks any more."""
        said = [f"on {c.node}: {c.line}\n{c.told}\n" + "\n".join(c.output) for c in commands]
        path = self._save("\n\n".join(said), "fix")
        told = "; ".join(f"{command.node}: {command.told}" for command in commands)
        kept = f" (output in {path})" if path is not None else ""
        if not isinstance(self.screen, Fixing):
            self.say(f"fix: {told}{kept}", severity="information" if all(c.good for c in commands) else "error")

    def do_shell(self) -> None:
        """Hand the terminal to a shell on the selected node until that ends."""
        config, node = self.state.config, self.state.node
        assert self.engine is not None and config is not None and node is not None
        try:
            argv = self.engine.shell_argv(config, node)
            with self._handed_over():
                print(f"a shell on {node}; leave it (exit, ctrl+d) to come back to Flight Deck", flush=True)
                code = subprocess.call(argv)
        except SuspendNotSupported:
            self.say(f"this terminal cannot be handed over; in another one: {' '.join(argv)}", severity="warning")
        except Exception as error:  # InputError, or no such program: said, and the console stays
            self.say(f"shell: {error}", severity="error")
        else:
            if code:
                self.say(f"the shell on {node} ended with {code}", severity="warning")
        self.refresh(layout=True)

    @contextlib.contextmanager
    def _handed_over(self) -> Iterator[None]:
        """The terminal is another program's: nothing is read or heard meanwhile, and its ctrl+c is not ours."""
        with self.suspend():
            self.bridge.pause()
            self.stop_listening()
            # A handler and not SIG_IGN, which the program would inherit.
            before = signal.signal(signal.SIGINT, lambda *_: None)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, before)
                self.bridge.resume()

    def do_freeze(self) -> None:
        frozen = not self.state.frozen
        self.change(frozen=frozen)
        self.deck.logs.freeze(frozen)
        if not frozen and self._latest is not None:
            self.on_snapshot_taken(self._latest)
        if not frozen:
            self.heard(self._heard)

    def do_copy(self) -> None:
        text = self.deck.pane(self.state.pane).copy_text()
        path = self._save(text, self.state.pane)
        if path is not None:
            if not clipboard.pasteboard(text):
                self.copy_to_clipboard(text)
            first, *more = text.splitlines() or [""]
            rest = f" and {plural(len(more), 'more line')}" if more else ""
            self.say(f"copied {shortened(first, 40)!r}{rest}, and kept in {path}")

    def do_save(self) -> None:
        path = self._save(self.deck.pane(self.state.pane).text(), self.state.pane)
        if path is not None:
            self.say(f"saved to {path}")

    def _save(self, text: str, name: str) -> Path | None:
        if self.engine is None:
            self.say("the engine is still loading", severity="warning")
            return None
        try:
            return clipboard.save(text, self.engine.home / "saved", name, self.clock())
        except OSError as error:
            self.say(f"could not be saved: {error}", severity="error")
            return None

    def do_help(self) -> None:
        self.push_screen(Help(self.state))

    def do_palette(self) -> None:
        self.action_command_palette()

    def do_quit(self) -> None:
        """Leave the console; runs go on, and it says so."""
        running = [run.id for run in self.state.runs or () if run.state not in ENDED]
        if self.state.active and self.state.snapshot is not None and self.state.snapshot.record.id not in running:
            running.insert(0, self.state.snapshot.record.id)
        said = (
            f"{', '.join(running)} goes on; flightdeck shows it again, flightdeck abort stops it" if running else None
        )
        self.exit(0, message=Text(said) if said else None)

    async def action_quit(self) -> None:
        self.do_quit()

    def action_leave(self) -> None:
        self.do_quit()

    def action_leave_hint(self) -> None:
        self.say("q quits the console (the run goes on); ctrl+x aborts the run")


def run_console(
    engine: Engine | Callable[[], Engine],
    config: FlightConfig | Path | None,
    *,
    start: FlightConfig | None = None,
    follow: str | None = None,
    slow_link: bool = False,
) -> int:
    """Open the console and stay until it is left; returns the exit code.

    `engine` may be a function and `config` a path: both are then loaded after the first paint, off the app's loop.
    `start` is launched at once; `follow` is the run to show (else the newest that has not ended).
    """
    return FlightDeckApp(engine, config, start=start, follow=follow, slow_link=slow_link).run() or 0
