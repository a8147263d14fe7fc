"""Answers many looks over one line to the head: `python -m worker.looks`.

Each line of stdin is `{"id": 1, "look": "ports", "arguments": […]}`; for each is printed, in whatever order they end,
`{"id": 1, "code": 0, "out": "…", "err": "…"}`: what `python -m worker.looks.ports …` would have ended with and said.
`{"end": 1}` ends one that nobody waits for any more. It ends, with all that it has started, when its stdin does.

A look is a fork of this process: it costs no session and no interpreter of its own, and what it does to itself is
its own affair.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import difflib
import hashlib
import json
import os
import re
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from .. import processes, wire  # noqa: TID252  (on a node the package is `worker`)
from . import near, parent

IMPORTED = (concurrent.futures, difflib, hashlib, shutil, socket, subprocess, processes, wire, near, parent)
"""What the looks need, once for all of them."""
_LOOK = re.compile(r"[a-z_]{1,40}")
_OUT_LIMIT, _ERR_LIMIT = 1 << 24, 1 << 12
_BLOCK = 1 << 16


@dataclass
class Child:
    """One look on its way. Both its pipes are closed when it has ended."""

    number: int
    pid: int
    out: int
    err: int
    said: dict[int, bytes]
    """What has come out of each pipe, the end of it; a pipe that is closed is no longer `open`."""
    open: set[int]

    def read(self, pipe: int) -> None:
        """What is there; at its end the pipe is closed."""
        block = os.read(pipe, _BLOCK)
        limit = _OUT_LIMIT if pipe == self.out else _ERR_LIMIT
        self.said[pipe] = (self.said[pipe] + block)[-limit:]
        if not block:
            os.close(pipe)
            self.open.remove(pipe)

    def settle(self) -> dict[str, Any]:
        """What has become of it; both pipes are closed by now."""
        _, status = os.waitpid(self.pid, 0)
        out, err = (self.said[pipe].decode(errors="replace") for pipe in (self.out, self.err))
        return {"id": self.number, "code": os.waitstatus_to_exitcode(status), "out": out, "err": err}

    def end(self) -> None:
        """At once; the tools that it has called have limits of their own."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def begin(number: int, look: str, arguments: list[str]) -> Child:
    """Start a look. Raises OSError."""
    (out, its_out), (err, its_err) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        _be(look, arguments, its_out, its_err)
    os.close(its_out)
    os.close(its_err)
    return Child(number, pid, out, err, {out: b"", err: b""}, {out, err})


def _be(look: str, arguments: list[str], out: int, err: int) -> None:
    """The child: never returns. It stays in the group of this process, which a head ends as a whole."""
    code = 1
    try:
        for here, there in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(here, there)
        # Its ends of the other pipes: only its own end is to tell that it has ended.
        os.close(out)
        os.close(err)
        sys.argv = [look, *arguments]
        runpy.run_module(f"{__package__}.{look}", run_name="__main__", alter_sys=False)
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Desk:
    """Takes the head's lines, and hands out the answers."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}

    def serve(self) -> None:
        """Until stdin ends."""
        unread = b""
        while True:
            pipes = {pipe: child for child in self._children.values() for pipe in child.open}
            ready, _, _ = select.select([0, *pipes], [], [])
            for pipe in ready:
                if pipe in pipes:
                    pipes[pipe].read(pipe)
            for child in [child for child in self._children.values() if not child.open]:
                _say(self._children.pop(child.number).settle())
            if 0 in ready:
                block = os.read(0, _BLOCK)
                if not block:
                    return
                *lines, unread = (unread + block).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, asked: dict[str, Any]) -> None:
        if "end" in asked:
            if asked["end"] in self._children:
                self._children[asked["end"]].end()
            return
        number, look = int(asked["id"]), str(asked["look"])
        if not _LOOK.fullmatch(look):
            _say({"id": number, "code": 2, "out": "", "err": "there is no such look"})
            return
        try:
            self._children[number] = begin(number, look, [str(word) for word in asked["arguments"]])
        except OSError as error:
            _say({"id": number, "code": 1, "out": "", "err": f"no look can begin: {error.strerror}"})

    def close(self) -> None:
        for child in self._children.values():
            child.end()


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    desk = Desk()
    try:
        desk.serve()
    finally:
        desk.close()
