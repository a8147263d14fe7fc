"""fetch and publish: what a run has left, copied to this machine, and given to other programs."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

from engine.api import Engine, ExitCode, PublicationRequest
from engine.errors import InputError, plural
from engine.snapshots import Fetched, FetchProgress
from tui.commands.terminal import Lines, is_person, print_json
from tui.formatting import fetch_text, size

_EVERY_S = 5.0
"""Between two lines of progress that nobody watches."""


def fetch(options: argparse.Namespace, engine: Engine) -> int:
    fetched = asyncio.run(_fetched(engine, options.run, options.folder, options.wanted))
    if options.json:
        print_json({"folder": fetched.folder, "files": fetched.files})
        return ExitCode.OK
    total, iteration = sum(file.bytes for file in fetched.files), fetched.files[0].iteration
    what = f"{plural(len(fetched.files), 'file')} of iteration {iteration:,}, {size(total)}"
    Lines().say(f"{fetched.folder}: {what}, each with the SHA-256 that it was saved with")
    return ExitCode.OK


async def _fetched(engine: Engine, run: str, folder: Path | None = None, wanted: str = "trained") -> Fetched:
    progress = _ProgressLine()
    try:
        async with engine:
            async for step in engine.results.fetch(run, folder, wanted):
                if isinstance(step, Fetched):
                    return step
                progress.update(step)
    finally:
        progress.end()
    raise AssertionError("a fetch ends with what it fetched")


def publish(options: argparse.Namespace, engine: Engine) -> int:
    target = next(name for name in ("lmstudio", "ollama", "gguf", "hub") if getattr(options, name) is not None)
    if options.private and target != "hub":
        raise InputError("--private", why="only a repository on the Hub is private", todo="use it with --hub")
    run, folder = engine.runs.find_trained(options.run).id, options.source
    if folder is None:
        wanted, folder = engine.results.to_publish(run, target, fused=options.fused, repository=options.hub)
        folder = folder or asyncio.run(_fetched(engine, run, wanted=wanted)).folder
    publication = engine.results.publish(
        PublicationRequest(
            run=run,
            target=target,
            folder=folder,
            place=getattr(options, target) or None,
            private=options.private,
            base_model=options.base_model,
            license=options.license,
            progress_bars=is_person(sys.stderr),
        )
    )
    if options.json:
        print_json(publication)
        return ExitCode.OK
    lines = Lines()
    lines.say(f"published {publication.url or publication.folder}")
    if publication.commands:
        lines.say("it is in LM Studio's My Models; or:" if target == "lmstudio" else "nothing was run; next:")
        for command in (f"cd {publication.folder}", *publication.commands):
            lines.say(f"  {command}")
        if any("$LLAMA_CPP" in command for command in publication.commands):
            lines.say(lines.ink("  LLAMA_CPP is a checkout of https://github.com/ggml-org/llama.cpp", "dim"))
    return ExitCode.OK


class _ProgressLine:
    """On a terminal one line that changes, elsewhere a line now and then."""

    def __init__(self) -> None:
        self._lines = Lines(sys.stderr)
        self._changes = is_person(sys.stderr)
        self._printed_at = time.monotonic()
        self._width = 0

    def update(self, step: FetchProgress) -> None:
        text, now = fetch_text(step), time.monotonic()
        if self._changes:
            print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(text)
        elif now - self._printed_at >= _EVERY_S:
            self._printed_at = now
            self._lines.say(text)

    def end(self) -> None:
        if self._width:
            self._lines.say()
