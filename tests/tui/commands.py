"""Runs `flightdeck` commands: in this process, or as one of their own where a test is about the process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tui.cli import main

FLIGHTDECK = str(Path(sys.executable).with_name("flightdeck"))
ACCEPTING = frozenset({"launch", "plan", "nodes", "preflight", "calibrate", "sync", "environments", "models"})
"""The commands that ask before they run what a configuration names."""


@dataclass(frozen=True)
class Done:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


def environment(home: Path, **more: str) -> dict[str, str]:
    """This process's environment with a home of the test's own, and no terminal settings that would change output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    return {**kept, "FLIGHTDECK_HOME": str(home), **more}


def accepting(arguments: Sequence[str]) -> list[str]:
    """The arguments of somebody who has read the configuration."""
    return [*arguments, *(["--accept"] if ACCEPTING.intersection(arguments[:1]) else [])]


def flightdeck(home: Path, *arguments: str, cwd: Path | None = None, accept: bool = True) -> Done:
    """Run a command to its end, without a terminal, in this process: another one costs half a second to start."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with (
        Path(os.devnull).open() as nothing,
        mock.patch.object(sys, "stdin", nothing),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment(home), clear=True),
        contextlib.chdir(cwd or Path.cwd()),
    ):
        try:
            code = main(accepting(arguments) if accept else arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Done(code, _written(out), _written(err))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    raw = stream.buffer
    assert isinstance(raw, io.BytesIO)
    return raw.getvalue().decode()


def shell(home: Path, *arguments: str, cwd: Path | None = None, timeout_s: float = 120) -> Done:
    """As `flightdeck`, as a process of its own."""
    done = subprocess.run(
        [FLIGHTDECK, *accepting(arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=environment(home),
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())
