"""demo, launch, resume and abort: the commands that start and stop runs."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from engine.api import Config, Engine, ExitCode, TaskRequest, parse_settings, starting_time, with_strategy
from engine.errors import FlightDeckError, InputError, plural
from engine.models import Reason, RunRecord, RunState
from engine.snapshots import RunSnapshot, StopProgress
from tui.commands.follow import Follower, introduce, print_end, print_learned, until_ended, until_past_preflight
from tui.commands.terminal import (
    Lines,
    accepted,
    check_terminal,
    config_file,
    is_person,
    print_json,
    progress_lines,
)
from tui.formatting import item_why


def demo(options: argparse.Namespace, engine: Engine) -> int:
    """Train the demo's model, in the console or, without a terminal, as plain lines."""
    headless = options.headless or options.json or not (is_person(sys.stdin) and is_person(sys.stdout))
    if headless:
        progress_lines(options).say("demo: making its model and corpus, where they are not there yet")
    else:
        check_terminal()
    config = engine.demo_config(ranks=options.ranks, iters=options.iters)
    if headless:
        return _launch(options, engine, config, owned=True)
    # Imported late: textual costs more than all other commands need to start.
    from tui.app import run_console

    return run_console(engine, None, start=config, slow_link=options.slow_link)


def launch(options: argparse.Namespace, engine: Engine) -> int:
    """Launch a configuration; without --follow, return once preflight has let it through."""
    configs = [
        with_strategy(accepted(config, options, engine, launch=True), options.strategy, options.layer_split)
        for config in engine.load_grid(config_file(options), options.set)
    ]
    if options.queue:
        return _put_into_queue(options, engine, configs)
    if options.after is not None or options.stop_queue_on_failure:
        raise InputError("--after and --stop-queue-on-failure are of the queue", todo="add --queue")
    if len(configs) > 1:
        todo = "add --queue, which starts one after the other; `flightdeck plan` shows them"
        raise InputError(f"--set asks for {len(configs)} runs", todo=todo)
    if users := engine.queue.users(configs[0]):
        what = f"in use on the same nodes: {', '.join(users)}; this run shares them, with --queue it waits"
        progress_lines(options).say(what)
    return _launch(options, engine, configs[0])


def _put_into_queue(options: argparse.Namespace, engine: Engine, configs: Sequence[Config]) -> int:
    if options.follow:
        raise InputError("a run of the queue is not followed before it starts", todo="leave out --follow or --queue")
    items = engine.queue.add(
        configs,
        skip=options.skip,
        after=None if options.after is None else starting_time(options.after),
        budget_s=options.for_s,
        stop_on_failure=options.stop_queue_on_failure,
    )
    lines, snapshot = progress_lines(options), engine.queue.snapshot()
    for item in items:
        why = item_why(item, snapshot)
        lines.say(f"queued as item {item.id}: {item.name}" + (f", {why}" if why else ""))
    if options.json:
        print_json(items)
    return ExitCode.OK


def _launch(options: argparse.Namespace, engine: Engine, config: Config, *, owned: bool = False) -> int:
    def start() -> RunRecord:
        return asyncio.run(engine.launches.launch(config, skip=options.skip, budget_s=getattr(options, "for_s", None)))

    if not owned:
        return _start_and_follow(options, engine, start)
    lines = progress_lines(options)
    snapshot, interrupted = follow_own(engine, start, lines)
    print_end(lines, snapshot)
    if snapshot.record.state is RunState.SUCCEEDED and snapshot.trained is not None and not interrupted:
        try:
            interrupted = _evaluate(engine, snapshot, lines)
        except FlightDeckError as error:  # the demo has succeeded all the same
            lines.say(str(error))
    code = _finish(options, snapshot.record)
    return ExitCode.INTERRUPTED if interrupted else code


def _evaluate(engine: Engine, trained: RunSnapshot, lines: Lines) -> bool:
    """Print what the demo has learned; whether ctrl+c came meanwhile."""
    request = TaskRequest("evaluate", divided=True)

    def start() -> RunRecord:
        return asyncio.run(start_task(engine, trained.record.id, request))

    evaluation, interrupted = follow_own(engine, start, lines, quiet=True)
    if evaluation.record.state is not RunState.SUCCEEDED:
        print_end(lines, evaluation)
    print_learned(lines, trained, evaluation)
    return interrupted


async def start_task(engine: Engine, run: str, request: TaskRequest) -> RunRecord:
    """Raises as TasksApi.start."""
    async with engine:
        return await engine.tasks.start(run, request)


def begin(start: Callable[[], RunRecord], lines: Lines) -> tuple[RunRecord, DeferredInterrupt]:
    """Start a run and introduce it; the second delivers a ctrl+c that came meanwhile."""
    interrupts = DeferredInterrupt()
    with interrupts:
        record = start()
    introduce(lines, record)
    return record, interrupts


