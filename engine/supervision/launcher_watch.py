"""mlx.launch as the supervisor sees it: alive or not, and what it has said, read once and little by little."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from engine.launch.mlx_launch import Launcher, drop_pipes, rank_ends
from engine.launch.ssh_shim import words_of
from engine.worker import processes

_TAIL_BYTES = 4096
_BLOCK_BYTES = 262_144
_LONGEST_LINE = 8192


class LauncherWatch:
    """One launcher process, our own child or one that an earlier supervisor started."""

    def __init__(self, pid: int, start: str, stdin: Path, log: Path, offset: int) -> None:
        """`offset` is where the attempt begins in `log`."""
        self.pid = pid
        self._start = start
        self._stdin = stdin
        self._log = log
        self._begin = self._offset = offset
        self._torn = b""
        self._child: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(cls, launcher: Launcher, log: Path, offset: int) -> LauncherWatch:
        watch = cls(launcher.pid, processes.start_time(launcher.pid) or "", launcher.stdin, log, offset)
        watch._child = launcher.process
        return watch

    @property
    def start(self) -> str:
        return self._start

    def alive(self, *, thorough: bool = True) -> bool:
        """Whether it runs. Without `thorough`, one that an earlier supervisor has started may be taken for alive
        because a later process has its pid: the full answer costs a process on macOS."""
        if self._child is not None:
            return self._child.poll() is None
        if not thorough:
            return processes.exists(self.pid)
        return processes.alive(self.pid, self._start)

    def drop_pipes(self) -> None:
        drop_pipes(self._stdin)

    def signal_group(self, number: signal.Signals) -> None:
        """To the launcher and whatever it has started in its own group. Nothing when the group is not its any more."""
        # A group outlives its leader, and its number stays taken for as long; a new process with the leader's pid but
        # another start time means that the group is somebody else's.
        started = processes.start_time(self.pid)
        if started is None or started == self._start:
            processes.kill_group(self.pid, number)

    def rank_ends(self) -> list[tuple[int, int]]:
        """(rank, exit code) of each end that the launcher has told since the last call."""
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

    def words(self, rank: int) -> str:
        """The last of what ssh has said about `rank`, over which the launcher could not start it; "" for nothing."""
        return tail(words_of(self._stdin.parent, rank))

    def tail(self) -> str:
        """The last of what it has said in this attempt."""
        return tail(self._log, self._begin)


def tail(path: Path, begin: int = 0, size: int = _TAIL_BYTES) -> str:
    """The last `size` bytes of a file after offset `begin`, as text; "" when there is none."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(begin, end - size))
            return file.read(size).decode(errors="replace")
    except OSError:
        return ""
