"""demo, launch and abort: what starts a run and what stops one."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from engine.config.divided import divided
from engine.config.models import FlightConfig
from engine.events import StopProgress
from engine.models import RunRecord, RunState
from engine.session import Engine
from tui.commands.follow import Follower, introduce, print_end, until_ended, until_past_preflight
from tui.commands.terminal import Lines, config_file, is_person, print_json
from tui.formatting import plural

OK, FAILED, INTERRUPTED = 0, 1, 130


def demo(options: argparse.Namespace, engine: Engine) -> int:
    """A real run of the demo's model: in the console, or as plain lines where there is no terminal."""
    headless = options.headless or options.json or not (is_person(sys.stdin) and is_person(sys.stdout))
    lines = _progress(options)
    if headless:
        lines.say("demo: making its model and corpus, where they are not there yet")
    config = engine.demo_config(ranks=options.ranks, iters=options.iters)
    if headless:
        return _run(engine, config, options, lines)
    # Imported late: textual costs more than all other commands need to start.
    from tui.app import run_console

    return run_console(engine, None, start=config, slow_link=options.slow_link)


def launch(options: argparse.Namespace, engine: Engine) -> int:
    """Launch a configuration; without --follow, leave once preflight has let it through."""
    config = divided(engine.load_config(config_file(options)), options.strategy, options.layer_split)
    return follow_launch(options, engine, lambda: asyncio.run(engine.launch(config, skip=options.skip)))


def follow_launch(options: argparse.Namespace, engine: Engine, start: Callable[[], RunRecord]) -> int:
    """Start a run and print how it goes, as far as --follow says."""
    lines = _progress(options)
    interrupts = DeferredInterrupt()
    with interrupts:
        record = start()
    introduce(lines, record)
    follower = Follower(engine, record.id, lines)
    try:
        interrupts.deliver()
        snapshot = follower.follow(until_ended if options.follow else until_past_preflight)
    except KeyboardInterrupt:
        lines.say(f"\nno longer following; the run goes on. To stop it: flightdeck abort {record.id}")
        return INTERRUPTED
    if snapshot.record.state.ended:
        print_end(lines, snapshot)
    else:
        lines.say(f"follow it: flightdeck logs -f {record.id}   stop it: flightdeck abort {record.id}")
    return _finish(options, snapshot.record)


def abort(options: argparse.Namespace, engine: Engine) -> int:
    """Stop a run and say how far that is; 1 when it could not be proved."""
    lines = _progress(options)
    record = engine.record(options.run)
    if record.state.ended:
        lines.say(f"{record.id} has ended already: {record.state.value}")
    else:
        asyncio.run(_abort(engine, record.id, options.now, lines))
        record = engine.record(record.id)
        lines.say(f"{lines.word(record.state.value)}: {_proof(record)}")
    if options.json:
        print_json(record.model_dump(mode="json"))
    return FAILED if record.unconfirmed or not record.state.ended else OK


def _run(engine: Engine, config: FlightConfig, options: argparse.Namespace, lines: Lines) -> int:
    """Launch and follow a run that is this command's own: the first ctrl+c stops it."""
    interrupts = DeferredInterrupt()
    with interrupts:
        record = asyncio.run(engine.launch(config, skip=options.skip))
    introduce(lines, record)
    follower = Follower(engine, record.id, lines)
    interrupted = False
    try:
        interrupts.deliver()
        snapshot = follower.follow(until_ended)
    except KeyboardInterrupt:
        interrupted = True
        lines.say("\ninterrupted: stopping the run (ctrl+c again leaves that to its supervisor)")
        asyncio.run(_abort(engine, record.id, False, lines))
        snapshot = follower.follow(until_ended)
    print_end(lines, snapshot)
    code = _finish(options, snapshot.record)
    return INTERRUPTED if interrupted else code


class DeferredInterrupt:
    """While a run is being made, ctrl+c waits: half-way there would be a run that nobody knows of."""

    def __init__(self) -> None:
        self._asked = False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def deliver(self) -> None:
        """Raises KeyboardInterrupt when ctrl+c was pressed meanwhile."""
        if self._asked:
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True


async def _abort(engine: Engine, run: str, now: bool, lines: Lines) -> None:
    told: str | None = None
    async for progress in engine.abort(run, now=now):
        words = _stage(progress)
        if words != told:
            told = words
            lines.say(f"  {words}")


def _stage(progress: StopProgress) -> str:
    words = {
        "asked": "asked the supervisor",
        "stop": "asked every rank to stop after its step",
        "term": "TERM to every rank's group",
        "kill": "KILL to every rank's group",
        "verifying": "looking for processes that are left",
        "stopped": "nothing is left",
        "unconfirmed": "stop unconfirmed",
    }.get(progress.stage, progress.stage)
    if progress.acknowledged:
        words += f" · acknowledged by rank {', '.join(map(str, progress.acknowledged))}"
    if progress.left:
        words += f" · left: {'; '.join(progress.left)}"
    return words


def _proof(record: RunRecord) -> str:
    if record.unconfirmed:
        return f"stop unconfirmed on {', '.join(record.unconfirmed)}: its lease ends the ranks there"
    if record.state is RunState.ABORTED:
        return f"no process of {plural(record.world_size, 'rank')} is left"
    return "it had ended before the stop" if record.state.ended else "the stop goes on in its supervisor"


def _progress(options: argparse.Namespace) -> Lines:
    """With --json, stdout is for the one document alone."""
    return Lines(sys.stderr if options.json else sys.stdout)


def _finish(options: argparse.Namespace, record: RunRecord) -> int:
    if options.json:
        print_json(record.model_dump(mode="json"))
    return exit_code([record])


def exit_code(records: Sequence[RunRecord]) -> int:
    """1 when any ended otherwise than succeeded."""
    return FAILED if any(record.state.ended and record.state is not RunState.SUCCEEDED for record in records) else OK
