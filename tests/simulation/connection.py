"""The head's connection to one machine, as engine.cluster.host_connection and engine.node.agent keep it: one ordered
stream each way, which outlives a short cut and is made anew after a longer one. While heartbeats and their answers
pass, nothing is computed for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.node.attempt_watch import AttemptWatch
from engine.node.processes import Process
from engine.protocol.attempt import ExitRecord, Identity
from engine.protocol.events import ExitOutput
from engine.protocol.messages import Heartbeat
from tests.simulation.nodes import Machine, SimulatedKeeper

if TYPE_CHECKING:
    from tests.simulation.world import World

KEEPALIVE_S = 15.0
"""A stream on which nothing comes for so long is given up."""
_NOTHING = ExitOutput()


class RankSeen:
    """One rank as its host last reported it."""

    __slots__ = ("identity", "output", "record", "restarted", "vanished")

    def __init__(self, identity: Identity | None) -> None:
        self.identity = identity
        self.record: ExitRecord | None = None
        self.vanished = self.restarted = False
        self.output = _NOTHING


class Connection:
    def __init__(  # noqa: PLR0913
        self,
        world: World,
        machine: Machine,
        number: int | None,
        *,
        key: str,
        names: tuple[str, ...],
        ranks: tuple[int, ...] = (),
        current: bool = True,
        identities: Mapping[int, Identity] | None = None,
    ) -> None:
        self.world, self.machine, self.number = world, machine, number
        self.key, self.names, self.ranks, self.current = key, names, ranks, current
        self.local = machine is world.head_machine
        self.seen = {rank: RankSeen((identities or {}).get(rank)) for rank in ranks}
        self.open = self.closed = self.contact = False
        self.answered = self.greeted = False
        self.answered_at = world.time.now
        self.longest_silence_s = 0.0
        self.boot_id: str | None = None
        self.memory_kills: int | None = None
        self.clock_ahead_s = 0.0
        self.processes: tuple[Process, ...] | None = None
        self.unanswered = False
        self.unsent = False
        self.version = 0
        """Another number when something of it has changed."""
        self._standing: dict[int, bytes] = {}
        self._sent: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Messages to the machine that wait for a way there."""
        self._received: list[tuple[float, Callable[[Connection], None]]] = []
        """Messages from the machine, and when they are here."""
        self._generation = 0
        self._waits_for_disk = -1
        self._delivered_at = 0.0
        self._cut_at = 0.0
        """When the last contact ended."""
        self._awaits_machine = False
        world.time.after(world.rng.uniform(0.05, 0.3), self._connect)

    # The stream.

    def receives(self) -> bool:
        machine = self.machine
        if not self.open or machine.agent_stopped or machine.cut_from or not machine.awake:
            return False
        # Without acknowledgements TCP sends no more than its first window.
        return self.world.head_runs() and not (machine.cut_to and self.world.time.now - self._cut_at > 1.0)

    def _sends(self) -> bool:
        machine = self.machine
        return self.open and machine.awake and not (machine.agent_stopped or machine.cut_to) and self.world.head_runs()

    def _connect(self) -> None:
        if self.closed or self.open:
            return
        if not self.machine.reachable() or not self.world.head_runs():
            self._awaits_machine = True
            return
        self._awaits_machine = False
        self._generation += 1
        self.open = True
        self.machine.sessions.append(self)
        self.post(Connection.hello)
        self.update_contact()
        for keeper in self._keepers():
            if keeper.identity is not None:
                self.post(_started(keeper))
            if keeper.end_shows:
                self.post(_ended(keeper))
        self.post(Connection.watching)
        for rank, command in self._standing.items():
            self._send(self._command, rank, command)
        if self.unanswered:
            self._send(self._list)

    def hello(self) -> None:
        machine = self.machine
        self.boot_id, self.memory_kills = machine.boot_id, machine.memory_kills
        self.clock_ahead_s = machine.clock_ahead_s - self.world.head_machine.clock_ahead_s
        self._note_restart()
        self._changed()

    def _note_restart(self) -> None:
        for seen in self.seen.values():
            if seen.identity is not None and seen.identity.boot_id != self.boot_id and not self.local:
                seen.restarted = True

    def watching(self) -> None:
        """It has reported what there is of its ranks."""
        self.answered = True
        self.has_answered(self.world.time.now)
        self.greeted = True
        self._changed()

    def has_answered(self, at: float) -> None:
        """With what was sent then; until then nothing had come, unless heartbeats passed."""
        head = self.world.head
        if not (self.contact and self.greeted) and head is not None:
            self.longest_silence_s = max(self.longest_silence_s, head.clock.silence_s(at - self.answered_at))
        self.answered_at = max(self.answered_at, at)

    def _keepers(self) -> list[SimulatedKeeper]:
        return [keeper for keeper in self.machine.keepers if keeper.attempt == self.number]

    def update_contact(self) -> None:
        """After something has changed on the way, or at one of its ends."""
        now = self.world.time.now
        if self._awaits_machine and self.machine.reachable() and self.world.head_runs():
            self._awaits_machine = False
            self.world.time.after(self.world.rng.uniform(0.2, 4.0), self._connect)
        contact = self.open and self.machine.in_contact()
        if contact == self.contact:
            return
        self.world.before_change()
        self.contact = contact
        self._changed()
        if not contact:
            self._cut_at = now
            if self.greeted:
                self.answered_at = now
            self.world.time.after(KEEPALIVE_S, self._give_up, self._generation, now)
            if self.open and self._sends():
                for number in range(1, int(KEEPALIVE_S)):
                    self.world.time.after(float(number), self._one_way_heartbeat, self._generation, number)
            for keeper in self._keepers():
                keeper.contact_ends()
            return
        if self.greeted:
            self.has_answered(self.world.time.now)
        for keeper in self._keepers():
            keeper.contact_begins()
        self._flush()

    def _flush(self) -> None:
        if self.receives():
            self._deliver(self._generation)
        if self._sends():
            commands, self._sent = self._sent, []
            for call, arguments in commands:
                self._send(call, *arguments)

    def _one_way_heartbeat(self, generation: int, number: int) -> None:
        """It arrives, while nothing comes back: the real agent's rule says how many of them count."""
        if generation != self._generation or self.contact or not self._sends():
            return
        ranks = {
            keeper.rank: SimpleNamespace(ended=False, send_command=lambda _, keeper=keeper: keeper.heartbeat())
            for keeper in self._keepers()
            if keeper.alive
        }
        heartbeat = Heartbeat(number, 0)
        AttemptWatch.pass_heartbeat(SimpleNamespace(_ranks=ranks), heartbeat, 0.0)  # type: ignore[arg-type]

    def _give_up(self, generation: int, since: float) -> None:
        if generation == self._generation and self.open and not self.contact and self.answered_at >= since:
            silent_s = self.world.time.now - max(since, self.answered_at)
            if silent_s >= KEEPALIVE_S - 0.01:
                self.lose()
            else:
                self.world.time.after(KEEPALIVE_S - silent_s, self._give_up, generation, since)

    def lose(self) -> None:
        """The stream has ended; a new one is sought."""
        if not self.open:
            return
        if self.contact:
            self.world.before_change()
            self.contact = False
            if self.greeted:
                self.answered_at = self.world.time.now
            self.open = False
            for keeper in self._keepers():
                keeper.contact_ends()
        self.open = self.greeted = False
        self._generation += 1
        if self in self.machine.sessions:
            self.machine.sessions.remove(self)
        self._sent, self._received = [], []
        self._changed()
        if not self.closed:
            self.world.time.after(self.world.rng.uniform(0.2, 3.0), self._connect)

    def close(self) -> None:
        self.closed = True
        self.lose()

    def post(self, message: Callable[[Connection], None]) -> None:
        """From the agent."""
        if self.open:
            at = max(self.world.time.now + self.machine.latency_s, self._delivered_at)
            self._delivered_at = at
            self._received.append((at, message))
            self.world.time.at(at, self._deliver, self._generation)

    def _deliver(self, generation: int) -> None:
        """What has come at the same moment is read at once."""
        if generation != self._generation or self.closed:
            return
        now = self.world.time.now
        while self._received and self._received[0][0] <= now and self.receives():
            _, message = self._received.pop(0)
            if self.greeted:
                self.has_answered(self.world.time.now)
            message(self)
            self._changed()
            self.world.news = True

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._sends():
            self.world.time.after(self.machine.latency_s, self._arrive, self._generation, call, arguments)
        else:
            self._sent.append((call, arguments))

    def _arrive(self, generation: int, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if generation == self._generation and self.machine.up:
            if self.machine.asleep or self.machine.agent_stopped:
                self._sent.append((call, arguments))
            else:
                call(*arguments)

    def _changed(self) -> None:
        self.version += 1

    # What the head asks for.

    def send_command(self, rank: int, command: bytes) -> None:
        self._standing[rank] = command
        if self.open:
            self._send(self._command, rank, command)

    def kill_ranks(self) -> None:
        if self.open:
            self._send(self._kill_ranks)

    def request_processes(self) -> None:
        self.processes, self.unanswered = None, True
        self._changed()
        if self.open:
            self._send(self._list)

    def request_exit_output(self) -> None:
        if self.open:
            self._send(self._output)

    # At the machine.

    def _command(self, rank: int, command: bytes) -> None:
        for keeper in self._keepers():
            if keeper.rank == rank:
                keeper.command(command)

    def _kill_ranks(self) -> None:
        for keeper in self._keepers():
            keeper.kill_group()

    def _list(self) -> None:
        machine = self.machine
        if machine.disk_stalled:
            # It waits for its disk; what is asked meanwhile is the same.
            if self._waits_for_disk != self._generation:
                self._waits_for_disk = self._generation
                self.world.time.after(1.0, self._arrive, self._generation, self._list_again, ())
            return
        if not machine.disk_full and self.number is not None:
            machine.attempts_fenced.add(self.number)
        killed = None if self.key.startswith("unknown:") else self.number
        listed = machine.processes(killed)
        self.post(lambda connection: connection.take_processes(listed))
        machine.kill(killed)

    def _list_again(self) -> None:
        self._waits_for_disk = -1
        self._list()

    def _output(self) -> None:
        for keeper in self._keepers():
            if keeper.rank in self.seen:
                self.post(_printed(keeper))

    # What comes.

    def take_start(self, rank: int, identity: Identity) -> None:
        if rank in self.seen:
            self.seen[rank].identity = self.seen[rank].identity or identity
            self._note_restart()

    def take_end(self, rank: int, record: ExitRecord | None, output: ExitOutput, memory_kills: int) -> None:
        if rank not in self.seen:
            return
        seen = self.seen[rank]
        seen.output = output
        self.memory_kills = memory_kills
        if seen.record is None:
            seen.record = record
            seen.vanished = record is None

    def take_processes(self, listed: list[tuple[int, str]]) -> None:
        if self.unanswered:
            self.unanswered = False
            self.processes = tuple(Process(pid, command) for pid, command in listed)

    def take_output(self, rank: int, output: ExitOutput) -> None:
        self.seen[rank].output = output


def _started(keeper: SimulatedKeeper) -> Callable[[Connection], None]:
    rank, identity = keeper.rank, keeper.identity
    assert identity is not None
    return lambda connection: connection.take_start(rank, identity)


def _ended(keeper: SimulatedKeeper) -> Callable[[Connection], None]:
    rank, record, output, kills = keeper.rank, keeper.record, keeper.output, keeper.machine.memory_kills
    return lambda connection: connection.take_end(rank, record, output, kills)


def _printed(keeper: SimulatedKeeper) -> Callable[[Connection], None]:
    rank, output = keeper.rank, keeper.output
    return lambda connection: connection.take_output(rank, output)
