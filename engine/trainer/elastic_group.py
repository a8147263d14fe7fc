"""The group of ranks of strategy "local", over TCP: a star around rank 0. A rank that is lost or late is left out by
the others, and joins again where rank 0 admits it; without rank 0 there is no group.

Every operation is one message from each member to rank 0, and one back. Members prove that they know the group's
key, which the attempt's specification has (multiprocessing.connection's HMAC challenge); nothing that is received is
unpickled, and nothing is encrypted."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from operator import add
from pathlib import Path
from struct import pack, unpack_from
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from engine.protocol.attempt import AttemptSpec
from engine.trainer.collective import Collective, TensorSpec
from engine.training.reporting import GroupError, PeerLost

FORM_LIMIT_S = 60.0
"""For all ranks to connect at the start."""
LEAST_WAIT_S = 10.0
"""A member that is later than rank 0 by this, and by rank 0's own time since the last operation, is left out."""
SAVE_LIMIT_S = 600.0
"""The least limit of a barrier, before which members write to disks of their own."""
STALL_S = 30.0
"""A connection on which nothing moves for so long in the middle of a message is lost."""
_GONE_S = 5.0
"""Rank 0 is gone when its port has refused connections for so long."""
_RETRY_S = 0.2
GREETING_LIMIT_S = 10.0
"""For a connection to prove who it is, from its beginning to its end."""
_MOST_GREETED = 64
"""Connections at a time that have not proved yet who they are: with more, the oldest is closed."""
_HELLO_BYTES = 4096
_FORMED, _RUNNING, _ADMITTED, _REFUSED = b"formed", b"running", b"admitted", b"refused"


class LeftOut(PeerLost):
    """The others go on without this rank, or rank 0 is gone: `join` tells."""


class _Arrival(NamedTuple):
    rank: int
    facts: str | None
    """Job, model and data of a rank that is ready to join a training under way."""
    connection: Connection


def join_group(spec: AttemptSpec, rank: int, note: Callable[[str], object]) -> tuple[Collective, str]:
    """The group as the job's strategy connects it, a task's always as MLX does, and how that is. `note` as in
    ElasticGroup. Raises GroupError."""
    if (spec.job or {}).get("strategy") != "local" or spec.task is not None:
        return Collective(spec.backend, spec.world_size, rank), spec.backend
    # The hostfile of MLX's ring, in which rank 0's first address is the group's.
    address = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())[0][0] if spec.world_size > 1 else None
    group = ElasticGroup(address, spec.group_key.encode(), spec.world_size, rank, note)
    return group, f"tcp to {address}" if address is not None else "none"


