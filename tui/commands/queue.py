"""queue: the runs that start one after the other, each when its nodes are free."""

from __future__ import annotations

import argparse

from engine.api import Engine, ExitCode, QueueItem, QueueSnapshot
from engine.errors import InputError, duration_text, plural
from tui.commands.terminal import Lines, agreed, print_json, progress_lines
from tui.formatting import NOT_MEASURED, item_state, item_why, table


def queue(options: argparse.Namespace, engine: Engine) -> int:
    """List the queue, or change an item."""
    if options.action == "list":
        return _list(options, engine)
    if options.action in ("install", "uninstall"):
        return _autostart(options, engine)
    if options.item is None or (options.action == "move") is (options.place is None):
        place = " PLACE" if options.action == "move" else ""
        usage = f"flightdeck queue {options.action} ITEM{place}"
        raise InputError(f"queue {options.action} needs ITEM{place}", todo=usage)
    change = getattr(engine.queue, options.action)
    item: QueueItem = change(options.item, *([options.place] if options.action == "move" else []))
    if options.json:
        print_json(item)
    else:
        Lines().say(f"item {item.id} ({item.name}) is {'moved' if options.action == 'move' else item.state}")
    return ExitCode.OK


def _autostart(options: argparse.Namespace, engine: Engine) -> int:
    """Show what is written or removed, and ask."""
    made, lines, installs = engine.queue.autostart(), progress_lines(options), options.action == "install"
    commands = made.to_install if installs else made.to_uninstall
    lines.say(f"{'write' if installs else 'remove'} {made.file or 'this line of the crontab'}:")
    for text in (*made.text.splitlines(), *(f"$ {' '.join(command)}" for command in commands)):
        lines.say(f"  {text}")
    if not agreed(options, f"{options.action} it?"):
        return ExitCode.FAILED
    (engine.queue.install if installs else engine.queue.uninstall)(made)
    if options.json:
        print_json({"kind": made.kind, "file": str(made.file) if made.file else None, "installed": installs})
    return ExitCode.OK


def _list(options: argparse.Namespace, engine: Engine) -> int:
    snapshot = engine.queue.snapshot()
    if options.json:
        items = [{**item.model_dump(mode="json"), "waits_for": snapshot.waits.get(item.id)} for item in snapshot.items]
        print_json({"items": items, "direct": snapshot.direct, "attended": snapshot.attended})
        return ExitCode.OK
    lines = Lines()
    if not snapshot.items:
        lines.say("the queue is empty: `flightdeck launch --queue` puts a run into it")
    else:
        headers = ("ITEM", "NAME", "NODES", "STATE", "FOR", "WHY")
        drawn = table(headers, [_row(item, snapshot) for item in snapshot.items]).splitlines()
        lines.say(lines.ink(drawn[0], "dim"))
        for row, item in zip(drawn[1:], snapshot.items, strict=True):
            lines.say(row.replace(f"  {item_state(item)}", f"  {lines.word(item_state(item))}", 1))
    if snapshot.direct:
        lines.say(f"{plural(len(snapshot.direct), 'run')} beside it: {', '.join(run.id for run in snapshot.direct)}")
    return ExitCode.OK


def _row(item: QueueItem, snapshot: QueueSnapshot) -> list[str]:
    budget = duration_text(item.budget_s) if item.budget_s else NOT_MEASURED
    return [str(item.id), item.name, ", ".join(item.hosts), item_state(item), budget, item_why(item, snapshot)]
