"""What the console asks of the engine: probe, telemetry, preflight, launch, abort, the demo, a host key, a fix.
Each is a task of the app's whose work is done in the engine's thread; what it refuses is shown as its one line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config.models import FlightConfig
    from engine.models import HostKeyOffer, NodeFacts, NodeTelemetry, Topology
    from engine.planning.outlook import Outlook
    from engine.planning.wiring import Wiring
    from engine.session import Engine
    from engine.transport.base import Completed
    from tui.app import FlightDeckApp
    from tui.screens.fixing import Command


LISTEN_AGAIN_S = 10.0
"""Before telemetry that has died is begun anew."""


async def probe(app: FlightDeckApp) -> None:
    """Look at every node once; each is shown as it answers, and then how they are joined."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None or app.state.probing:
        return
    app.change(probing=True, asked=frozenset(node.name for node in config.nodes))
    try:
        async with aclosing(app.engine_loop.each(lambda: engine.probing(config))) as answers:
            async for facts in answers:
                seen = {**app.state.facts, facts.node: facts}
                app.change(facts=seen, asked=app.state.asked - {facts.node}, now=app.clock())
        facts_now = [known for node in config.nodes if (known := app.state.facts.get(node.name)) is not None]
        topology, wiring, unwired = await app.engine_loop.call(lambda: _join(engine, config, facts_now))
        app.change(topology=topology, wiring=wiring, unwired=unwired)
        # A calibration is of chips and versions: what was just seen may be others.
        app.change(outlook=await app.engine_loop.call(lambda: _outlook(engine, config)))
    except _refusals() as error:
        app.say(f"probe: {error}", severity="error")
    finally:
        app.change(probing=False, asked=frozenset())
    await plan(app)


async def plan(app: FlightDeckApp) -> None:
    """Plan what would be launched, by what the nodes have just said. While ranks run on them nobody needs it."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None or app.state.planning or app.state.running is not None:
        return
    seen = [known for node in config.nodes if (known := app.state.facts.get(node.name)) is not None]
    app.change(planning=True)
    try:
        app.change(plan=await app.engine_loop.call(lambda: engine.plan(config, facts=seen)), now=app.clock())
    except _refusals():
        # Why the nodes cannot be planned for is told where they are shown.
        app.change(plan=None)
    except Exception as error:  # the plan tells of a launch and is no part of it: nothing of it may end the console
        app.say(f"plan: {error or type(error).__name__}", severity="error")
    finally:
        app.change(planning=False)


async def _join(
    engine: Engine, config: FlightConfig, facts: Sequence[NodeFacts]
) -> tuple[Topology, Wiring | None, str | None]:
    """The topology and the wiring, or why there is none; worked out in a thread, since 64 nodes take a while."""
    topology = await asyncio.to_thread(engine.topology, config, facts)
    try:
        return topology, await asyncio.to_thread(engine.wiring, config, facts), None
    except _refusals() as error:
        return topology, None, str(error)


async def listen(app: FlightDeckApp, config: FlightConfig, every_s: float) -> None:
    """Take what the nodes use, in bundles. Ends when it is cancelled."""
    engine = app.engine
    if engine is None:
        return
    newest: dict[str, NodeTelemetry] = {}
    while True:
        try:
            async with aclosing(app.engine_loop.each(lambda: engine.telemetry(config), every_s=every_s)) as values:
                async for value in values:
                    newest = {**newest, value.node: value}
                    app.heard(newest)
        except Exception as error:  # a fault in one reader of nodes must not end the console
            app.say(f"telemetry: {error or type(error).__name__}", severity="warning")
        await asyncio.sleep(LISTEN_AGAIN_S)


async def preflight(app: FlightDeckApp) -> None:
    """Run the checks without a launch; each is shown as it ends."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None:
        return
    app.change(busy="checking", checks=(), checks_at=None)
    try:
        async with aclosing(app.engine_loop.each(lambda: engine.preflight(config))) as results:
            async for result in results:
                known = {check.name: check for check in (*app.state.checks, result)}
                app.change(checks=tuple(known.values()))
        app.change(checks_at=app.clock(), now=app.clock())
    except _refusals() as error:
        app.say(f"preflight: {error}", severity="error")
    finally:
        app.change(busy=None)