class ElasticGroup(Collective):
    def __init__(
        self, address: str | None, key: bytes, world_size: int, rank: int, note: Callable[[str], object]
    ) -> None:
        """Form the group at rank 0's `address` (ip:port; None for a rank alone), or find that it is under way without
        this rank. `key`: known to members alone. `note` is told who is left out and who joins. Raises GroupError."""
        self.size = world_size
        """Members of the last operation."""
        self.rank = rank
        self.waited_s = 0.0
        self._under_way: mx.array | None = None
        self._key = key
        self._note = note
        self._facts = ""
        self._formed = False
        self._elastic = False
        self._operation_at = time.monotonic()
        """When the last operation began."""
        self._members: dict[int, Connection] = {}
        """On rank 0: all others. On another rank: rank 0, unless this rank is left out."""
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._greeted: dict[socket.socket, None] = {}
        """On rank 0: the connections that have not proved yet who they are, the oldest first."""
        if address is None:
            return
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        try:
            if rank == 0:
                self._form(world_size)
            else:
                self._enter()
        except OSError as error:
            raise GroupError(f"the group at {address} could not be formed: {error}") from error

    @property
    def left_out(self) -> bool:
        """This rank has to `join` before any other operation."""
        return self.rank > 0 and not self._members

    @property
    def awaited(self) -> bool:
        """On rank 0: others wait to be admitted."""
        return not self._arrivals.empty()

    def begin(self) -> None:
        """Training begins: from now on, who is lost or late is left out. Until then that is an error."""
        self._elastic = True

    def combine(self, mine: bytes, combined: Callable[[Mapping[int, bytes]], bytes]) -> bytes:
        """`combined` of every member's `mine` by rank, computed on rank 0. Raises LeftOut, PeerLost."""
        started = time.monotonic()
        result = self._combine_all(mine, combined) if self.rank == 0 else self._combine_with(mine)
        self._operation_at = started
        self.waited_s += time.monotonic() - started
        return result

    def barrier(self) -> None:
        """As Collective's; a member that is still saving is awaited."""
        self._operation_at -= SAVE_LIMIT_S
        super().barrier()

    def start_sum(self, array: mx.array) -> None:
        """As `all_sum`, finished when it returns."""
        spec = TensorSpec(array.shape, array.dtype)

        def total(parts: Mapping[int, bytes]) -> bytes:
            rows = (read_array(part, spec) for part in parts.values() if part)
            return raw(reduce(add, rows, mx.zeros(spec.shape, spec.dtype)))

        mine = raw(array)
        # Most of what is broadcast by a sum is zeros.
        self._under_way = read_array(self.combine(mine if mine.count(0) < len(mine) else b"", total), spec)

    def start_gather(self, array: mx.array) -> None:
        """As `gather_arrays`, finished when it returns: one row per member."""
        rows = self.combine(raw(array), lambda parts: b"".join(parts.values()))
        self._under_way = read_array(rows, TensorSpec((self.size, *array.shape), array.dtype))

    def check_equal(self, facts: dict[str, object]) -> None:
        self._facts = json.dumps(facts, sort_keys=True)
        if not self.left_out:
            super().check_equal(facts)

    def admit(self, header: str, arrays: Callable[[], Iterable[mx.array]]) -> None:
        """On rank 0: whoever waits to join gets `header` and `arrays`, and is a member of the next operation."""
        while self.awaited:
            arrival = self._arrivals.get()
            if arrival.facts is None:
                _farewell(arrival.connection, _RUNNING)
                continue
            if arrival.facts != self._facts:
                self._note(f"rank {arrival.rank} has another job, model or data, and cannot join")
                _farewell(arrival.connection, _REFUSED)
                continue
            try:
                arrival.connection.send_bytes(_ADMITTED)
                arrival.connection.send_bytes(header.encode())
                for array in arrays():
                    arrival.connection.send_bytes(raw(array))
            except OSError as error:
                self._note(f"rank {arrival.rank} was lost while it joined: {error}")
                arrival.connection.close()
                continue
            if (before := self._members.pop(arrival.rank, None)) is not None:
                before.close()
            self._members[arrival.rank] = arrival.connection
            self._note(f"rank {arrival.rank} has joined again")

    def join(self, stopped: Callable[[], bool]) -> tuple[str, Iterator[bytes]]:
        """On another rank, after LeftOut: wait until rank 0 admits this one; its header and arrays' bytes. Raises
        GroupError; PeerLost when rank 0 is gone, or this rank is `stopped`."""
        self.leave()
        connection, answer = self._request(self._facts, None, stopped)
        if answer == _REFUSED:
            raise GroupError("the job, the model or the data of this rank differ from rank 0's: make them the same")
        self._members = {0: connection}
        header = self._receive(connection).decode()
        return header, iter(lambda: self._receive(connection), None)

    def leave(self) -> None:
        """Have the others go on without this rank, until it is to `join`."""
        for connection in self._members.values():
            connection.close()
        self._members = {}

    def _combine_with(self, mine: bytes) -> bytes:
        connection = self._members.get(0)
        if connection is None:
            raise LeftOut("this rank is not in the group")
        try:
            connection.send_bytes(mine)
        except OSError as error:
            self.leave()
            raise LeftOut(f"rank 0 does not answer: {error}") from error
        result = self._receive(connection)
        (self.size,) = unpack_from("!I", result)
        return result[4:]

    def _receive(self, connection: Connection) -> bytes:
        """From rank 0."""
        try:
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.leave()
            raise LeftOut(f"the connection to rank 0 has ended: {error}") from error

    def _combine_all(self, mine: bytes, combined: Callable[[Mapping[int, bytes]], bytes]) -> bytes:
        parts = {0: mine, **self._collect()}
        self.size = len(parts)
        result = combined(dict(sorted(parts.items())))
        for rank, connection in list(self._members.items()):
            try:
                connection.send_bytes(pack("!I", self.size) + result)
            except OSError as error:
                self._lose(rank, str(error))
        return result

    def _collect(self) -> dict[int, bytes]:
        """Every other member's message; who sends none in time is no member any more."""
        parts: dict[int, bytes] = {}
        # Its results may still be on their way to a member with a slow link.
        limit_s = max(LEAST_WAIT_S, time.monotonic() - self._operation_at)
        deadline = time.monotonic() + limit_s
        while waiting := {rank: member for rank, member in self._members.items() if rank not in parts}:
            left = max(0.0, deadline - time.monotonic()) if self._elastic else None
            ready = wait(list(waiting.values()), left)
            for rank, member in waiting.items():
                if member in ready:
                    try:
                        parts[rank] = member.recv_bytes()
                    except (EOFError, OSError) as error:
                        self._lose(rank, str(error) or "its connection has ended")
                elif not ready:
                    self._lose(rank, f"it is more than {limit_s:.0f} s late")
        return parts

    def _lose(self, rank: int, why: str) -> None:
        self._members.pop(rank).close()
        if not self._elastic:
            raise PeerLost(f"rank {rank} was lost before the training began: {why}")
        self._note(f"rank {rank} is left out until it joins again: {why}")

    def _form(self, world_size: int) -> None:
        """On rank 0: accept connections for ever, and return when every rank has come."""
        self._listener = socket.create_server((self._host, self._port), backlog=world_size + _MOST_GREETED)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        deadline = time.monotonic() + FORM_LIMIT_S
        while len(self._members) < world_size - 1:
            try:
                arrival = self._arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = ", ".join(str(rank) for rank in range(1, world_size) if rank not in self._members)
                raise GroupError(f"rank {missing} did not connect within {FORM_LIMIT_S:g} s") from None
            if arrival.facts is None and 0 < arrival.rank < world_size:
                self._members[arrival.rank] = arrival.connection
        for connection in self._members.values():
            connection.send_bytes(_FORMED)
        self._formed = True

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(accepted, accepted.dup()), daemon=True).start()
            except (OSError, RuntimeError):
                # Too many open files, or threads.
                time.sleep(_RETRY_S)

    def _greet(self, accepted: socket.socket, guard: socket.socket) -> None:
        """A stranger that says little keeps nobody else waiting. `guard`: the same, by which it is hung up on."""
        arrival, late = None, threading.Timer(GREETING_LIMIT_S, _hang_up, (guard,))
        late.daemon = True
        late.start()
        connection = _configured(accepted, STALL_S)
        self._greeted[guard] = None
        if len(self._greeted) > _MOST_GREETED:
            _hang_up(next(iter(self._greeted)))
        with contextlib.suppress(AuthenticationError, EOFError, OSError, ValueError, KeyError, TypeError):
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            hello = json.loads(connection.recv_bytes(_HELLO_BYTES))
            arrival = _Arrival(int(hello["rank"]), hello["facts"], connection)
        late.cancel()
        del self._greeted[guard]
        guard.close()
        if arrival is None:
            connection.close()
        elif arrival.facts is None and self._formed:
            _farewell(connection, _RUNNING)
        else:
            self._arrivals.put(arrival)

    def _enter(self) -> None:
        """On another rank: be there when the group forms; if it is under way, `join` comes later."""
        connection, answer = self._request(None, FORM_LIMIT_S, lambda: False)
        if answer == _FORMED:
            self._members = {0: connection}
        else:
            connection.close()

    def _request(
        self, facts: str | None, limit_s: float | None, stopped: Callable[[], bool]
    ) -> tuple[Connection, bytes]:
        """A connection to rank 0, and its first answer. Raises PeerLost when there is none within `limit_s`, or without
        a limit, when nobody listens there any more; GroupError for a rank 0 of another attempt."""
        started, refused_at = time.monotonic(), None
        while not stopped():
            now = time.monotonic()
            try:
                # Rank 0 may take a round's time to answer: only the connection itself has a limit.
                address = self._host, self._port
                connection = _configured(socket.create_connection(address, timeout=STALL_S), None)
                try:
                    answer_challenge(connection, self._key)
                    deliver_challenge(connection, self._key)
                    connection.send_bytes(json.dumps({"rank": self.rank, "facts": facts}).encode())
                    while not connection.poll(_RETRY_S):
                        if stopped():
                            raise PeerLost("stopped while the others went on without this rank")
                    return connection, connection.recv_bytes()
                except BaseException:
                    connection.close()
                    raise
            except (AuthenticationError, AssertionError) as error:
                raise GroupError(f"what listens at {self._host}:{self._port} is not this attempt's rank 0") from error
            except (EOFError, OSError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                refused_at = (refused_at or now) if refused else None
                if limit_s is not None and now - started > limit_s:
                    raise PeerLost(f"rank 0 at {self._host}:{self._port} does not answer: {error}") from error
                if limit_s is None and refused_at is not None and now - refused_at > _GONE_S:
                    raise PeerLost(f"rank 0 at {self._host}:{self._port} is gone") from error
            time.sleep(_RETRY_S)
        raise PeerLost("stopped while the others went on without this rank")


def read_array(content: bytes, spec: TensorSpec) -> mx.array:
    """The array of `raw`."""
    return mx.array(np.frombuffer(content, np.uint8)).view(spec.dtype).reshape(spec.shape)


def raw(array: mx.array) -> bytes:
    return np.asarray(array.reshape(-1).view(mx.uint8)).tobytes()


def _hang_up(connected: socket.socket) -> None:
    """Ends with an error whatever is under way on it."""
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _farewell(connection: Connection, message: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.send_bytes(message)
    connection.close()


def _configured(connected: socket.socket, stall_s: float | None) -> Connection:
    """Notices a silent host that is gone within about half a minute. `stall_s`: the longest wait in a message."""
    connected.settimeout(None)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        idle = socket.TCP_KEEPALIVE
    else:
        idle = socket.TCP_KEEPIDLE
    for option, value in {socket.TCP_NODELAY: 1, idle: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO) if stall_s is not None else ():
        connected.setsockopt(socket.SOL_SOCKET, option, pack("ll", int(stall_s or 0), 0))
    return Connection(connected.detach())
