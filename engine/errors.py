"""Errors that are shown to the user, each with what went wrong, where, why and what to do; and shared texts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby

from engine.protocol import sizes

size_text = sizes.size_text


def memory_text(count: float) -> str:
    """Bytes of memory, of Macs and of what runs there, as it is sold and as Activity Monitor counts it, in powers of
    1024: "512 GB", "96.5 GB", "640 MB"; `size_text` is for disks and networks."""
    amount, unit = (count / 2**30, "GB") if abs(count) >= 2**30 else (count / 2**20, "MB")
    whole = amount == int(amount) or (unit == "MB" and abs(amount) >= 10)
    return f"{amount:,.0f} {unit}" if whole else f"{amount:,.1f} {unit}"


ENABLE_RDMA = "turn on RDMA in System Settings (newer macOS), or run `rdma_ctl enable` in macOS Recovery; then restart"
"""Both ways: developer.apple.com/videos/play/wwdc2026/233 at 7:08, and Apple's TN3205."""


def duration_text(seconds: float) -> str:
    """ "8 h", "90 min", "45 s": in the largest unit that divides it, else in the next smaller one."""
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:g} s"


def reason_text(reason: str | None) -> str:
    """Why a run ended, in words; "" for none."""
    return "on request" if reason == "user_abort" else (reason or "").replace("_", " ")


def plural(count: int, noun: str) -> str:
    """A count in a message: "1 node", "1,200 files"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def spans(names: Iterable[str]) -> str:
    """Names in a message, those of one machine's ranks as a span: "one.0 to one.7, two"."""
    groups = [[*group] for _, group in groupby(names, lambda name: re.sub(r"(?<=\.)\d+$", "", name))]
    return ", ".join(" to ".join(dict.fromkeys((group[0], group[-1]))) for group in groups)


def did_you_mean(word: str, accepted: Iterable[str]) -> str:
    """A question for the accepted word that is nearest; "" where none is near."""
    near = get_close_matches(word, [*accepted], n=1)
    return f"did you mean {near[0]}?" if near else ""


class FlightDeckError(Exception):
    """A problem, where and why it occurred, and what to do (`todo`), printed as one line."""

    def __init__(self, what: str, *, where: str = "", why: str | OSError = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why if isinstance(why, str) else why.strerror or str(why)
        self.todo = todo

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.why:
            line += f": {self.why}"
        if self.todo:
            line += f" ({self.todo})"
        # Parts of the line come from nodes and must not send control characters to the terminal.
        return "".join(character if character.isprintable() else " " for character in line)


@dataclass(frozen=True)
class ConfigFault:
    """One fault in a configuration: its location, the value found, and what is accepted."""

    file: str
    key: str
    value: str
    accepted: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} = {self.value}: expected {self.accepted}"


class ConfigError(FlightDeckError):
    """All faults of a configuration, printed one per line."""

    def __init__(self, faults: list[ConfigFault]) -> None:
        super().__init__(f"{len(faults)} fault(s) in the configuration")
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


class InputError(FlightDeckError, ValueError):
    """A refused identifier, path or argument. Also a ValueError, for programs that call the engine's functions."""


class InputsChanged(InputError):
    """A run cannot be repeated as it was: its data, its base model or its packages are others by now."""


class NodeUnreachable(FlightDeckError):
    """A node did not respond in time."""


class HostKeyUnknown(NodeUnreachable):
    """The node's host key is in no known_hosts. Only a user who has compared the fingerprint may accept it."""

    def __init__(
        self, what: str, *, target: str, key: str, fingerprint: str, name: str = "", where: str = "", todo: str = ""
    ) -> None:
        super().__init__(what, where=where, todo=todo)
        self.name = name
        """By which known_hosts would hold the key."""
        self.target = target
        """`[user@]host[:port]`."""
        self.key = key
        """The public key in OpenSSH's form, "ssh-ed25519 AAAA…"."""
        self.fingerprint = fingerprint
        """"SHA256:…", as `ssh-keygen -lf` prints it."""


class HostKeyChanged(NodeUnreachable):
    """The node's host key is not the accepted one: another machine, or a man in the middle. No connection is made."""

    def __init__(self, what: str, *, expected: str, shown: str, where: str = "", why: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, why=why, todo=todo)
        self.expected = expected
        """Fingerprint of the accepted key."""
        self.shown = shown
        """Fingerprint of the key that the node presents."""


class LoginRefused(NodeUnreachable):
    """The node responded but refused every key."""


class NodesInUse(FlightDeckError):
    """A calibration or a run needs nodes that another one is using."""


class LaunchError(FlightDeckError):
    """The launcher or the supervisor could not be started."""


class RunNotFound(FlightDeckError):
    """No run has that id, name or unique prefix."""


class StateError(FlightDeckError):
    """The state on disk is unreadable, of a newer schema, or locked by another process."""
