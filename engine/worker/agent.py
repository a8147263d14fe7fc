"""The head's eyes and hands on one host during one attempt: `python -m worker.agent --attempt <directory>`.

Started by the supervisor over its own connection, which is the agent's stdin and stdout; what it hears and says is in
frames.py. It passes the beats on to the keepers, watches their files, sends what was ordered of them, and kills what it
is told to. It keeps nothing: when its stdin ends, or nothing was heard for SILENCE_S, it leaves, and the next one is
told again from which offset on to send. It does not carry the attempt's nonce, so that no proof counts it.

One thread that never waits for the head: what the connection does not take stays in a bounded buffer, and files are
read only as far as they were ordered, so a head that is slow or whose disk is full slows nothing here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import processes
from .frames import VERSION, Decoder, Message, encode
from .last_words import last_words
from .looks.ports import look as look_at_port
from .memory_kills import memory_kills
from .wire import BEAT, END, RESCUE, STOP, Identity, NodeFiles, read_exit, read_identity

SILENCE_S = 30.0
UNHEARD_BEATS = 5
"""As many beats are passed on though the head has not heard their pongs."""
LOOK_EVERY_S = 0.1
_SECOND_S = 1.0
_THOROUGH_S = 1.0 if sys.platform.startswith("linux") else 10.0
"""Between two full looks at a keeper's identity: on macOS each is a process of its own."""
_CHUNK_BYTES = 64 * 1024
_MOST_WAITING = 256 * 1024
_WORDS = {"stop": STOP, "end": END, "rescue": RESCUE}
_FILE = re.compile(r"rank\d+\.(log|events\.jsonl|keeper\.log)")


