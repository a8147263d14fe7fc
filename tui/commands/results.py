"""fetch: what a run has left, copied to this machine."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from engine.api import Engine, ExitCode
from engine.errors import plural
from engine.snapshots import Fetched, FetchProgress
from tui.commands.terminal import Lines, is_person, print_json
from tui.formatting import fetch_text, size

_EVERY_S = 5.0
"""Between two lines of progress that nobody watches."""


def fetch(options: argparse.Namespace, engine: Engine) -> int:
    fetched = asyncio.run(_fetched(options, engine))
    if options.json:
        print_json({"folder": fetched.folder, "files": fetched.files})
        return ExitCode.OK
    total, iteration = sum(file.bytes for file in fetched.files), fetched.files[0].iteration
    what = f"{plural(len(fetched.files), 'file')} of iteration {iteration:,}, {size(total)}"
    Lines().say(f"{fetched.folder}: {what}, each with the SHA-256 that it was saved with")
    return ExitCode.OK


async def _fetched(options: argparse.Namespace, engine: Engine) -> Fetched:
    progress = _ProgressLine()
    try:
        async with engine:
            async for step in engine.results.fetch(options.run, options.folder, options.wanted):
                if isinstance(step, Fetched):
                    return step
                progress.update(step)
    finally:
        progress.end()
    raise AssertionError("a fetch ends with what it fetched")


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
