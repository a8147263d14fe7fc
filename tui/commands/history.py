"""tag, note and delete: what a person writes about past runs, and their removal."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator

from engine.api import Engine, ExitCode
from engine.errors import plural
from engine.snapshots import Deletion
from tui.commands.terminal import Lines, agreed, check_person, print_json, progress_lines
from tui.formatting import size


def tag(options: argparse.Namespace, engine: Engine) -> int:
    run = engine.runs.annotate(options.run, add=options.tags, remove=options.remove)
    if options.json:
        print_json({"id": run.id, "tags": run.tags})
    else:
        Lines().say(f"{run.id}: {', '.join(run.tags) or 'no tags'}")
    return ExitCode.OK


def note(options: argparse.Namespace, engine: Engine) -> int:
    run = engine.runs.annotate(options.run, note=options.text)
    if options.json:
        print_json({"id": run.id, "note": run.note})
    else:
        Lines().say(f"{run.id}: {run.note or 'no note'}")
    return ExitCode.OK


def delete(options: argparse.Namespace, engine: Engine) -> int:
    """1 where something of a run stays that was to be deleted."""
    return asyncio.run(_delete(options, engine))


async def _delete(options: argparse.Namespace, engine: Engine) -> int:
    lines = progress_lines(options)
    check_person(options)
    runs = list(dict.fromkeys([engine.runs.find(run).id for run in options.runs]))
    async with engine:
        if not options.yes:
            for run in runs:
                for text in deletion_lines(await engine.runs.delete(run, go=False)):
                    lines.say(text)
            what = runs[0] if len(runs) == 1 else plural(len(runs), "run")
            if not agreed(options, f"delete {what}? This cannot be undone."):
                lines.say("nothing was deleted")
                return ExitCode.OK
        deletions = [await engine.runs.delete(run, go=True, anyway=options.anyway) for run in runs]
    if options.json:
        print_json(deletions)
    else:
        for deletion in deletions:
            for text in deletion_lines(deletion):
                lines.say(text)
    return ExitCode.FAILED if any(deletion.problems or not deletion.deleted for deletion in deletions) else ExitCode.OK


def deletion_lines(deletion: Deletion) -> Iterator[str]:
    """The space on each machine, its folders that stay and why, and those that are not the run's own."""
    yield f"{deletion.run}: {'freed ' if deletion.deleted else ''}{size(deletion.freed)}"
    for part in (deletion.here, *deletion.nodes):
        place, folders = part.node or "this machine", ", ".join(part.folders)
        if part.problem is None:
            yield f"  {place}: {size(part.bytes)} in {folders}"
        else:
            yield f"  {place}: stays in {folders}: {part.problem}"
    for node, folder in deletion.kept:
        yield f"  kept{f' on {node}' if node else ''}: {folder}, which is not the run's own"
    if deletion.problems and not deletion.deleted:
        names = ", ".join(deletion.problems)
        yield f"  the run stays listed while {names} cannot be cleaned up; --anyway deletes the rest"