class Sending:
    """One file that was ordered."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self.position = 0
        self.until = 0
        self.at_end = False
        """The head has been told that this was all, and nothing has come since."""
        self.problem: str | None = None

    def order(self, begin: int | None, until: int) -> None:
        if begin is not None:
            self.position, self.at_end = begin, False
            self.close()
        self.until = until

    def read(self, size: int) -> bytes:
        """What is there, at most `size` bytes. Raises OSError."""
        if self._descriptor < 0:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        return os.pread(self._descriptor, min(size, self.until - self.position), self.position)

    def size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Watched:
    """One of the host's own ranks."""

    def __init__(self, rank: int, files: NodeFiles) -> None:
        self.rank = rank
        self._files = files
        self._fifo = -1
        self.identity: Identity | None = None
        self.ended = False

    def tell(self, word: bytes) -> None:
        """To its keeper; nothing when there is none yet, or it does not listen."""
        try:
            if self._fifo < 0:
                # Reading too, so that opening never waits.
                self._fifo = os.open(self._files.control(self.rank), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            os.write(self._fifo, word)
        except (FileNotFoundError, BlockingIOError):
            return

    def gone(self, boot_id: str, *, thorough: bool) -> bool:
        """Whether its keeper is no more. Without `thorough` another process may be taken for it."""
        identity = self.identity
        if identity is None:
            return False
        if identity.boot_id != boot_id or not processes.exists(identity.keeper_pid):
            return True
        return thorough and not processes.alive(identity.keeper_pid, identity.keeper_start)

    def kill(self) -> None:
        """The group of its program."""
        identity = self.identity
        if identity is not None and processes.alive(identity.trainer_pid, identity.trainer_start):
            processes.kill_group(identity.trainer_pgid, signal.SIGKILL)


class Agent:
    """The loop over the head's words and the clock."""

    def __init__(self, files: NodeFiles, hear: int, say: int) -> None:
        self._files = files
        self._hear = hear
        self._say = say
        self._decoder = Decoder()
        self._waiting = bytearray()
        self._boot_id = processes.boot_id()
        self._nonce = ""
        self._ranks: dict[int, Watched] = {}
        self._sending: dict[str, Sending] = {}
        self._heard_at = time.monotonic()
        self._looked_at = self._second_at = self._thorough_at = float("-inf")

    def run(self) -> int:
        """Until the head is gone; the exit code."""
        os.set_blocking(self._hear, False)
        os.set_blocking(self._say, False)
        poll = select.poll()
        poll.register(self._hear, select.POLLIN)
        with contextlib.suppress(BrokenPipeError):
            while time.monotonic() - self._heard_at < SILENCE_S:
                self._await(poll)
                if not self._listen():
                    break
                if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
                    self._look()
                self._read_files()
                self._flush()
        return 0

    def _await(self, poll: select.poll) -> None:
        """Until something is to be heard, the head takes more, or it is time to look."""
        left = max(0.0, self._looked_at + LOOK_EVERY_S - time.monotonic())
        if self._waiting:
            poll.register(self._say, select.POLLOUT)
        poll.poll(left * 1000.0)
        if self._waiting:
            poll.unregister(self._say)

    def _listen(self) -> bool:
        """Take in what the head has said; False when it will say nothing more."""
        try:
            heard = os.read(self._hear, 65_536)
        except BlockingIOError:
            return True
        if not heard:
            return False
        self._heard_at = time.monotonic()
        for message, _body in self._decoder.feed(heard):
            self._obey(message)
        return True

    def _obey(self, message: Message) -> None:
        match message["kind"]:
            case "watch":
                self._watch(str(message["nonce"]), [int(rank) for rank in message["ranks"]], message["known"])
            case "beat":
                # A head that hears nothing of us takes the ranks for ended by their lease, so it must not go on.
                if message["n"] - message["heard"] <= UNHEARD_BEATS:
                    for rank in self._ranks.values():
                        if not rank.ended:
                            rank.tell(BEAT)
                self._tell({"kind": "pong", "n": message["n"], "at": time.time()})
            case "word" if message["rank"] in self._ranks and message["word"] in _WORDS:
                self._ranks[message["rank"]].tell(_WORDS[message["word"]])
            case "send" if _FILE.fullmatch(str(message["file"])):
                self._order(str(message["file"]), message.get("from"), int(message["until"]))
            case "kill":
                for rank in self._ranks.values():
                    rank.kill()
            case "list":
                self._list(int(message["n"]), kill=message.get("kill") is True)
            case "ports":
                held = {str(port): who["holder"] for port in message["ports"] if (who := look_at_port("", int(port)))}
                self._tell({"kind": "ports", "n": message["n"], "held": held})
            case "words":
                words = asdict(last_words(self._files, int(message["rank"])))
                self._tell({"kind": "words", "n": message["n"], "rank": message["rank"], "words": words})

    def _watch(self, nonce: str, ranks: list[int], known: dict[str, Any]) -> None:
        self._nonce = nonce
        self._ranks = {rank: Watched(rank, self._files) for rank in ranks}
        for rank, identity in known.items():
            # From a host that has lost its files, a keeper that is gone would never be missed.
            self._ranks[int(rank)].identity = Identity(**identity)
        told = {"version": VERSION, "boot_id": self._boot_id, "memory_kills": memory_kills(), "at": time.time()}
        self._tell({"kind": "hello", **told})
        self._look()

    def _order(self, name: str, begin: int | None, until: int) -> None:
        if name not in self._sending:
            self._sending[name] = Sending(self._files.directory / name)
        self._sending[name].order(begin, until)

    def _look(self) -> None:
        """At the ranks' files, and from time to time at their keepers."""
        now = self._looked_at = time.monotonic()
        second = now - self._second_at >= _SECOND_S
        thorough = second and now - self._thorough_at >= _THOROUGH_S
        if second:
            self._second_at = now
        if thorough:
            self._thorough_at = now
        for rank in self._ranks.values():
            if not rank.ended:
                self._look_at(rank, second=second, thorough=thorough)

    def _look_at(self, rank: Watched, *, second: bool, thorough: bool) -> None:
        if rank.identity is None:
            rank.identity = read_identity(self._files.identity(rank.rank))
            if rank.identity is not None:
                self._tell({"kind": "started", "rank": rank.rank, "identity": asdict(rank.identity)})
        # Liveness before the record: a keeper that leaves in between has written it by then.
        gone = second and rank.gone(self._boot_id, thorough=thorough)
        record = read_exit(self._files.exit(rank.rank))
        if record is None and not gone:
            return
        rank.ended = True
        words = asdict(last_words(self._files, rank.rank))
        told = {"record": asdict(record) if record is not None else None, "memory_kills": memory_kills()}
        self._tell({"kind": "ended", "rank": rank.rank, **told, "words": words})

    def _read_files(self) -> None:
        """What was ordered, each file in its turn, as long as the head takes it."""
        moved = True
        while moved and len(self._waiting) < _MOST_WAITING:
            moved = False
            for name, file in self._sending.items():
                moved = self._read(name, file) or moved

    def _read(self, name: str, file: Sending) -> bool:
        if file.position >= file.until:
            return False
        try:
            data = file.read(_CHUNK_BYTES)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != file.problem:
                self._tell({"kind": "trouble", "file": name, "problem": problem})
            file.problem = problem
            return False
        file.problem = None
        if not data and file.at_end:
            return False
        file.at_end = len(data) < min(_CHUNK_BYTES, file.until - file.position)
        self._tell({"kind": "data", "file": name, "from": file.position, "end": file.at_end}, data)
        file.position += len(data)
        return bool(data)

    def _list(self, number: int, *, kill: bool) -> None:
        if kill:
            self._files.fence()
        try:
            left = processes.with_nonce(self._nonce)
        except (OSError, ValueError, subprocess.SubprocessError):
            # Unanswered, and so unproved.
            return
        sizes = {name: file.size() for name, file in self._sending.items()}
        told = [[process.pid, process.command[:200]] for process in left]
        self._tell({"kind": "listed", "n": number, "left": told, "sizes": sizes})
        for process in left if kill else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)

    def _tell(self, message: dict[str, Any], body: bytes = b"") -> None:
        self._waiting += encode(message, body)

    def _flush(self) -> None:
        while self._waiting:
            try:
                taken = os.write(self._say, self._waiting[:_MOST_WAITING])
            except BlockingIOError:
                return
            del self._waiting[:taken]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.agent", description="Watch one host of an attempt for its head.")
    parser.add_argument("--attempt", type=Path, required=True, help="the attempt's directory on this host")
    options = parser.parse_args(arguments)
    for ignored in (signal.SIGHUP, signal.SIGINT):
        # The end of its stdin is what ends it.
        signal.signal(ignored, signal.SIG_IGN)
    return Agent(NodeFiles(options.attempt.absolute()), 0, 1).run()


if __name__ == "__main__":
    sys.exit(main())
