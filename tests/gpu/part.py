"""A part of a visit to a GPU machine, and what it is given there: its time, its folders, and where its results go."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from engine.node import processes
from tests.gpu.results import RECORDINGS, Row, Status, append_line, append_row, now, shortened, shown

ROOT: Final = Path(__file__).parents[2]
TAIL: Final = 100_000
"""Bytes kept of the end of each output of a command."""
_END_S: Final = 2.0
"""Left of a part's time after its last command, for what it makes of the output."""


@dataclass(frozen=True)
class Part:
    """`run` is called in a process of its own, which is killed with all that it started after `limit_s` seconds."""

    name: str
    what: str
    limit_s: float
    run: Callable[[Visit], None]
    dry_limit_s: float | None = None
    """On CPU builds, whose cores others may use as well; None: `limit_s`."""

    def limit_of(self, *, dry: bool) -> float:
        return self.dry_limit_s or self.limit_s if dry else self.limit_s


@dataclass(frozen=True)
class Completed:
    """A command that ended, or was killed at its limit (`code` is then None)."""

    code: int | None
    output: str
    errors: str
    seconds: float

    @property
    def timed_out(self) -> bool:
        return self.code is None


class Cannot(Exception):
    """A part cannot run on this machine."""


@dataclass
class Visit:
    """What a part is given. `scratch` is a private folder, removed after the part; `python` has the part's framework.

    `device` is "cuda", or with `dry` "cpu": CPU builds and the smallest sizes, which prove that the part works."""

    part: str
    out: Path
    scratch: Path
    dry: bool
    device: str
    python: str
    limit_s: float = 60.0
    id: str = ""
    _started: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Of the part's limit, s."""
        return max(0.0, self._started + self.limit_s - time.monotonic())

    def result(
        self,
        name: str,
        value: float | str,
        *,
        unit: str = "",
        target: str = "",
        ok: bool | None = None,
        note: str = "",
    ) -> None:
        """Keep and print a figure at once. `ok` says whether the target is met; None: there is none. `name` is the
        figure's identity: a later visit's value of the same name replaces it in the table."""
        if not name:
            raise ValueError("a figure needs a name")
        status = Status.MEASURED if ok is None else Status.OK if ok else Status.FAILED
        row = Row(now(), self.id, self.part, name, status, value, unit, target, note, dry=self.dry)
        append_row(self.out, row)
        figure = f"{shown(value)} {unit}".strip()
        print(f"  {name:<52} {figure:>24}  {target:<14} {status}{f': {note}' if note else ''}", flush=True)

    def cannot(self, why: str) -> NoReturn:
        """End the part here, since this machine lacks what it needs; never counts as passed. Raises Cannot."""
        raise Cannot(why)

    def record(self, name: str, text: str) -> None:
        """Keep a real output, of nvidia-smi or of a failure, word for word."""
        line = {"time": now(), "visit": self.id, "part": self.part, "name": name, "dry": self.dry}
        append_line(self.out / RECORDINGS, {**line, "text": shortened(text)})

    def call(
        self,
        argv: Sequence[str],
        *,
        limit_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Completed:
        """Run a command in a session of its own; after `limit_s`, or what is left to the part, it is killed with all
        that is in its session or below it. `env` is added to this process's. Raises OSError when it cannot start."""
        limit = min(limit_s or self.remaining_s, max(0.1, self.remaining_s - _END_S))
        started = time.monotonic()
        print(f"$ {' '.join(' '.join(argv).split())[:300]}", flush=True)
        # In files: a pipe stays open as long as anything that the command left behind.
        with tempfile.TemporaryFile(dir=self.scratch) as output, tempfile.TemporaryFile(dir=self.scratch) as errors:
            process = subprocess.Popen(
                argv,
                cwd=cwd or ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
                kill_family(process.pid)
                process.wait()
            texts = []
            for file in (output, errors):
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                texts.append(file.read().decode(errors="replace"))
        seconds = time.monotonic() - started
        if code != 0:
            why = "killed at its limit" if code is None else f"exit code {code}"
            print(f"{why} after {seconds:.1f} s\n{texts[0][-2000:]}{texts[1][-4000:]}", flush=True)
        return Completed(code, texts[0], texts[1], seconds)


MARK: Final = "FLIGHTDECK_GPU_VISIT"
"""In the environment of all that a part starts: what has left its session is found by it."""


def kill_family(leader: int, mark: str = "") -> list[int]:
    """KILL a session, all that is below it, and what carries `mark`; the pids that are left all the same."""
    left: list[processes.Process] = []
    start = processes.known_start(leader)
    for _ in range(10):
        marked = processes.with_variables({MARK: mark}) if mark else []
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            marked = processes.with_family(marked, {leader: start})
        left = [process for process in marked if process.pid != os.getpid()]
        if not left:
            return []
        processes.kill_all(left)
        time.sleep(0.05)
    return [process.pid for process in left]
