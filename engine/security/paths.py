"""Paths from outside: expanded, resolved, and refused when they are no plain path or lead out of the allowed roots."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.errors import InputError
from engine.security.home import state_home
from engine.security.identifiers import shown

MAX_LENGTH = 4096
SHELL_SIGNS = frozenset("$`;|<>")
"""No path of ours reaches a shell unquoted; these in a path are a mistake ("$HOME" is not expanded) or an attack."""


def path_fault(text: object) -> str | None:
    """What is wrong with the form of a path, as the form that is accepted; None when it is a plain path."""
    if not isinstance(text, str) or not text:
        return "a path as text"
    if any(not sign.isprintable() for sign in text):
        return "a path without control characters"
    if len(text.encode()) > MAX_LENGTH:
        return f"a path of at most {MAX_LENGTH} bytes"
    if text.startswith("-"):
        return "a path that does not begin with -"
    if SHELL_SIGNS & set(text):
        return "a plain path without $ ` ; | < > (~ is expanded, variables are not)"
    return None


def default_roots() -> tuple[Path, ...]:
    """Home, the working directory, the state directory."""
    return Path.home(), Path.cwd(), state_home()


def validate_path(path: str | Path, purpose: str, *, roots: Iterable[Path] | None = None) -> Path:
    """The path, absolute, with ~ expanded and symlinks resolved; it need not exist. A relative one is taken from the
    working directory. Without `roots` it must lie below home, the working directory or the state directory.

    Raises InputError for a refused form, a `..` component, or a place outside of the roots, also through a symlink.
    """
    text = str(path)
    accepted = path_fault(text)
    if accepted is None and ".." in Path(text).parts:
        accepted = "a path without .."
    if accepted is not None:
        raise InputError(f"{purpose} {shown(text)}", why="refused", todo=f"give {accepted}")
    try:
        named = Path(text).expanduser().absolute()
        resolved = named.resolve()
        allowed = [root.expanduser().resolve() for root in (default_roots() if roots is None else roots)]
    except (RuntimeError, OSError) as broken:
        raise InputError(f"{purpose} {shown(text)}", why=f"it cannot be resolved: {shown(str(broken))}") from broken
    if not any(resolved.is_relative_to(root) for root in allowed):
        why = "it lies outside of the allowed directories"
        if any(named.is_relative_to(root) for root in allowed):
            why = f"a symlink in it leads to {shown(str(resolved))}, outside of the allowed directories"
        inside = ", ".join(dict.fromkeys(str(root) for root in allowed))
        raise InputError(f"{purpose} {shown(text)}", why=why, todo=f"give a path below one of {inside}")
    return resolved