def follow_own(
    engine: Engine, start: Callable[[], RunRecord], lines: Lines, *, quiet: bool = False
) -> tuple[RunSnapshot, bool]:
    """Start a run that is the command's own and print its progress to its end: the first ctrl+c stops it. Its last
    snapshot, and True where it was stopped so. `quiet`: without the checks that pass."""
    record, interrupts = begin(start, lines)
    follower = Follower(engine, record.id, lines, quiet=quiet)
    try:
        interrupts.deliver()
        return follower.follow(until_ended), False
    except KeyboardInterrupt:
        lines.say("\ninterrupted: stopping the run (ctrl+c again leaves that to its supervisor)")
        asyncio.run(stop_run(engine, record.id, lines))
        return follower.follow(until_ended), True


def resume(options: argparse.Namespace, engine: Engine) -> int:
    """Resume a run; without --follow, return once preflight has let it through."""
    run = engine.runs.find_trained(options.run).id
    follower = Follower(engine, run, progress_lines(options))
    follower.skip()

    def start() -> RunRecord:
        wishes = ("accept_changed_data", "without_state", "without_budget")
        return asyncio.run(engine.launches.resume(run, **{wish: getattr(options, wish) for wish in wishes}))

    return _start_and_follow(options, engine, start, follower=follower)


def repeat(options: argparse.Namespace, engine: Engine) -> int:
    """Launch a run's configuration again, perhaps with other settings."""
    settings = parse_settings(options.set)

    async def start() -> RunRecord:
        async with engine:
            return await engine.launches.repeat(options.run, settings, accept_changed=options.accept_changed)

    return _start_and_follow(options, engine, lambda: asyncio.run(start()))


def _start_and_follow(
    options: argparse.Namespace,
    engine: Engine,
    start: Callable[[], RunRecord],
    *,
    follower: Follower | None = None,
) -> int:
    """Start a run and print its progress, to its end with --follow. `follower`: it has passed over what the run had
    done before."""
    lines = progress_lines(options)
    record, interrupts = begin(start, lines)
    follower = follower or Follower(engine, record.id, lines)
    try:
        interrupts.deliver()
        snapshot = follower.follow(until_ended if options.follow else until_past_preflight)
    except KeyboardInterrupt:
        lines.say(f"\nno longer following; the run goes on. To stop it: flightdeck abort {record.id}")
        return ExitCode.INTERRUPTED
    if snapshot.record.state.ended:
        print_end(lines, snapshot)
    else:
        lines.say(f"follow it: flightdeck logs -f {record.id}   stop it: flightdeck abort {record.id}")
    return _finish(options, snapshot.record)


def abort(options: argparse.Namespace, engine: Engine) -> int:
    """Stop a run and print the progress; 1 when the stop could not be proved."""
    lines = progress_lines(options)
    record = engine.runs.record(options.run)
    if record.state.ended:
        lines.say(f"{record.id} has ended already: {record.state.value}")
    else:
        asyncio.run(stop_run(engine, record.id, lines, now=options.now))
        record = engine.runs.record(record.id)
        lines.say(f"{lines.word(record.state.value)}: {_proof(record)}")
    if options.json:
        print_json(record)
    return ExitCode.FAILED if record.unconfirmed or not record.state.ended else ExitCode.OK


class DeferredInterrupt:
    """Holds ctrl+c back while a run is being made: interrupted half-way, it would be a run without a record."""

    def __init__(self) -> None:
        self._requested = False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def deliver(self) -> None:
        """Raises KeyboardInterrupt when ctrl+c was pressed meanwhile."""
        if self._requested:
            raise KeyboardInterrupt

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._requested = True


async def stop_run(engine: Engine, run: str, lines: Lines, *, now: bool = False) -> None:
    printed: str | None = None
    async for progress in engine.runs.abort(run, now=now):
        text = _stage(progress)
        if text != printed:
            printed = text
            lines.say(f"  {text}")


def _stage(progress: StopProgress) -> str:
    text = {
        "asked": "stop requested from the supervisor",
        "stop": "every rank is to stop after its step",
        "term": "TERM to every rank's group",
        "kill": "KILL to every rank's group",
        "verifying": "listing processes that are left",
        "stopped": "nothing is left",
        "unconfirmed": "stop unconfirmed",
    }.get(progress.stage, progress.stage)
    if progress.acknowledged:
        text += f" · acknowledged by rank {', '.join(map(str, progress.acknowledged))}"
    if progress.left:
        text += f" · left: {'; '.join(progress.left)}"
    return text


def _proof(record: RunRecord) -> str:
    if record.unconfirmed:
        return f"stop unconfirmed on {', '.join(record.unconfirmed)}: its lease ends the ranks there"
    if record.state is RunState.ABORTED:
        return f"no process of {plural(record.world_size, 'rank')} is left"
    return "it had ended before the stop" if record.state.ended else "the stop goes on in its supervisor"


def _finish(options: argparse.Namespace, record: RunRecord) -> int:
    if options.json:
        print_json(record)
    as_asked = record.state is RunState.SUCCEEDED or record.reason is Reason.BUDGET_SPENT
    failed = record.state.ended and not as_asked
    return ExitCode.FAILED if failed else ExitCode.OK
