"""One attempt's ranks on this host, as the agent watches them: their keepers' files, heartbeats and commands to the
keepers, and the ranks' output files as they grow."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from engine.node import processes
from engine.node.processes import oom_kill_count
from engine.protocol import attempt, messages
from engine.protocol.attempt import EMERGENCY_CHECKPOINT, END, STOP, Identity, NodeFiles
from engine.protocol.events import exit_output
from engine.protocol.messages import Message

MAX_UNANSWERED_HEARTBEATS = 5
"""A head that receives nothing takes the ranks for ended by their lease, so later heartbeats are not passed on."""
POLL_INTERVAL_S = 0.1
_LIVENESS_INTERVAL_S = 1.0
_IDENTITY_INTERVAL_S = 1.0 if sys.platform.startswith("linux") else 10.0
"""Between two comparisons of a keeper's start time: on macOS each costs a process."""
_CHUNK_BYTES = 256 * 1024
_COMMANDS = {command.decode().strip(): command for command in (STOP, END, EMERGENCY_CHECKPOINT)}
_READABLE = re.compile(r"rank\d+\.(log|events\.jsonl|keeper\.log)")


class FileStream:
    """One file that the head reads as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._position = 0
        self._until = 0
        self._at_end = False
        """The head knows that this was all, and nothing has come since."""
        self._problem: str | None = None

    def order(self, begin: int | None, until: int) -> None:
        if begin is not None:
            self._position, self._at_end = begin, False
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        self._until = until

    def next_message(self) -> Message | None:
        """The next part of what was ordered, or why it cannot be read; None when there is nothing new."""
        if self._position >= self._until:
            return None
        wanted = min(_CHUNK_BYTES, self._until - self._position)
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(self._descriptor, wanted, self._position)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            before, self._problem = self._problem, error.strerror or str(error)
            return messages.FileError(self.path.name, self._problem) if self._problem != before else None
        self._problem = None
        if not data and self._at_end:
            return None
        self._at_end = len(data) < wanted
        self._position += len(data)
        return messages.FileData(self.path.name, self._position - len(data), self._at_end, data)


class WatchedRank:
    def __init__(self, rank: int, files: NodeFiles, identity: Identity | None) -> None:
        self.rank = rank
        self.identity = identity
        self.ended = False
        self._files = files
        self._fifo = -1

    def open_fifo(self) -> None:
        """Where there is one by now."""
        # Whatever else it is (no descriptor free, say), it is tried again.
        with contextlib.suppress(OSError):
            if self._fifo < 0:
                # Reading too, so that opening never waits.
                self._fifo = os.open(self._files.control(self.rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def send_command(self, command: bytes) -> None:
        """To its keeper; nothing when there is none yet, or it does not read. Waits for no disk."""
        with contextlib.suppress(OSError):
            os.write(self._fifo, command)

    def keeper_gone(self, boot_id: str, *, compare_start: bool) -> bool:
        """Without `compare_start`, another process with the keeper's pid may be taken for it."""
        identity = self.identity
        if identity is None:
            return False
        if not processes.same_boot(identity.boot_id, boot_id) or not processes.exists(identity.keeper_pid):
            return True
        return compare_start and not processes.alive(identity.keeper_pid, identity.keeper_start)

    def kill(self) -> None:
        identity = self.identity
        with contextlib.suppress(OSError, ValueError, TypeError):
            # Its keeper may have started the program again.
            identity = attempt.read_identity(self._files.identity(self.rank)) or identity
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # One whose start is not known, then or now, may be another's by now.
            if identity is not None and processes.start_time(identity.trainer_pid) == identity.trainer_start:
                processes.kill_group(identity.trainer_pgid, signal.SIGKILL)


