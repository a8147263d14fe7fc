"""The Transport and Channel protocols: what can be done on a node however it is reached. An argument that is
`~` or begins with `~/` lies in the home of the node's user."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Protocol

from engine.errors import InputError
from engine.security.identifiers import SshTarget
from engine.security.sanitise import last_line

_UNSAFE = re.compile(rb"[^ -~]|[\\'!]")
"""Bytes that some login shell reads otherwise within single quotes: fish a backslash, csh a newline and a `!`."""


@dataclass(frozen=True)
class Completed:
    code: int | None
    """Exit code, negative for a signal; None when the time limit ended it."""
    stdout: bytes
    stderr: bytes

    @property
    def exit_output(self) -> str:
        """The last line of its stderr, or else of its stdout: usually why it failed."""
        return last_line(self.stderr.decode(errors="replace")) or last_line(self.stdout.decode(errors="replace"))


class Channel(Protocol):
    """A program running on a node, its stdin and stdout in our hands as bytes; its stderr goes to `exit_output`."""

    async def write(self, data: bytes) -> None:
        """Raises NodeUnreachable when nobody will ever read it: the program or the connection is gone."""

    async def read(self, size: int) -> bytes:
        """At least one byte and at most `size`; b"" when it has closed its stdout. Raises NodeUnreachable."""

    async def close(self) -> int | None:
        """Close its stdin, end it when it does not leave at once, and say how it ended (None: not known)."""

    @property
    def exit_output(self) -> str:
        """The last line of its stderr so far."""


class Transport(Protocol):
    """How one node is reached. Everything raises NodeUnreachable (or HostKeyUnknown, HostKeyChanged, which are such)
    when the node cannot be reached, within the connect timeout; a lost connection is opened anew by the next call."""

    @property
    def target(self) -> SshTarget: ...

    async def run(self, argv: Sequence[str], *, timeout_s: float) -> Completed:
        """Run a command without input, its arguments never seen by a shell unquoted, at most `timeout_s` seconds; then,
        or when the call is cancelled, its whole process group is ended. Raises FileNotFoundError or OSError when it
        cannot be started, NodeUnreachable also for one on another machine that prints more than 32 MiB."""

    async def open(self, argv: Sequence[str]) -> Channel:
        """Start a program and leave it running; the caller closes the channel."""

    def forwarded(self, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
        """An address of this machine at which `host`:`port` of the node answers."""

    def exposed(self, host: str, port: int) -> AbstractAsyncContextManager[tuple[str, int]]:
        """An address of the node at which `host`:`port` of this machine answers."""

    async def close(self) -> None: ...


def in_home(path: PurePath | str) -> str | None:
    """The part after `~/` of a path in the node user's home ("" for `~` itself); None for any other path."""
    text = str(path)
    if text == "~":
        return ""
    return text.removeprefix("~/") if text.startswith("~/") else None


def expanded(argument: str, home: str) -> str:
    """`~` and `~/…` as a path below `home`, anything else as it is."""
    inside = in_home(argument)
    return argument if inside is None else f"{home}/{inside}".rstrip("/")


def quoted(argument: PurePath | str) -> str:
    """One argument for a POSIX shell on the node; `~/x` becomes `"$HOME"/x`, everything else stays what it is.
    Raises InputError for a NUL, which no argument can hold."""
    if "\0" in str(argument):
        raise InputError(f"{str(argument)[:80]!r} is no argument", why="it holds a NUL")
    inside = in_home(argument)
    if inside is None:
        return shlex.quote(str(argument))
    return f'"$HOME"/{shlex.quote(inside)}' if inside else '"$HOME"'


def for_any_shell(script: str) -> str:
    """A POSIX shell script as one line that every login shell hands to /bin/sh unread, also fish and csh. Its last
    newlines are lost."""
    bare = _UNSAFE.sub(lambda byte: b"\\0%03o" % byte[0][0], script.encode(errors="surrogateescape")).decode()
    return f"""exec /bin/sh -c 'eval "$(printf %b "$1")"' flightdeck '{bare}'"""