async def calibrate(app: FlightDeckApp, *, quick: bool) -> None:
    """Measure every node and link; how far that is is shown as it goes. Cancelled, it ends on the nodes."""
    config, engine = app.state.config, app.engine
    if config is None or engine is None:
        return
    app.change(busy="calibrating", calibrating={})
    lacking: list[str] = []
    try:
        async with aclosing(app.engine_loop.each(lambda: engine.calibrate(config, quick=quick))) as steps:
            async for step in steps:
                if isinstance(nodes := getattr(step, "nodes", None), tuple):
                    lacking = [f"{node.node}: {node.problem}" for node in nodes if node.problem]
                elif isinstance(what := getattr(step, "what", None), str):
                    app.change(calibrating={**(app.state.calibrating or {}), what: step})
        app.change(outlook=await app.engine_loop.call(lambda: _outlook(engine, config)), now=app.clock())
        if lacking:
            app.say(f"calibration: not kept, {'; '.join(lacking)}", severity="error")
        else:
            app.say("calibration: measured")
        await plan(app)
    except asyncio.CancelledError:
        app.say("calibration: stopped")
        raise
    except _refusals() as error:
        app.say(f"calibration: {error}", severity="error")
    finally:
        app.change(busy=None, calibrating=None)


async def _outlook(engine: Engine, config: FlightConfig) -> Outlook:
    return await asyncio.to_thread(lambda: engine.outlook(config, engine.last_calibration(config)))


async def launch(app: FlightDeckApp, config: FlightConfig) -> None:
    """Launch, and show the run."""
    engine = app.engine
    if engine is None:
        return
    app.change(busy="launching", fault=None)
    try:
        record = await app.engine_loop.call(lambda: engine.launch(config))
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
        async with aclosing(app.engine_loop.each(lambda: engine.abort(run, now=now))) as stages:
            async for _ in stages:
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


async def accept_host_key(app: FlightDeckApp, node: str, offer: HostKeyOffer) -> None:
    """Accept the key that a person has compared, and probe anew."""
    engine = app.engine
    if engine is None:
        return
    try:
        await app.engine_loop.call(lambda: engine.accept_host_key(offer))
    except _refusals() as error:
        app.say(f"not accepted: {error}", severity="error")
        return
    app.say(f"accepted the host key of {node}")
    # Telemetry asks a node that refused it again only after a while.
    app.stop_listening()
    await probe(app)


async def fix(app: FlightDeckApp, config: FlightConfig, commands: Sequence[Command]) -> None:
    """Run each command on its node, all at once; what they print and how they end is put into them."""
    engine = app.engine
    if engine is None:
        return
    await asyncio.gather(*(_run(app, engine, config, command) for command in commands))
    app.fixed(commands)


async def _run(app: FlightDeckApp, engine: Engine, config: FlightConfig, command: Command) -> None:
    try:
        done = await app.engine_loop.call(lambda: engine.run_on(config, command.node, command.line))
    except _refusals() as error:
        command.problem = str(error)
    else:
        command.output, command.code = _lines(done), done.code
        if done.code is None:
            command.problem = "ended by its time limit"
    command.ended = True
    app.fixing()


def _lines(done: Completed) -> tuple[str, ...]:
    """What a command has printed, made harmless; stderr last."""
    from engine.security.sanitise import sanitise

    return tuple(sanitise(line) for stream in (done.stdout, done.stderr) for line in stream.splitlines())


def _refusals() -> tuple[type[Exception], ...]:
    """What the engine says no with; imported late, since nothing of the engine is loaded before the first paint."""
    from engine.errors import FlightDeckError

    return (FlightDeckError, OSError)
