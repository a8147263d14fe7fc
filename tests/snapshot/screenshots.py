"""The screenshots: the runs, the keys that were pressed, and what must be on the screen before each is taken."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from textual.pilot import Pilot
from textual.strip import Strip

from engine.models import NodeFacts, RunState
from engine.snapshots import NodeCondition, RunSnapshot
from tests.tui import fake_engine, macs
from tests.tui.conftest import Console
from tests.tui.fake_engine import NOW, FakeEngine
from tui.app import FlightDeckApp
from tui.glyphs import Glyphs
from tui.state import DeckState
from tui.widgets.chart import Chart
from tui.widgets.log_view import LogView

# Times on the screen are local; the pictures are of one place wherever they are drawn.
os.environ["TZ"] = "UTC"
time.tzset()

SIZES: Final = ((80, 24), (120, 36), (200, 50))
TERMINALS: Final = {f"{width}x{height}": (width, height) for width, height in SIZES}

Runs = Callable[[], list[RunSnapshot]]


def everything() -> list[RunSnapshot]:
    """A run that goes on and three that have ended."""
    return [fake_engine.running(), fake_engine.failed(), fake_engine.aborted(), fake_engine.succeeded()]


def ended() -> list[RunSnapshot]:
    return everything()[1:]


def earlier() -> list[RunSnapshot]:
    """One of the day before, which is not shown first."""
    return [fake_engine.succeeded()]


def used() -> list[RunSnapshot]:
    """A run that has left an adapter, and two tasks on it."""
    evaluation = fake_engine.task("evaluate", RunState.SUCCEEDED, *fake_engine.evaluated("base", "adapter"))
    return [fake_engine.refused(), evaluation, fake_engine.failed(), fake_engine.trained()]


def answering() -> list[RunSnapshot]:
    """A run whose prompts are answered while it trains."""
    return [fake_engine.sampled(), *ended()]


def incomplete() -> list[NodeFacts]:
    """A chain with a computer of somebody else's at one end."""
    return macs.facts(cables=[(0, 1), (1, 2), (2, 3)], stranger=True)


def _third(change: Callable[[NodeFacts], NodeFacts]) -> list[NodeFacts]:
    """The third Mac is not as it should be."""
    return [change(facts) if facts.node == "mini" else facts for facts in macs.facts()]


def unknown_key() -> list[NodeFacts]:
    return _third(macs.unknown_key)


def unreachable() -> list[NodeFacts]:
    """The last Mac does not answer, and the second's clock is off."""
    first, second, third, last = macs.facts()
    return [first, second.model_copy(update={"clock_skew_s": -2.4}), third, macs.unreachable(last)]


def divided() -> list[RunSnapshot]:
    """A run that goes on with the shares of a calibration."""
    return [replace(fake_engine.running(), division=fake_engine.division()), *ended()]


def away() -> RunSnapshot:
    """A run whose second node its supervisor cannot reach."""
    run = fake_engine.running()
    link = NodeCondition("unreachable", fake_engine.ago(25), "no answer from its agent")
    return replace(run, ranks=(run.ranks[0], replace(run.ranks[1], link=link)))


async def _settled(console: Console) -> None:
    """Wait until no plot is to be redrawn and two drawings are alike, colours included."""
    seen: list[Strip] = []
    while seen != (seen := console.app.screen._compositor.render_strips()) or any(
        not chart.settled for chart in console.app.deck.query(Chart)
    ):
        # On a busy machine its own interval is late.
        for log in console.app.deck.query(LogView):
            log._refresh()
        await console.pilot.pause(0.25)


def _probed(state: DeckState) -> bool:
    """The first probe and the plan after it have ended; under load they start late."""
    return state.config is None or (state.topology is not None and not (state.probing or state.planning))


@dataclass(frozen=True)
class Screenshot:
    name: str
    runs: Runs
    shows: str
    """On the screen when the picture may be taken."""
    keys: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    """Pressed besides on the smallest screen."""
    follow: str | None = None
    configured: bool = True
    ascii: bool = False
    calibrated: bool = False
    """There are a calibration and a scaling."""
    studio: Callable[[], list[NodeFacts]] | None = None
    """A cluster of Macs in place of the demo's local ranks."""

    def open(self, home: Path) -> tuple[FlightDeckApp, Callable[[Pilot[None]], Awaitable[None]]]:
        """The app, and what brings it to what the screenshot shows."""
        engine = FakeEngine(home).add(*self.runs())
        config = fake_engine.configuration() if self.configured else None
        if self.calibrated:
            engine.taken, engine.scaled = fake_engine.calibration(), fake_engine.scaling(speed_ups=(1.0, 1.58))
        if self.studio is not None:
            engine.found, config = self.studio(), macs.configuration()
            engine.values = macs.telemetry()
        engine.kept = list(fake_engine.CONVERSATION)
        engine.serving.set()
        app = FlightDeckApp(engine.engine, config, follow=self.follow, clock=lambda: NOW)
        app.store.state = app.state.__class__(now=NOW, glyphs=Glyphs(ascii=self.ascii))

        async def reach(pilot: Pilot[None]) -> None:
            console = Console(app, pilot)
            await console.until(lambda: app.state.ready and app.state.runs is not None, "the engine")
            await console.until(lambda: _probed(app.state), "the plan")
            await console.until(lambda: app.poller.caught_up, "the run")
            await pilot.press(*self.keys, *(self.narrow if app.size.width < 100 else ()))
            expected = len(engine.values)
            if app.deck.nodes_shown or app.state.running is not None:
                await console.until(lambda: len(app.state.telemetry) == expected, "telemetry")
            await console.shows(self.shows)
            await _settled(console)

        return app, reach


