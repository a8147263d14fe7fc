"""The scenes: which runs there are, which keys were pressed, what must be on the screen before the picture is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from textual.pilot import Pilot

from engine.events import RunSnapshot
from tests.tui import fake_engine as situation
from tests.tui.conftest import Console
from tests.tui.fake_engine import NOW, FakeEngine
from tui.app import FlightDeckApp
from tui.glyphs import Glyphs

# Times on the screen are local; the pictures are of one place wherever they are drawn.
os.environ["TZ"] = "UTC"
time.tzset()

SIZES: Final = ((80, 24), (120, 36), (200, 50))
TERMINALS: Final = {f"{width}x{height}": (width, height) for width, height in SIZES}

Runs = Callable[[], list[RunSnapshot]]


def everything() -> list[RunSnapshot]:
    """A run that goes on and three that have ended."""
    return [situation.running(), situation.failed(), situation.aborted(), situation.succeeded()]


def ended() -> list[RunSnapshot]:
    return everything()[1:]


async def _settled(console: Console) -> None:
    """Wait until nothing on the screen changes any more."""
    seen = ""
    while seen != (seen := console.screen):
        await console.pilot.pause(0.25)


@dataclass(frozen=True)
class Scene:
    """One picture."""

    name: str
    runs: Runs
    shows: str
    """On the screen when the picture may be taken."""
    keys: tuple[str, ...] = ()
    follow: str | None = None
    configured: bool = True
    ascii: bool = False

    def open(self, home: Path) -> tuple[FlightDeckApp, Callable[[Pilot[int]], Awaitable[None]]]:
        """The app, and what brings it to the scene."""
        engine = FakeEngine(home).add(*self.runs())
        config = situation.configuration() if self.configured else None
        app = FlightDeckApp(engine.engine, config, follow=self.follow, clock=lambda: NOW)
        app.state = app.state.__class__(now=NOW, glyphs=Glyphs(ascii=self.ascii))

        async def reach(pilot: Pilot[int]) -> None:
            console = Console(app, pilot)
            await console.until(lambda: app.state.ready and app.state.runs is not None, "the engine")
            await console.until(lambda: not app.state.probing and app.bridge.caught_up, "the run")
            await pilot.press(*self.keys)
            await console.shows(self.shows)
            await _settled(console)

        return app, reach


PICTURED: Final = (
    Scene("dashboard-idle", ended, "ready to launch"),
    Scene("dashboard-running", everything, "step 41/60"),
    Scene("dashboard-failed", ended, "first cause", follow="demo-0314-134500"),
    Scene("nodes", everything, "round trip", ("1",)),
    Scene("preflight", everything, "python 3.11.9 mlx 0.32.4", ("2",)),
    Scene("calibration", everything, "not measured", ("3",)),
    Scene("run", everything, "rank 1 ", ("4",)),
    Scene("history", everything, "user_abort", ("5", "j")),
)
"""Drawn at every size, for the README too."""

OTHERS: Final = (
    Scene("starting", lambda: [situation.starting()], "▶ preflight"),
    Scene("aborted", ended, "■ aborted", follow="demo-0314-132000"),
    Scene("succeeded", ended, "✓ succeeded  60", follow="demo-0313-091500"),
    Scene("empty-history", list, "no runs yet", ("5",)),
    Scene("launch", ended, "mlx.launch starts 2 ranks", ("n",)),
    Scene("abort", everything, "Abort the run", ("ctrl+x",)),
    Scene("stopping", lambda: [situation.stopping("term", (0,))], "has left", ("ctrl+x",)),
    Scene("help", everything, "Launch the plan", ("question_mark",)),
    Scene("welcome", list, "Run the demo", configured=False),
    Scene("ascii", everything, "step 41/60", ascii=True),
)
"""Kept beside the tests; drawn at every size too."""
