"""What the console asks of the engine: probe, preflight, launch, abort, the demo. Each is one task of the app's;
what the engine refuses is shown as its one line, with what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from tui.app import FlightDeckApp


async def probe(app: FlightDeckApp) -> None:
    """Look at every node once."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None or app.state.probing:
        return
    app.change(probing=True)
    try:
        facts = tuple(await engine.facts(config))
        app.change(facts=facts, now=app.clock())
    except _refusals() as error:
        app.say(f"probe: {error}", severity="error")
    finally:
        app.change(probing=False)


async def preflight(app: FlightDeckApp) -> None:
    """Run the checks without a launch; each is shown as it ends."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None:
        return
    app.change(busy="checking", checks=(), checks_at=None)
    try:
        async for result in engine.preflight(config):
            known = {check.name: check for check in app.state.checks}
            known[result.name] = result
            app.change(checks=tuple(known.values()))
        app.change(checks_at=app.clock(), now=app.clock())
    except _refusals() as error:
        app.say(f"preflight: {error}", severity="error")
    finally:
        app.change(busy=None)


async def launch(app: FlightDeckApp, config: FlightConfig) -> None:
    """Launch, and show the run."""
    engine = app.engine
    if engine is None:
        return
    app.change(busy="launching", fault=None)
    try:
        record = await engine.launch(config)
    except _refusals() as error:
        app.change(fault=str(error))
        app.say(str(error), severity="error")
    else:
        # What the run's own supervisor finds now counts, not a preflight of earlier.
        app.change(checks=(), checks_at=None)
        app.open_run(record.id)
    finally:
        app.change(busy=None)


async def abort(app: FlightDeckApp, run: str, *, now: bool) -> None:
    """Ask for the stop and follow it to its proof; the dialog shows the run's own word about it."""
    engine = app.engine
    if engine is None:
        return
    try:
        async for _ in engine.abort(run, now=now):
            app.bridge.look()
    except _refusals() as error:
        app.say(f"abort: {error}", severity="error")


async def demo(app: FlightDeckApp) -> None:
    """Make the demo's model where it is missing (seconds), then launch it."""
    engine = app.engine
    if engine is None:
        return
    app.change(busy="making the demo's model")
    try:
        config = await asyncio.to_thread(engine.demo_config)
    except _refusals() as error:
        app.change(fault=str(error), busy=None)
        return
    app.change(config=config, fault=None)
    await launch(app, config)
    await probe(app)


def _refusals() -> tuple[type[Exception], ...]:
    """What the engine says no with; imported late, since nothing of the engine is loaded before the first paint."""
    from engine.errors import FlightDeckError

    return (FlightDeckError, OSError)
