"""This machine as a host of an attempt: its files and processes, directly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.launch.ports import holder
from engine.runs.mirror import LocalFile, NodeFile
from engine.supervision.links.base import HostFacts, LinkState, Sighting
from engine.worker import processes
from engine.worker.last_words import LastWords, last_words
from engine.worker.memory_kills import memory_kills
from engine.worker.processes import Process
from engine.worker.wire import BEAT, Identity, NodeFiles, read_exit, read_identity

BEAT_EVERY_S = 1.0
THIS_MACHINE = "this machine"
_HERE = LinkState(connected=True, silent_s=0.0, heard=True)


class LocalLink:
    """A host without an agent. Beats come from a thread of their own: no stalled disk of the head holds them up."""

    local = True
    state = _HERE

    def __init__(
        self,
        files: NodeFiles,
        nonce: str,
        ranks: Sequence[int] = (),
        names: Sequence[str] = (),
        *,
        known: Mapping[int, Identity] | None = None,
    ) -> None:
        """`known` are identities that an earlier supervisor has seen."""
        self.ranks = tuple(ranks)
        self.names = tuple(names) or (THIS_MACHINE,)
        self.facts: HostFacts | None = HostFacts(processes.boot_id(), memory_kills(), 0.0)
        self._files = files
        self._nonce = nonce
        self._fifos: dict[int, int] = {}
        self._opening = threading.Lock()
        self._boot_id = processes.boot_id()
        self._identities = {rank: identity for rank, identity in (known or {}).items() if rank in self.ranks}
        self._left: list[Process] | None = None
        self._holders: dict[int, str] | None = None
        self._closing = threading.Event()
        self._beats: threading.Thread | None = None

    def start(self) -> None:
        if self.ranks and self._beats is None:
            self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)
            self._beats.start()

    async def close(self) -> None:
        self._closing.set()
        with self._opening:
            for fifo in self._fifos.values():
                os.close(fifo)
            self._fifos.clear()

    def sight(self, rank: int, *, thorough: bool) -> Sighting:
        identity = self._identities.get(rank) or read_identity(self._files.identity(rank))
        if identity is not None:
            self._identities[rank] = identity
        # Liveness before the record: a keeper that leaves in between has written it by then.
        gone = thorough and identity is not None and not self._keeper_alive(identity)
        record = read_exit(self._files.exit(rank))
        return Sighting(identity, record, vanished=gone and record is None)

    def words(self, rank: int) -> LastWords:
        return last_words(self._files, rank)

    def hear_words(self) -> None:
        return

    def tell(self, rank: int, word: bytes) -> None:
        with self._opening:
            if self._closing.is_set():
                return
            try:
                if rank not in self._fifos:
                    # Reading too, so that opening never waits and a keeper that is late finds what was said.
                    flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
                    self._fifos[rank] = os.open(self._files.control(rank), flags)
                os.write(self._fifos[rank], word)
            except OSError:
                # Not there yet; or full: a keeper that does not listen has beats enough, and is ended by signals.
                # Whatever else it is (no descriptor free, say), the next beat is tried all the same.
                return

    def kill_groups(self) -> None:
        for identity in self._identities.values():
            if processes.alive(identity.trainer_pid, identity.trainer_start):
                processes.kill_group(identity.trainer_pgid, signal.SIGKILL)

    def ask_left(self, *, kill: bool) -> None:
        if kill:
            self._files.fence()
        try:
            self._left = processes.with_nonce(self._nonce)
        except (OSError, subprocess.SubprocessError):
            # Not told is not proved.
            self._left = None
        for process in (self._left or ()) if kill else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)

    def left(self) -> list[Process] | None:
        return self._left

    def ask_holders(self, ports: Sequence[int]) -> None:
        self._holders = {port: who for port in ports if (who := holder(port)) is not None}

    def holders(self) -> dict[int, str] | None:
        return self._holders

    def file(self, name: str) -> NodeFile:
        return LocalFile(Path(self._files.directory) / name)

    def _keeper_alive(self, identity: Identity) -> bool:
        return identity.boot_id == self._boot_id and processes.alive(identity.keeper_pid, identity.keeper_start)

    def _beat(self) -> None:
        while True:
            for rank in self.ranks:
                self.tell(rank, BEAT)
            if self._closing.wait(BEAT_EVERY_S):
                return
