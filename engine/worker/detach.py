"""A process leaves those who started it: a session of its own, none of their pipes, and one last word to them.

Two forks and setsid, as daemons have always done it, because macOS has no setsid command.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

STARTED = 0
_ENDED_WITHOUT_A_WORD = 125
_AFTER_STDERR = 3
_MOST_DESCRIPTORS = 65_536
"""Where the system sets no limit, more than this are not looked through."""


class Parting:
    """The detached side. `tell` lets the one in front go; its pid is `front_pid` and it may still be there."""

    def __init__(self, pipe: int, front_pid: int) -> None:
        self._pipe = pipe
        self.front_pid = front_pid

    def tell(self, code: int) -> None:
        """Say the exit code with which the one in front is to end. Only the first word counts."""
        if self._pipe < 0:
            return
        # Whoever waited in front may be gone: a connection that broke must not end what has just been started.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, b"%d\n" % code)
        os.close(self._pipe)
        self._pipe = -1


def detach(troubles: Path) -> Parting:
    """Go on in a process of a session of its own; only there this returns.

    The process that called ends with the code that `Parting.tell` is given. The new one reads /dev/null, writes to
    /dev/null and `troubles` (which it appends to), and has nothing else open; its environment stays.
    """
    front_pid = os.getpid()
    read_end, write_end = os.pipe()
    between = os.fork()
    if between:
        os.close(write_end)
        os.waitpid(between, 0)
        os._exit(_heard(read_end))
    os.setsid()
    if os.fork():
        os._exit(0)
    # Its own copy of stderr is left as well: it may be the pipe of an ssh session, which waits for all who hold it.
    _redirect(troubles)
    close_all_but(write_end)
    return Parting(write_end, front_pid)


def close_all_but(kept: int) -> None:
    """Close everything that was inherited but `kept`, stdin, stdout and stderr."""
    limit = os.sysconf("SC_OPEN_MAX")
    os.closerange(_AFTER_STDERR, kept)
    os.closerange(kept + 1, limit if 0 < limit < _MOST_DESCRIPTORS else _MOST_DESCRIPTORS)


def _heard(pipe: int) -> int:
    said = b""
    while chunk := os.read(pipe, 64):
        said += chunk
        if b"\n" in said:
            break
    try:
        return int(said)
    except ValueError:
        os.write(2, b"the keeper ended before it had started its rank\n")
        return _ENDED_WITHOUT_A_WORD


def _redirect(troubles: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        said = os.open(troubles, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError:
        said = os.dup(nothing)
    for source, target in ((nothing, 0), (nothing, 1), (said, 2)):
        os.dup2(source, target)