PICTURED: Final = (
    Screenshot("dashboard-idle", ended, "ready to launch", ("escape",)),
    Screenshot("dashboard-running", everything, "step 41/60"),
    Screenshot("dashboard-failed", ended, "first cause", follow="20260314-134500-demo-b71c"),
    Screenshot("nodes", everything, "machine", ("1",)),
    Screenshot("nodes-macs", earlier, "142 W", ("1",), studio=macs.facts),
    Screenshot("node", earlier, "nodes · ultra", ("1", "enter"), studio=macs.facts),
    Screenshot("preflight", everything, "python 3.11.9, mlx 0.32.4", ("2", "j", "j")),
    Screenshot("calibration", divided, "measured", ("3",), calibrated=True),
    Screenshot("run", everything, "rank 1 ", ("4",)),
    Screenshot("history", everything, "on request", ("5", "j")),
    Screenshot("samples", answering, "of the training time", ("4", "s")),
    Screenshot("chat", used, "base  over Over", ("c",), follow="20260313-091532-demo-e84f"),
)
"""Drawn at every size, for the README too."""

OTHERS: Final = (
    Screenshot("metric-grid", everything, "throughput, tok/s", ("4", "M"), narrow=("m",)),
    Screenshot("chart-cursor", everything, "iteration 39", ("4", "h", "h", "h")),
    Screenshot("not-calibrated", everything, "not measured", ("3",)),
    Screenshot("starting", lambda: [fake_engine.starting()], "▶ preflight"),
    Screenshot("aborted", ended, "■ aborted", follow="20260314-132000-demo-5d20"),
    Screenshot("succeeded", used, "val loss 4.172 to 1.321", follow="20260313-091532-demo-e84f"),
    Screenshot("use", used, "a letter or enter chooses", ("u",), follow="20260313-091532-demo-e84f"),
    Screenshot("refused-fusion", used, "u f fuses it", follow="20260314-140200-demo-9c1e-fuse"),
    Screenshot("tasks", used, "base 6.174", ("5", "j")),
    Screenshot("described", ended, "── train", ("5", "G", "enter")),
    Screenshot("compare", ended, "makes 1,226 tokens/s", ("5", "space", "space", "enter")),
    Screenshot("empty-history", list, "no runs yet", ("5",)),
    Screenshot("launch", ended, "mlx.launch starts 2 ranks", ("escape", "n")),
    Screenshot("abort", everything, "Abort the run", ("ctrl+x",)),
    Screenshot("stopping", lambda: [fake_engine.stopping("term", (0,))], "has left", ("ctrl+x",)),
    Screenshot("help", everything, "Launch the plan", ("question_mark",)),
    Screenshot(
        "ring",
        earlier,
        "│ mini ",
        ("1", "j", "enter"),
        narrow=("G", *["k"] * 9),
        studio=lambda: macs.facts(cables=macs.ring()),
    ),
    Screenshot("incomplete", earlier, "│ mini ", ("1", "enter"), narrow=("G", *["k"] * 9), studio=incomplete),
    Screenshot("unreachable", earlier, "no answer on port 22", ("1", "G"), studio=unreachable),
    Screenshot("host-key", earlier, "They are the same", ("1", "j", "j", "x"), studio=unknown_key),
    Screenshot("dashboard-macs", earlier, "4 ranks · jaccl", studio=macs.facts),
    Screenshot("away", lambda: [away()], "unreachable for 25 s"),
    Screenshot(
        "nodes-ascii", earlier, "| mini ", ("1", "enter"), narrow=("G", *["k"] * 9), studio=macs.facts, ascii=True
    ),
    Screenshot("welcome", list, "Run the demo", configured=False),
    Screenshot("ascii", everything, "step 41/60", ascii=True),
)
"""Kept beside the tests; drawn at every size too."""
