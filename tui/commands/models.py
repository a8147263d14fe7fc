"""models: the models and data sets that the nodes have, and their copying."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence

from engine.api import Config, Engine, ExitCode, NodeCopies
from engine.errors import InputError
from engine.snapshots import CopyProgress
from tui.commands.terminal import Lines, accepted_config, agreed, print_json
from tui.formatting import copy_text, size, table

_HEADERS = ("NODE", "NAME", "REVISION", "SIZE", "FILES", "STATE")
_EVERY_S = 5.0
"""Between two lines on one node."""


def models(options: argparse.Namespace, engine: Engine) -> int:
    """List, copy, verify or remove; 1 when a node gave no answer, or has a damaged file."""
    if options.action != "list" and options.name is None:
        raise InputError(f"models {options.action} needs a name", todo="org/name, hf:org/name or a folder")
    if options.action == "rm" and options.node is None:
        raise InputError("models rm needs --node", why="it removes a copy of one node")
    config = accepted_config(options, engine)
    return {"list": _list, "verify": _verify, "rm": _remove}.get(options.action, _copy)(options, engine, config)


def _list(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    async def ask() -> list[NodeCopies]:
        async with engine:
            return await engine.models.list(config)

    nodes = asyncio.run(ask())
    if options.json:
        print_json({"nodes": [_document(node) for node in nodes]})
    else:
        _print(Lines(), nodes)
    return ExitCode.FAILED if any(node.problem for node in nodes) else ExitCode.OK


def _document(node: NodeCopies) -> dict[str, object]:
    copies = [{**copy.model_dump(mode="json"), "complete": copy.complete} for copy in node.copies]
    return {**node.model_dump(mode="json"), "copies": copies}


def _print(lines: Lines, nodes: Sequence[NodeCopies]) -> None:
    rows = [
        (node.node, copy.label, (copy.revision or "-")[:8], size(copy.bytes), f"{copy.files:,}", copy.state)
        for node in nodes
        for copy in node.copies
    ]
    if rows:
        lines.say(table(_HEADERS, rows, lines.width))
    for node in nodes:
        if node.problem is not None:
            lines.wrap(f"{node.node}: ", node.problem, 2)
        else:
            text = f"{size(node.free_bytes)} free in {node.cache}" + ", HF_HUB_OFFLINE is set" * node.offline
            lines.wrap(f"{node.node}: ", text, 2)


def _copy(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    if options.action == "push":
        flags = {"dataset": options.dataset, "replace": options.replace}
        steps = engine.models.push(config, options.name, options.to, **flags)
    else:
        steps = engine.models.pull(config, options.name, options.node, dataset=options.dataset)
    ends = asyncio.run(_followed(engine, steps))
    if options.json:
        print_json({"copies": [{"node": end.node, "path": end.path, "bytes": end.total} for end in ends]})
    elif not ends:
        Lines().say("nothing to copy")
    return ExitCode.OK


async def _followed(engine: Engine, steps: AsyncGenerator[CopyProgress, None]) -> list[CopyProgress]:
    """The ends, one for each node; progress goes to stderr."""
    lines, shown, ends = Lines(sys.stderr), dict[str, tuple[float, str]](), list[CopyProgress]()
    async with engine:
        async for step in steps:
            at, note = shown.get(step.node, (0.0, ""))
            if step.path is not None or step.note != note or time.monotonic() - at >= _EVERY_S:
                shown[step.node] = time.monotonic(), step.note
                lines.say(copy_text(step))
            ends += [step] if step.path is not None else []
    return ends


def _verify(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    async def ask() -> dict[str, Sequence[str] | str]:
        async with engine:
            return await engine.models.verify(config, options.name, dataset=options.dataset)

    seen, lines = asyncio.run(ask()), Lines()
    if options.json:
        print_json(
            {
                node: {"damaged": files} if not isinstance(files, str) else {"problem": files}
                for node, files in seen.items()
            }
        )
    else:
        for node, files in seen.items():
            whole = "every file is what it should be" if not files else f"damaged: {', '.join(files)}"
            lines.wrap(f"{node}: ", files if isinstance(files, str) else whole, 2)
        if any(files and not isinstance(files, str) for files in seen.values()):
            lines.say(f"flightdeck models push {options.name}  sends the damaged files again")
    return ExitCode.FAILED if any(seen.values()) else ExitCode.OK


def _remove(options: argparse.Namespace, engine: Engine, config: Config) -> int:
    if not agreed(options, f"remove {options.name} on {options.node}?"):
        return ExitCode.FAILED

    async def remove() -> int:
        async with engine:
            return await engine.models.remove(config, options.name, options.node, dataset=options.dataset)

    freed = asyncio.run(remove())
    if options.json:
        print_json({"node": options.node, "name": options.name, "bytes": freed})
    else:
        Lines().say(f"{options.node}: {options.name} is removed, {size(freed)} are free again")
    return ExitCode.OK
