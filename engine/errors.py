"""The errors a person can be shown: each says what went wrong, where, why, and what to do.

FlightDeckError
├── ConfigError        one or more faults in a configuration; nothing was started
├── InputError         a name, path or argument that is refused
├── NodeUnreachable    a node did not answer
│   ├── HostKeyUnknown     it shows a host key that nobody has accepted yet
│   ├── HostKeyChanged     it shows another host key than the accepted one
│   └── LoginRefused       it answered, and let nobody in
├── CheckFailed        preflight blocks the launch
├── NodesInUse         a calibration or a run that goes on keeps another one from the nodes
├── LaunchError        the launcher or the supervisor could not be started
├── RunNotFound        no run of that id or name
└── StateError         the state on disk cannot be read, or is held by someone else
"""

from __future__ import annotations

from dataclasses import dataclass


class FlightDeckError(Exception):
    """A fault with everything that a person needs to act on it, printed as one line."""

    def __init__(self, what: str, *, where: str = "", why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.todo = todo

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        if self.why:
            line += f": {self.why}"
        if self.todo:
            line += f" ({self.todo})"
        # Some of the words are a node's: none of them may steer the terminal that this is printed on.
        return "".join(sign if sign.isprintable() else " " for sign in line)


@dataclass(frozen=True)
class ConfigFault:
    """One fault in a configuration: where it is, the value found, and what is accepted."""

    file: str
    key: str
    value: str
    accepted: str

    def __str__(self) -> str:
        return f"{self.file}: {self.key} = {self.value}: expected {self.accepted}"


class ConfigError(FlightDeckError):
    """All the faults of one configuration at once; printed one line each."""

    def __init__(self, faults: list[ConfigFault]) -> None:
        super().__init__(f"{len(faults)} fault(s) in the configuration")
        self.faults = faults

    def __str__(self) -> str:
        return "\n".join(str(fault) for fault in self.faults)


class InputError(FlightDeckError, ValueError):
    """An identifier, path or argument that is refused before anything happens. A ValueError for other programs too,
    which call our checks from Python."""


class NodeUnreachable(FlightDeckError):
    """A node did not answer in time."""


class HostKeyUnknown(NodeUnreachable):
    """The node's host key is in no known_hosts. Only a person may accept it, who has compared the fingerprint."""

    def __init__(self, what: str, *, target: str, key: str, fingerprint: str, where: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, todo=todo)
        self.target = target
        """`[user@]host[:port]`, as asked for."""
        self.key = key
        """The public key in OpenSSH's form, "ssh-ed25519 AAAA…"."""
        self.fingerprint = fingerprint
        """"SHA256:…", as `ssh-keygen -lf` prints it."""


class HostKeyChanged(NodeUnreachable):
    """The node's host key is not the accepted one: another machine, or one between. Never connected to."""

    def __init__(self, what: str, *, expected: str, found: str, where: str = "", why: str = "", todo: str = "") -> None:
        super().__init__(what, where=where, why=why, todo=todo)
        self.expected = expected
        """Fingerprint of the accepted key."""
        self.found = found
        """Fingerprint of the key that it shows."""


class LoginRefused(NodeUnreachable):
    """The node answered and refused every key."""


class CheckFailed(FlightDeckError):
    """Preflight found a failure that blocks the launch."""


class NodesInUse(FlightDeckError):
    """What needs nodes for itself, and what else uses them, do not go on at the same time."""


class LaunchError(FlightDeckError):
    """The launcher or the supervisor could not be started."""


class RunNotFound(FlightDeckError):
    """No run has that id, name or unique prefix."""


class StateError(FlightDeckError):
    """The state on disk is unreadable, of a newer schema, or locked by another process."""
