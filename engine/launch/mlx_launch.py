"""mlx.launch as we run it: its arguments, its process in a group of its own with a stdin that stays open, and its
output, read as it grows.

It does not supervise: it exits 0 whatever the ranks did, burns a core on pipes whose other end is open, and crashes on
a closed stdin. So its exit code is ignored, and its output is only evidence."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import LaunchError
from engine.node import processes
from engine.protocol.events import tail

_RANK_ENDED = re.compile(r"Node with rank (?P<rank>\d+) exited with code (?P<code>-?\d+)")


def executable() -> Path:
    """mlx.launch beside this interpreter. Raises LaunchError when it is not there."""
    # sys.executable is not resolved: in a virtual environment it is a link, and mlx.launch is beside the link.
    path = Path(sys.executable).with_name("mlx.launch")
    if not path.exists():
        raise LaunchError(
            "mlx.launch is missing", where=str(path), todo="install mlx into the environment that runs flightdeck"
        )
    return path


def arguments(
    *, hostfile: Path, starting_port: int, program: Sequence[str], environment: Mapping[str, str], backend: str = "ring"
) -> list[str]:
    """mlx.launch's argument list.

    `environment` is visible in `ps` on every node and holds no secrets: a job's variables are sent in spec.json."""
    line = [str(executable()), "--backend", backend, "--hostfile", str(hostfile)]
    line += ["--starting-port", str(starting_port)]
    if backend == "nccl":
        # It gives every rank its host's first GPU: ours give each its own.
        line += ["--nccl-port", str(starting_port)]
    for name, value in environment.items():
        line += ["--env", f"{name}={value}"]
    # Without "--" the launcher would take the program's options that look like its own.
    return [*line, "--", *program]


def start(
    argv: Sequence[str], *, stdin: Path, output: Path, environment: Mapping[str, str], directory: Path
) -> Launcher:
    """Start the launcher with a FIFO as `stdin`; `output` is appended to. Raises LaunchError.

    It holds both ends of the FIFO itself, so it sees no end of file when another process dies."""
    try:
        if not stdin.exists():
            os.mkfifo(stdin, 0o600)
        fifo = os.open(stdin, os.O_RDWR)
        try:
            with output.open("ab") as log:
                offset = log.tell()
                variables = {**os.environ, **environment}
                process = processes.start_session(argv, directory, log, stdin=fifo, env=variables)
        finally:
            os.close(fifo)
    except OSError as error:
        raise LaunchError("mlx.launch could not be started", where=argv[0], why=error) from error
    launcher = Launcher(process.pid, "", stdin, output, offset)
    launcher.process = process
    try:
        launcher.start = processes.start_time(process.pid) or ""
    except (OSError, subprocess.SubprocessError) as error:
        # Nobody could end it later: without its start time it cannot be told from another process.
        launcher.kill()
        raise LaunchError("mlx.launch could not be started", where=argv[0], why=str(error)) from error
    return launcher


def rank_ends(output: str) -> list[tuple[int, int]]:
    """(rank, exit code) of each "[WARN] Node with rank …" in the launcher's output, in its order.

    That order does not show which rank failed first, but for a rank whose keeper never ran there is no other evidence.
    """
    return [(int(match["rank"]), int(match["code"])) for match in _RANK_ENDED.finditer(output)]


_BLOCK_BYTES = 262_144
_LONGEST_LINE = 8192


class Launcher:
    """mlx.launch's process, leader of its own session and group: our own child, or one that an earlier supervisor
    started."""

    process: subprocess.Popen[bytes] | None = None
    """None for a child of another supervisor."""

    def __init__(self, pid: int, start: str, stdin: Path, log: Path, offset: int) -> None:
        """`offset` is where the attempt's output begins in `log`."""
        self.pid = pid
        self.start = start
        self.stdin = stdin
        self._log = log
        self._begin = self._offset = offset
        self._torn = b""

    def alive(self, *, check_pids: bool = True) -> bool:
        """With `check_pids` False a launcher that an earlier supervisor started may be mistaken for a later process
        with its pid: telling them apart takes a process on macOS."""
        if self.process is not None:
            return self.process.poll() is None
        if not check_pids:
            return processes.exists(self.pid)
        return processes.alive(self.pid, self.start)

    def drop_pipes(self) -> None:
        """Send a newline, at which the launcher drops the pipes that its ranks have left. Does nothing when the FIFO
        is gone or full."""
        with contextlib.suppress(OSError):
            fifo = os.open(self.stdin, os.O_RDWR | os.O_NONBLOCK)
            try:
                os.write(fifo, b"\n")
            finally:
                os.close(fifo)

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the launcher's process group, unless its number has been reused."""
        # A group outlives its leader and keeps its number. A process with the leader's pid and another start time means
        # that the group has ended and the number was reused.
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if processes.start_time(self.pid) in (None, self.start):
                processes.kill_group(self.pid, number)

    def kill(self) -> None:
        """End a child of ours with its group."""
        processes.kill_group(self.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def rank_ends(self) -> list[tuple[int, int]]:
        """(rank, exit code) of each end that the launcher has reported since the last call."""
        try:
            with self._log.open("rb") as log:
                log.seek(self._offset)
                block = log.read(_BLOCK_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(block)
        whole, _, self._torn = (self._torn + block).rpartition(b"\n")
        self._torn = self._torn[-_LONGEST_LINE:]
        return rank_ends(whole.decode(errors="replace")) if whole else []

    def tail(self) -> str:
        """The end of its output in this attempt."""
        return tail(self._log, self._begin)
