"""models: the models and data sets that the nodes have."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from engine.api import Engine, ExitCode, NodeCopies
from tui.commands.terminal import Lines, accepted_config, print_json
from tui.formatting import size, table

_HEADERS = ("NODE", "NAME", "REVISION", "SIZE", "FILES", "STATE")


def models(options: argparse.Namespace, engine: Engine) -> int:
    """List what each node has; 1 when one gave no answer."""
    config = accepted_config(options, engine)

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
        (node.node, f"{'hf:' * (copy.kind == 'dataset')}{copy.name}", (copy.revision or "-")[:8], size(copy.bytes),
         f"{copy.files:,}", copy.state)
        for node in nodes
        for copy in node.copies
    ]  # fmt: skip
    if rows:
        lines.say(table(_HEADERS, rows, lines.width))
    for node in nodes:
        if node.problem is not None:
            lines.wrap(f"{node.node}: ", node.problem, 2)
        else:
            text = f"{size(node.free_bytes)} free in {node.cache}" + ", HF_HUB_OFFLINE is set" * node.offline
            lines.wrap(f"{node.node}: ", text, 2)
