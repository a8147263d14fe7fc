"""What the commands write to: a stream that knows whether colour is welcome and outlives its reader."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

DEFAULT_FILE = Path("flightdeck.toml")
"""The configuration that is meant where none is named."""
_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
WORD_COLOURS = {
    "pass": "green",
    "warn": "yellow",
    "fail": "red",
    "skip": "dim",
    "succeeded": "green",
    "failed": "red",
    "aborted": "yellow",
    "lost": "red",
    "running": "green",
}
"""State words; the word is always there, the colour only helps."""


def config_file(options: argparse.Namespace) -> Path:
    """The configuration that a command is about: -c, else ./flightdeck.toml."""
    chosen: Path | None = options.config
    return chosen or DEFAULT_FILE


def is_person(stream: TextIO) -> bool:
    """A terminal and not a pipe."""
    return stream.isatty()


def colour_welcome(stream: TextIO) -> bool:
    """A terminal that can, and nobody who said no (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Lines:
    """Plain lines for people, each flushed as it comes. A reader that leaves early silences them, nothing else."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._colour = colour_welcome(self.stream)

    def say(self, text: str = "") -> None:
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def ink(self, text: str, colour: str | None) -> str:
        """`text` in `colour` where that is welcome."""
        if not self._colour or colour is None:
            return text
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"

    def word(self, word: str, width: int = 0) -> str:
        """A state word in its colour, padded to `width`."""
        return self.ink(word, WORD_COLOURS.get(word)) + " " * max(0, width - len(word))


def print_json(document: Any) -> None:
    """One JSON document on stdout; control characters in remote text stay escaped."""
    json.dump(document, sys.stdout, indent=2, default=str)
    sys.stdout.write("\n")
