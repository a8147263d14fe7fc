"""The commands' output: lines that know whether colour is welcome and survive a reader that leaves, and JSON
documents.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import termios
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TextIO

from engine import api
from engine.errors import InputError

if TYPE_CHECKING:
    from engine.api import Config, Engine
    from engine.models import HostKeyOffer

DEFAULT_FILE = Path("flightdeck.toml")
"""The configuration when none is named."""
_CODES = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
_WIDEST = 120
"""Columns of wrapped text, however wide the terminal."""
WORD_COLOURS = {
    "pass": "green",
    "warn": "yellow",
    "fail": "red",
    "skip": "dim",
    "completed": "yellow",
    "succeeded": "green",
    "failed": "red",
    "aborted": "yellow",
    "lost": "red",
    "running": "green",
}
"""Colours of state words; the word is always printed too."""


def config_file(options: argparse.Namespace) -> Path:
    """The command's configuration: -c, else ./flightdeck.toml."""
    chosen: Path | None = options.config
    return chosen or DEFAULT_FILE


def accepted_config(options: argparse.Namespace, engine: Engine, *, launch: bool = False) -> Config:
    """The command's configuration, once a person has accepted what it makes run: it may be somebody
    else's. Raises ConfigError, and InputError where nobody has, and for a grid."""
    return accepted(loaded_config(options, engine), options, engine, launch=launch)


def loaded_config(options: argparse.Namespace, engine: Engine) -> Config:
    """The command's configuration, with its --set. Raises ConfigError, and InputError for a grid."""
    return engine.load_config(config_file(options), api.parse_settings(options.set))


def accepted(config: Config, options: argparse.Namespace, engine: Engine, *, launch: bool = False) -> Config:
    """The same configuration. Raises InputError where nobody has accepted what it makes run."""
    if engine.nodes.is_accepted(config, launch=launch):
        return config
    if not options.accept:
        _ask(config, engine.nodes.programs(config))
    engine.nodes.accept(config.digest)
    return config


def _ask(config: Config, programs: Sequence[tuple[str, str]]) -> None:
    """Name what the configuration makes run, and ask. Raises InputError, also without a terminal."""
    lines = Lines(sys.stderr)
    if not (is_person(sys.stdin) and is_person(lines.stream)):
        raise InputError(
            f"{config.file} makes programs run that nobody has accepted",
            why="; ".join(f"{label}: {text}" for label, text in programs),
            todo="look at them, then add --accept",
        )
    lines.say(f"{config.file} makes these run:")
    width = max(len(label) for label, _ in programs)
    for label, text in programs:
        lines.say(f"  {label:<{width}}  {text}")
    if not agreed_to("run them (asked again only when other things would run)?", lines):
        raise InputError(f"{config.file} was not accepted", why="nothing was run")


def agreed(options: argparse.Namespace, question: str) -> bool:
    """--yes, or what a person answers, asked on stderr. Raises as `check_person`."""
    check_person(options)
    return options.yes or agreed_to(question, Lines(sys.stderr))


def check_person(options: argparse.Namespace) -> None:
    """Raises InputError where there is no --yes and nobody can be asked."""
    if not (options.yes or (is_person(sys.stdin) and is_person(sys.stderr))):
        raise InputError("nobody can be asked", why="nothing was changed", todo="add --yes, or run it in a terminal")


def agreed_to(question: str, progress: Lines) -> bool:
    flush_input()
    progress.stream.write(f"{question} [y/N] ")
    progress.stream.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False


def agreed_to_key(offer: HostKeyOffer, progress: Lines) -> bool:
    kind = offer.key.partition(" ")[0]
    progress.say(f"{offer.target} shows a host key ({kind}) that nobody has accepted. On the node itself,")
    progress.say("  ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub  must print the same fingerprint.")
    return agreed_to(f"accept {offer.fingerprint} for {offer.target}?", progress)


def flush_input() -> None:
    """Drop what was typed before the question: nobody has answered what is not yet shown."""
    with suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)


def check_terminal() -> None:
    """Raises InputError where the console cannot be drawn."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise InputError("the console needs a terminal", todo="see `flightdeck --help` for the commands that do not")
    if os.environ.get("TERM") == "dumb":
        raise InputError(
            "the console cannot be drawn with TERM=dumb",
            todo="set another TERM (such as xterm-256color), or use the commands, such as `flightdeck demo --headless`",
        )


def is_person(stream: TextIO) -> bool:
    return stream.isatty()


def has_colour(stream: TextIO) -> bool:
    """A terminal with colour, and no NO_COLOR (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def discard(stream: TextIO) -> None:
    """Its reader has left, or its disk is full: /dev/null avoids a second error at interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Lines:
    """Plain lines for people, each flushed as it comes. A reader that leaves early silences them, and the command goes
    on; at its end `cut` says that they were printed in part."""

    cut: ClassVar = False
    """The reader of stdout has left."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self._colour = has_colour(self.stream)

    def say(self, text: str = "") -> None:
        try:
            print(text, file=self.stream, flush=True)
        except BrokenPipeError:
            Lines.cut = Lines.cut or self.stream is sys.stdout
            discard(self.stream)

    @property
    def width(self) -> int | None:
        """The terminal's columns; None in a pipe, where nothing is wrapped."""
        return shutil.get_terminal_size().columns if self.stream.isatty() else None

    def wrap(self, label: str, text: str, indent: int) -> None:
        """A text after its label, broken at the terminal's width; the lines after the first are indented."""
        if self.width is None:
            self.say(label + text)
            return
        # Colours in the label take no room on the screen; a line a few cells shorter does no harm.
        for line in textwrap.wrap(
            label + text,
            min(_WIDEST, self.width),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ):
            self.say(line)

    def ink(self, text: str, colour: str | None) -> str:
        if not self._colour or colour is None:
            return text
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m"

    def word(self, word: str, width: int = 0) -> str:
        """A state word in its colour, padded to `width`."""
        return self.ink(word, WORD_COLOURS.get(word)) + " " * max(0, width - len(word))


def print_json(document: Any) -> None:
    """One JSON document on stdout, models and dataclasses as objects; control characters in remote text stay
    escaped. JSON knows no NaN and no infinity: they become null."""
    plain = json.loads(json.dumps(document, default=_plain), parse_constant=lambda _: None)
    json.dump(plain, sys.stdout, indent=2)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def progress_lines(options: argparse.Namespace) -> Lines:
    """With --json, stdout has the one document alone."""
    return Lines(sys.stderr if options.json else sys.stdout)
