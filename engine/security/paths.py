"""The state directory (private to its user), and validation of paths from outside: expanded, resolved, and refused
when malformed or outside of the allowed roots."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from platformdirs import user_state_path

from engine.errors import InputError, StateError
from engine.node.bootstrap import access_fault, make_private
from engine.security.identifiers import safe_repr


def state_home() -> Path:
    """FLIGHTDECK_HOME, else the platform's user state directory; it may not exist."""
    configured = os.environ.get("FLIGHTDECK_HOME")
    return Path(configured).expanduser().absolute() if configured else user_state_path("flightdeck")


def make_home(home: Path) -> None:
    """Create the state directory, 0700. Raises StateError when it cannot be created or written, or others can write
    it."""
    refused = partial(StateError, where=str(home), todo="set FLIGHTDECK_HOME")
    try:
        if not home.is_dir():
            make_private(home)
    except OSError as error:
        raise refused("the state directory cannot be created", why=str(error.strerror)) from error
    check_private(home)
    if not os.access(home, os.W_OK | os.X_OK):
        raise refused("the state directory cannot be written")


def check_private(folder: Path) -> None:
    """Raises StateError where another user could change what lies in a folder of the state directory: plans in it are
    run. One that is not there yet is refused where another user could make it."""
    try:
        fault = access_fault(folder)
    except OSError as error:
        raise StateError("the state cannot be read", where=str(folder), why=error) from error
    if fault:
        raise StateError("the state is not used", where=str(folder), why=fault, todo="or set FLIGHTDECK_HOME")


MAX_PATH_LENGTH = 4096
SHELL_CHARACTERS = frozenset("$`;|<>")
"""In a path these are a mistake ("$HOME" is not expanded) or an attack, though no path reaches a shell unquoted."""


def path_fault(text: object) -> str | None:
    """The form that a path violates, as "a path …"; None when it violates none."""
    if not isinstance(text, str) or not text:
        return "a path as text"
    if any(not character.isprintable() for character in text):
        return "a path without control characters"
    if len(text.encode()) > MAX_PATH_LENGTH:
        return f"a path of at most {MAX_PATH_LENGTH} bytes"
    if text.startswith("-"):
        return "a path that does not begin with -"
    if SHELL_CHARACTERS & set(text):
        return "a plain path without $ ` ; | < > (~ is expanded, variables are not)"
    return None


def default_roots() -> tuple[Path, ...]:
    return Path.home(), Path.cwd(), state_home()


def validate_path(path: str | Path, purpose: str, *, roots: Iterable[Path] | None = None) -> Path:
    """The path, absolute, with ~ expanded and symlinks resolved; it need not exist. A relative one is taken from the
    working directory. Without `roots` it must be below home, the working directory or the state directory.

    Raises InputError for a refused form, a `..` component, or a path outside of the roots, also through a symlink."""
    text = str(path)
    what = f"{purpose} {safe_repr(text)}"
    accepted = path_fault(text)
    if accepted is None and ".." in Path(text).parts:
        accepted = "a path without .."
    if accepted is not None:
        raise InputError(what, why="refused", todo=f"give {accepted}")
    try:
        named = Path(text).expanduser().absolute()
        resolved = named.resolve()
        allowed = [root.expanduser().resolve() for root in (default_roots() if roots is None else roots)]
    except (RuntimeError, OSError) as error:
        raise InputError(what, why=f"it cannot be resolved: {safe_repr(str(error))}") from error
    # Python before 3.13 raises RuntimeError for it.
    if any(part.is_symlink() for part in (resolved, *resolved.parents)):
        raise InputError(what, why="it cannot be resolved: a symlink in it leads back to itself")
    if not any(resolved.is_relative_to(root) for root in allowed):
        why = "it is outside of the allowed directories"
        if any(named.is_relative_to(root) for root in allowed):
            why = f"a symlink in it leads to {safe_repr(str(resolved))}, outside of the allowed directories"
        inside = ", ".join(dict.fromkeys(str(root) for root in allowed))
        raise InputError(what, why=why, todo=f"give a path below one of {inside}")
    return resolved
