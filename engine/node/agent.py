"""The head's agent on one host: what the bootstrap becomes, one for each connection.

Its stdin and stdout carry the messages of engine.protocol.messages. It serves requests (probes and commands, in
children), and it watches the ranks of one attempt. When its stdin ends, or nothing was received for SILENCE_S, it ends
what it has started and leaves. It does not carry an attempt's nonce, so that no proof counts it.

Its main thread never waits for the head: what the connection does not take stays in a bounded buffer, and files and
children are read only while there is room in it. A second thread receives, and renews the ranks' leases by itself: a
disk here that stalls ends no rank.

Heartbeats that it finds in its pipe after it did not run for a while (the machine slept, or it was stopped) may be as
old as that: they renew no lease, until the head shows that it has heard of this agent since."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from engine.node import probes, processes
from engine.node.attempt_watch import POLL_INTERVAL_S, AttemptWatch
from engine.node.requests import Requests
from engine.protocol import messages
from engine.protocol.attempt import lease_clock
from engine.protocol.messages import Message, encode

SILENCE_S = 30.0
_RECEIVE_S = 0.2
_GAP_S = 2.0
"""Longer between two readings of the clock: the receiving thread did not run. A head waits longer beyond a lease."""
_MAX_OUTGOING_BYTES = 256 * 1024


class Agent:
    """The loop over the head's messages, the children's output and the clock."""

    def __init__(self, receive: int, send: int) -> None:
        """`receive` and `send` are file descriptors."""
        self._receive_pipe = receive
        self._send_pipe = send
        self._outgoing = bytearray()
        self._sending = threading.Lock()
        self._received: deque[Message | None] = deque()
        """For the main thread; None when the head is gone."""
        self._heartbeat: tuple[messages.Heartbeat, float] | None = None
        """The last one that counts, and when it came (`lease_clock`) at the earliest."""
        self._asked_at = self._ran_at = lease_clock()
        self._trusted_from: int | None = 0
        """The first heartbeat since this process last did not run, None until it comes: those count again from which
        the head shows that it has the acknowledgement of that one."""
        self._wake_read, self._wake_write = os.pipe()
        self._boot_id = processes.boot_id()
        self._watch: AttemptWatch | None = None
        self._requests = requests = Requests(self._send)
        self._handlers: dict[type, Callable[[Any], None]] = {
            messages.Watch: self._begin_watch,
            messages.ProbeRequest: requests.start_probe,
            messages.CommandRequest: requests.start_command,
            messages.RequestInput: requests.feed,
            messages.CancelRequest: requests.cancel,
        }
        self._received_at = lease_clock()
        self._polled_at = float("-inf")

    def run(self) -> int:
        """Until the head is gone; the exit code."""
        os.set_blocking(self._send_pipe, False)
        os.set_blocking(self._wake_write, False)
        # A probe's child then imports nothing, whatever becomes of the bundle.
        probes.preload()
        self._send(messages.Hello(self._boot_id, processes.oom_kill_count(), time.time()))
        threading.Thread(target=self._receive, name="receive", daemon=True).start()
        try:
            with contextlib.suppress(BrokenPipeError):
                while lease_clock() - self._received_at < SILENCE_S:
                    self._flush()
                    if not self._serve():
                        break
        finally:
            self._requests.kill()
        return 0

    def _serve(self) -> bool:
        """Wait for what can be done next, and do it; False when the head is gone."""
        readable = self._requests.readable() if self._has_room else {}
        writable = self._requests.writable()
        sending = [self._send_pipe] if self._outgoing else []
        ready_in, ready_out, _ = select.select(
            [self._wake_read, *readable], [*writable, *sending], [], self._timeout_s()
        )
        for pipe in ready_out:
            if pipe in writable:
                writable[pipe].write()
        for pipe in ready_in:
            if pipe in readable:
                self._requests.read(pipe, readable[pipe])
        self._requests.reap()
        if self._wake_read in ready_in:
            os.read(self._wake_read, 4096)
        while self._received:
            message = self._received.popleft()
            if message is None:
                return False
            # What belongs to an attempt is for nobody before it is watched.
            if handle := self._handlers.get(type(message)):
                handle(message)
        if self._watch is not None:
            if time.monotonic() - self._polled_at >= POLL_INTERVAL_S:
                self._polled_at = time.monotonic()
                self._watch.poll()
            # A part of each file in turn, while there is room.
            while self._has_room and self._watch.send_files():
                pass
        return True

    @property
    def _has_room(self) -> bool:
        return len(self._outgoing) < _MAX_OUTGOING_BYTES

    def _timeout_s(self) -> float:
        due = self._requests.due_at
        if self._watch is not None:
            due = min(due, self._polled_at + POLL_INTERVAL_S)
        return max(0.0, min(due - time.monotonic(), self._received_at + SILENCE_S - lease_clock()))

    def _receive(self) -> None:
        """Until the head is gone. Nothing here waits for a disk."""
        # They are for the main thread, which would not wake from its select.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        decoder = messages.Decoder()
        try:
            with contextlib.suppress(BrokenPipeError):
                while received := self._read():
                    self._received_at = lease_clock()
                    for message in decoder.feed(received):
                        if isinstance(message, messages.Heartbeat):
                            self._take_heartbeat(message)
                            self._send(messages.HeartbeatAck(message.number, time.time()))
                        else:
                            self._hand_over(message)
                    self._flush()
        finally:
            self._hand_over(None)

    def _hand_over(self, message: Message | None) -> None:
        self._received.append(message)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _read(self) -> bytes:
        ready: list[int] = []
        while not ready:
            self._asked_at = self._notice_gap()
            # sshd may give us one socket for both directions, and that is not blocking.
            ready, _, _ = select.select([self._receive_pipe], [], [], _RECEIVE_S)
            self._notice_gap()
        return os.read(self._receive_pipe, 65_536)

    def _notice_gap(self) -> float:
        now = lease_clock()
        if now - self._ran_at > _GAP_S:
            self._trusted_from = None
        self._ran_at = now
        return now

    def _take_heartbeat(self, heartbeat: messages.Heartbeat) -> None:
        if self._trusted_from is None:
            self._trusted_from = heartbeat.number
        if heartbeat.acknowledged >= self._trusted_from:
            self._heartbeat = heartbeat, self._asked_at
            self._renew_leases()

    def _renew_leases(self) -> None:
        # Called by both threads: the first heartbeat may come before its attempt is watched.
        if self._watch is not None and self._heartbeat is not None:
            self._watch.pass_heartbeat(*self._heartbeat)

    def _begin_watch(self, message: messages.Watch) -> None:
        self._watch = watch = AttemptWatch(message, self._boot_id, self._send)
        self._handlers.update({
            messages.RankCommand: watch.send_command,
            messages.ReadFile: watch.read_file,
            messages.KillRanks: watch.kill_ranks,
            messages.ListProcesses: watch.list_processes,
            messages.ExitOutputRequest: watch.send_exit_output,
        })  # fmt: skip
        self._send(messages.Watching())
        self._renew_leases()

    def _send(self, message: Message) -> None:
        frame = encode(message)
        with self._sending:
            self._outgoing += frame

    def _flush(self) -> None:
        with self._sending, contextlib.suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: os.write(self._send_pipe, self._outgoing[:_MAX_OUTGOING_BYTES])]


def main() -> int:
    for number in (signal.SIGHUP, signal.SIGINT):
        # The end of its stdin is what ends it. Not SIG_IGN, which its commands would inherit.
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    return Agent(0, 1).run()


if __name__ == "__main__":
    sys.exit(main())