class AttemptWatch:
    """Watches one attempt on behalf of the head. `send` queues a message for the head."""

    def __init__(self, watch: messages.Watch, boot_id: str, send: Callable[[Message], None]) -> None:
        self._files = NodeFiles(Path(watch.attempt))
        self._nonce = watch.nonce
        self._boot_id = boot_id
        self._send = send
        identities = {identity.rank: identity for identity in watch.known}
        self._ranks = {rank: WatchedRank(rank, self._files, identities.get(rank)) for rank in watch.ranks}
        self._streams: dict[str, FileStream] = {}
        self._liveness_at = self._identity_at = float("-inf")
        self.poll()

    def poll(self) -> None:
        """Report the ranks that have started or ended since the last call."""
        now = time.monotonic()
        if liveness := now - self._liveness_at >= _LIVENESS_INTERVAL_S:
            self._liveness_at = now
        if compare_start := liveness and now - self._identity_at >= _IDENTITY_INTERVAL_S:
            self._identity_at = now
        for rank in self._ranks.values():
            if not rank.ended:
                self._poll_rank(rank, liveness=liveness, compare_start=compare_start)

    def send_files(self) -> bool:
        """Send a part of each file that has more; False when none has."""
        parts = [part for stream in self._streams.values() if (part := stream.next_message()) is not None]
        for part in parts:
            self._send(part)
        return bool(parts)

    def pass_heartbeat(self, received: messages.Heartbeat, at: float) -> None:
        """Renew the leases as of `at` (`lease_clock`). Waits for no disk."""
        if received.number - received.answered <= MAX_UNANSWERED_HEARTBEATS:
            for rank in self._ranks.values():
                if not rank.ended:
                    rank.send_command(attempt.heartbeat(at))

    def send_command(self, message: messages.RankCommand) -> None:
        if message.rank in self._ranks and message.command in _COMMANDS:
            self._ranks[message.rank].open_fifo()
            self._ranks[message.rank].send_command(_COMMANDS[message.command])

    def read_file(self, message: messages.ReadFile) -> None:
        if _READABLE.fullmatch(message.file):
            stream = self._streams.setdefault(message.file, FileStream(self._files.directory / message.file))
            stream.order(message.begin, message.until)

    def kill_ranks(self, _message: messages.KillRanks) -> None:
        for rank in self._ranks.values():
            rank.kill()

    def list_processes(self, message: messages.ListProcesses) -> None:
        if message.kill:
            self._files.fence()
        marked = list[processes.Process]()
        try:
            marked = processes.with_nonce(self._nonce)
            family = processes.with_family(marked, self._leaders())
        except (OSError, ValueError, subprocess.SubprocessError):
            # Without a reply the head has no proof that nothing is left. What has the nonce is certainly the attempt's.
            processes.kill_all(marked if message.kill else ())
            return
        sizes = {name: attempt.size_of(stream.path) for name, stream in self._streams.items()}
        listed = [(process.pid, process.command[:200]) for process in family]
        readable = {name: size for name, size in sizes.items() if size is not None}
        self._send(messages.ProcessList(message.number, listed, readable))
        processes.kill_all(family if message.kill else ())

    def _leaders(self) -> dict[int, str | float]:
        """The keepers and programs that are known by now, also where a keeper has started another program since."""
        leaders: dict[int, str | float] = {}
        for rank in self._ranks.values():
            identities = [rank.identity]
            with contextlib.suppress(OSError, ValueError, TypeError):
                identities.append(attempt.read_identity(self._files.identity(rank.rank)))
            for identity in identities:
                if identity is not None and processes.same_boot(identity.boot_id, self._boot_id):
                    leaders[identity.keeper_pid] = identity.keeper_start or identity.started_at
                    leaders[identity.trainer_pid] = identity.trainer_start or identity.started_at
        return leaders

    def send_exit_output(self, message: messages.ExitOutputRequest) -> None:
        self._send(messages.ExitOutputReply(message.rank, exit_output(self._files, message.rank)))

    def _poll_rank(self, rank: WatchedRank, *, liveness: bool, compare_start: bool) -> None:
        rank.open_fifo()
        if rank.identity is None:
            rank.identity = attempt.read_identity(self._files.identity(rank.rank))
            if rank.identity is not None:
                self._send(messages.RankStarted(rank.rank, rank.identity))
        # Liveness before the record: a keeper that leaves in between has written it by then.
        gone = liveness and rank.keeper_gone(self._boot_id, compare_start=compare_start)
        record = attempt.read_exit(self._files.exit(rank.rank))
        if record is not None or gone:
            rank.ended = True
            self._send(messages.RankEnded(rank.rank, record, oom_kill_count(), exit_output(self._files, rank.rank)))
