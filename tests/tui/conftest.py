"""The console on an engine of constructed states."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from textual._compositor import Compositor
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.pilot import Pilot

from tests.bundles import link_bundle
from tests.tui.fake_engine import NOW, FakeEngine, configuration
from tui import app as app_module
from tui.app import FlightDeckApp
from tui.gc_pauses import GcScheduler

DASHBOARD = (120, 36)
SMALL = (80, 24)
WIDE = (160, 45)
SIZES = (SMALL, pytest.param(DASHBOARD, marks=pytest.mark.slow), WIDE)
"""The middle one shows little that the others do not."""
SIZE = (SMALL, *(pytest.param(size, marks=pytest.mark.slow) for size in (DASHBOARD, WIDE)))
"""For what keys do, which no size changes: the smallest has the least room for what is said of it."""
PATIENCE_S = 60.0
"""A run of real ranks may need some of it."""


class NoGcScheduler(GcScheduler):
    """Leaves garbage to the interpreter: hundreds of consoles in one process need no full collection each."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def no_gc_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one has tests of its own, and is in the consoles on a cluster and in every terminal."""
    monkeypatch.setattr(app_module, "GcScheduler", NoGcScheduler)


@pytest.fixture(autouse=True)
def no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console without a terminal draws its frames for nobody: a third of what it costs. `Console.screen` draws the
    whole screen when it is asked for; the consoles of pictures and those in real terminals draw every frame."""
    draw = Compositor.render_update

    def render_update(self: Compositor, full: bool = False, **arguments: Any) -> Any:
        if full:
            return draw(self, full=True, **arguments)
        self._dirty_regions.clear()
        return None

    monkeypatch.setattr(Compositor, "render_update", render_update)


PARSED: dict[tuple[object, ...], list[RuleSet]] = {}


@pytest.fixture(autouse=True)
def no_rule_is_parsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A console parses its rules of style at its start, and anew for each theme: those of one text and one set of
    variables are shared by all, as they are within one console."""
    parse = Stylesheet._parse_rules

    def parse_once(self: Stylesheet, css: str, **source: Any) -> list[RuleSet]:
        key = (css, *source.items(), *self._variables.items())
        if key not in PARSED:
            PARSED[key] = parse(self, css, **source)
        return PARSED[key]

    monkeypatch.setattr(Stylesheet, "_parse_rules", parse_once)


@pytest.fixture
def home(home: Path) -> Path:
    """A FLIGHTDECK_HOME of the test's own; this machine has the node bundle."""
    link_bundle(home / "node")
    return home


@pytest.fixture
def fake(tmp_path: Path) -> FakeEngine:
    return FakeEngine(tmp_path / "home")


class Console:
    """An open console with what a test asks of it."""

    def __init__(self, app: FlightDeckApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot
        self._frames = 0
        display = app._display

        def counted(*frame: Any) -> None:
            self._frames += 1
            display(*frame)

        app._display = cast(Any, counted)  # type: ignore[method-assign]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def check(self) -> None:
        """Ask for a preflight in its view, and wait for its end."""
        await self.press("2", "r")
        await self.until(lambda: self.app.state.checks_at is not None and self.app.state.busy is None, "the preflight")

    async def until(self, holds: Callable[[], bool], what: str = "") -> None:
        """Wait until `holds`, by condition and not by time."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if holds():
                await self.pilot.pause()
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"never came: {what or holds}\n{self.screen}")

    @property
    def screen(self) -> str:
        """The screen as plain text."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text for strip in strips)

    @property
    def notifications(self) -> list[str]:
        """The notifications so far."""
        return [notification.message for notification in self.app._notifications]

    @property
    def on_deck(self) -> bool:
        """No dialog is open."""
        return len(self.app.screen_stack) == 1

    async def shows(self, text: str) -> None:
        drawn = None

        def there() -> bool:
            # Drawing the whole screen takes long: it is looked at again only after another frame.
            nonlocal drawn
            before, drawn = drawn, self._frames
            return before != drawn and text in self.screen

        await self.until(there, f"{text!r} on the screen")


@asynccontextmanager
async def opened(fake: FakeEngine, *, size: tuple[int, int] = DASHBOARD, **arguments: Any) -> AsyncIterator[Console]:
    """The console, open, its engine loaded and the runs read."""
    arguments.setdefault("config", configuration())
    app = FlightDeckApp(fake.engine, clock=lambda: NOW, **arguments)
    async with app.run_test(size=size) as pilot:
        console = Console(app, pilot)
        await console.until(lambda: app.state.ready and app.state.runs is not None, "the engine")
        await console.until(lambda: not app.state.probing, "the probe")
        try:
            yield console
        finally:
            # As at a console's own end: `run_test` takes the screens away below requests that go on.
            app.workers.cancel_all()
