"""mlx.launch as we run it: its arguments, and its process in a group of its own with a stdin that never ends.

It is no supervisor: it exits 0 whatever the ranks did, burns a core on pipes whose other end is open, and crashes on a
closed stdin. Its exit code is therefore never believed, and what it prints is evidence only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import LaunchError

_RANK_ENDED = re.compile(r"Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class Launcher:
    """mlx.launch's process, leader of its own session and group."""

    process: subprocess.Popen[bytes]
    stdin: Path

    @property
    def pid(self) -> int:
        return self.process.pid


def executable() -> Path:
    """mlx.launch beside this interpreter. Raises LaunchError when it is not there."""
    # sys.executable is not resolved: in a virtual environment it is a link, and mlx.launch lies beside the link.
    path = Path(sys.executable).with_name("mlx.launch")
    if not path.exists():
        raise LaunchError(
            "mlx.launch is missing", where=str(path), todo="install mlx into the environment that runs flightdeck"
        )
    return path


def arguments(
    *,
    hostfile: Path,
    starting_port: int,
    program: Sequence[str],
    environment: Mapping[str, str],
    backend: str = "ring",
    ranks_per_host: int = 1,
    launcher: Path | None = None,
) -> list[str]:
    """mlx.launch's argument list.

    `environment` shows in `ps` on every node, so nothing secret may be in it: a job's variables travel in spec.json.
    Raises ValueError for a variable name that mlx.launch would drop with no more than a warning.
    """
    line = [str(launcher or executable()), "--backend", backend, "--hostfile", str(hostfile)]
    line += ["--starting-port", str(starting_port)]
    if backend == "nccl":
        # The second gives each rank of a host its own GPU; with a hostfile it does nothing else.
        line += ["--nccl-port", str(starting_port), "--repeat-hosts", str(ranks_per_host)]
    for name, value in environment.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of an environment variable")
        line += ["--env", f"{name}={value}"]
    # Without "--", options of the program that look like the launcher's own would be swallowed.
    return [*line, "--", *program]


def start(
    argv: Sequence[str], *, stdin: Path, output: Path, environment: Mapping[str, str], directory: Path
) -> Launcher:
    """Start the launcher. `stdin` is made a FIFO, `output` is appended to. Raises LaunchError.

    It holds its own reading and writing end of the FIFO, so nobody's death is an end of file to it.
    """
    try:
        if not stdin.exists():
            os.mkfifo(stdin, 0o600)
        fifo = os.open(stdin, os.O_RDWR)
        try:
            with output.open("ab") as log:
                process = subprocess.Popen(
                    argv,
                    stdin=fifo,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **environment},
                    cwd=directory,
                    start_new_session=True,
                )
        finally:
            os.close(fifo)
    except OSError as error:
        raise LaunchError("mlx.launch could not be started", where=argv[0], why=error.strerror or str(error)) from error
    return Launcher(process, stdin)


def drop_pipes(stdin: Path) -> None:
    """Make the launcher notice that the ranks have left its pipes: one newline that nobody will read.

    Does nothing when the FIFO is gone or full.
    """
    try:
        fifo = os.open(stdin, os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(fifo, b"\n")
    except BlockingIOError:
        return
    finally:
        os.close(fifo)


def rank_ends(output: str) -> list[tuple[int, int]]:
    """(rank, exit code) of each "[WARN] Node with rank …" in the launcher's output, in its order.

    That order does not name the culprit; a rank whose keeper never ran has no other witness, though.
    """
    return [(int(match["rank"]), int(match["code"])) for match in _RANK_ENDED.finditer(output)]
