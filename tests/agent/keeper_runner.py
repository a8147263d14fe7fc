"""A real keeper started on a real program, from a bundle staged as on a node."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.node import processes
from engine.protocol.attempt import (
    NONCE_ENV,
    AttemptSpec,
    ExitRecord,
    Identity,
    NodeFiles,
    RankSpec,
    read_exit,
    read_identity,
    write_atomic,
)
from tests.bundles import link_files
from tests.waiting import wait_until

WAIT = "import time; print('up'); time.sleep(60)"
"""The source of a program."""


def stage_bundle(to: Path, trainer: str | None = None) -> Path:
    """The worker as a node holds it; `trainer` is the source of another program in the trainer's place."""
    if not to.exists():
        link_files(to)
    if trainer is not None:
        program = to / "engine" / "trainer" / "main.py"
        program.unlink()
        program.write_text(trainer)
    return to


@dataclass
class RunningKeeper:
    """A keeper's process and what it leaves."""

    process: subprocess.Popen[bytes]
    files: NodeFiles
    nonce: str
    rank: int = 0

    def say(self, word: bytes) -> None:
        with os.fdopen(os.open(self.files.control(self.rank), os.O_RDWR), "wb") as fifo:
            fifo.write(word)

    def identity(self) -> Identity:
        """Awaits the identity."""
        wait_until(lambda: read_identity(self.files.identity(self.rank)) is not None)
        identity = read_identity(self.files.identity(self.rank))
        assert identity is not None
        return identity

    def await_output(self, text: bytes) -> None:
        wait_until(lambda: text in self.output())

    def output(self) -> bytes:
        log = self.files.log(self.rank)
        return log.read_bytes() if log.exists() else b""

    def troubles(self) -> str:
        return self.files.keeper_log(self.rank).read_text()

    def ended(self, within_s: float = 20.0) -> ExitRecord:
        """Awaits the keeper's end; with it, everything of the rank must be gone."""
        self.process.wait(within_s)
        record = read_exit(self.files.exit(self.rank))
        assert record is not None
        assert record.log_bytes == len(self.output())
        self.nothing_left()
        return record

    def nothing_left(self) -> None:
        wait_until(lambda: processes.with_nonce(self.nonce) == [])


def start_keeper(
    directory: Path,
    command: list[str] | None,
    *,
    trainer: str | None = None,
    rank: int = 0,
    restarts: int = 0,
    spec_fields: dict[str, Any] | None = None,
    workdir: Path | None = None,
    prefix: list[str] | None = None,
    options: list[str] | None = None,
    stdout: int = subprocess.DEVNULL,
) -> RunningKeeper:
    """Start a keeper on `command`, or on the stand-in `trainer`, in `directory`; `prefix` execs it."""
    bundle = stage_bundle(directory / "bundle", trainer)
    files = NodeFiles.for_attempt(directory / "node", "run", 1)
    files.directory.mkdir(parents=True)
    nonce = uuid.uuid4().hex
    own = RankSpec(
        rank, "n", sys.executable, str(workdir or directory), restarts=restarts, prints_metrics=command is not None
    )
    spec = AttemptSpec("run", 1, nonce, "ring", rank + 1, [own], command=command, **(spec_fields or {}))
    write_atomic(files.spec, spec.to_json())
    with files.keeper_log(rank).open("ab") as troubles:
        process = subprocess.Popen(
            [*(prefix or []), sys.executable, "-m", "engine.node.keeper", "--spec", str(files.spec), *(options or [])],
            cwd=bundle,
            env={**os.environ, NONCE_ENV: nonce, "MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=troubles,
            start_new_session=True,
        )
    return RunningKeeper(process, files, nonce, rank)
