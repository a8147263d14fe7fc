"""Simulated machines: power, sleep, disk, links to the head; and the ranks on them. Leases and the ways in which a
keeper ends its rank are the real engine.node.keeper's, on the virtual clock; processes are modelled."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.node.keeper import Keeper, Lease
from engine.protocol import attempt as protocol
from engine.protocol.attempt import ExitRecord, Identity
from engine.protocol.events import ExitOutput
from engine.protocol.exit_codes import FINAL_EXITS, KeeperExit, TrainerExit

if TYPE_CHECKING:
    from tests.simulation.training import Attempt, Group
    from tests.simulation.world import World

INFINITY = float("inf")
Line = bytes | dict[str, Any]
"""An event of a rank: a step as its line, any other parsed."""
_POLL_S = 0.1
"""Between two polls of a rank's files by the agent."""


class Machine:
    """One node, or this machine where no rank runs on it."""

    __slots__ = (
        "_asleep_since",
        "agent_stopped",
        "asleep",
        "attempts_fenced",
        "boot",
        "clock_ahead_s",
        "cut_from",
        "cut_to",
        "disk_full",
        "disk_stalled",
        "index",
        "isolated",
        "keepers",
        "latency_s",
        "local",
        "memory_kills",
        "name",
        "sessions",
        "slept_s",
        "start_fails",
        "states",
        "unfit",
        "up",
        "woke_at",
        "world",
    )  # fmt: skip

    def __init__(self, world: World, index: int, name: str, *, local: bool) -> None:
        self.world, self.index, self.name, self.local = world, index, name, local
        self.up, self.boot = True, 1
        self.asleep = self.agent_stopped = self.disk_full = self.disk_stalled = 0
        """Of faults that overlap: how many hold."""
        self.cut_to = self.cut_from = self.isolated = 0
        """From the head, to the head; and from the other nodes."""
        self.start_fails = self.unfit = 0
        self.latency_s = 0.02
        self.clock_ahead_s = 0.0
        self.memory_kills = 0
        self.woke_at = -INFINITY
        self.slept_s = self._asleep_since = 0.0
        self.keepers: list[SimulatedKeeper] = []
        """Also those that have ended, while their machine has been up."""
        self.attempts_fenced: set[int] = set()
        self.states: list[SavedState] = []
        self.sessions: list[Any] = []
        """Connections of the head that have an agent here."""

    def sleep(self, by: int) -> None:
        """One more reason to sleep, or one less."""
        now, before = self.world.time.now, self.asleep
        self.asleep += by
        if not before:
            self._asleep_since = now
        elif not self.asleep:
            self.slept_s += now - self._asleep_since
            self.woke_at = now
            for keeper in self.keepers:
                if keeper.alive:
                    # select does not count time in sleep.
                    self.world.time.after(self.world.rng.uniform(0.0, 1.0), keeper.turn)

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot{self.boot}"

    @property
    def awake(self) -> bool:
        return self.up and not self.asleep

    def wall(self) -> float:
        return self.world.wall(self.world.time.now) + self.clock_ahead_s

    def lease_clock(self) -> float:
        return self.world.lease_clock(self)

    def reachable(self) -> bool:
        """The head's new connections get through, both ways."""
        return self.awake and not (self.cut_to or self.cut_from)

    def in_contact(self) -> bool:
        """A living head's heartbeats arrive, and it receives what is sent here."""
        return self.reachable() and not self.agent_stopped and self.world.head_runs()

    def report(self, attempt: int, message: Callable[[Any], None]) -> None:
        """To the head, by every agent that watches the attempt."""
        for session in self.sessions:
            if session.number == attempt:
                session.post(message)

    def processes(self, attempt: int | None) -> list[tuple[int, str]]:
        """Living ones of an attempt; of the whole run for None."""
        listed = [
            (keeper.pid + part, name)
            for keeper in self.keepers
            if attempt in (None, keeper.attempt)
            for part, name, lives in ((0, "keeper", keeper.alive), (1, "program", keeper.program_alive))
            if lives
        ]
        return listed + self.world.launcher_processes(self, attempt)

    def kill(self, attempt: int | None) -> None:
        for keeper in self.keepers:
            if attempt in (None, keeper.attempt):
                keeper.die()
                if keeper.program is not None:
                    keeper.program.die(-signal.SIGKILL)
        self.world.kill_launcher(self, attempt)


class SavedState:
    """A state of a training, or a part of one, on a disk."""

    __slots__ = ("attempt", "complete", "emergency", "iteration", "node", "part", "parts", "rank", "reported")

    def __init__(  # noqa: PLR0913
        self, iteration: int, part: int, parts: int, *, attempt: int, rank: int, emergency: bool, node: Machine | None
    ) -> None:
        self.iteration, self.part, self.parts = iteration, part, parts
        self.attempt, self.rank, self.emergency = attempt, rank, emergency
        self.node = node
        """None: in the folder that all nodes reach."""
        self.complete = False
        """With its manifest."""
        self.reported = False
        """Its trainer has reported that it is saved."""

    @property
    def name(self) -> str:
        """As Manifest.journal_entry names it."""
        return f"{self.iteration}.{self.part}" + (f"@{self.attempt}.{self.rank}" if self.emergency else "")

    @property
    def manifest(self) -> str:
        return f"{self.attempt:08x}{self.rank:08x}{self.iteration:048x}"


class Program:
    """A rank's process: our trainer, or a user's own command."""

    __slots__ = (
        "alive", "attempt", "code", "completed", "cooperative", "dead_at", "deaf", "end", "failure", "group", "keeper",
        "leaving", "lingers_s", "loaded", "log", "machine", "node", "phase", "rank", "stop_requested", "stopped",
        "world",
    )  # fmt: skip

    def __init__(self, keeper: SimulatedKeeper, attempt: Attempt) -> None:
        self.world, self.keeper, self.attempt = keeper.world, keeper, attempt
        self.rank, self.machine = keeper.rank, keeper.machine
        self.cooperative = attempt.trainer
        self.alive, self.stopped, self.deaf = True, 0, False
        self.code: int | None = None
        self.loaded = self.completed = self.leaving = self.stop_requested = False
        self.phase: str | None = None
        self.dead_at = INFINITY
        self.lingers_s = 0.0
        """After it has reported its end."""
        self.log = ""
        self.failure: dict[str, Any] | None = None
        self.end: dict[str, Any] | None = None
        self.group: Group | None = None

    @property
    def frozen(self) -> bool:
        return bool(self.stopped or self.machine.asleep or self.machine.disk_stalled)

    @property
    def responds(self) -> bool:
        return self.alive and not self.frozen

    def write(self, line: Line, at: float | None = None) -> None:
        """An event in the rank's file; none on a full disk."""
        if not self.machine.disk_full:
            self.keeper.lines.append((self.world.time.now if at is None else at, line))

    # What the real keeper calls.

    def send(self, command: bytes) -> None:
        if self.alive:
            self.world.time.after(0.01, self._receive, command)

    @property
    def pid(self) -> Program:
        """For kill_group."""
        return self

    def signal_group(self, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self.die(-number)
        elif not self.deaf:
            self.world.time.after(0.02, self._terminate)

    def returncode(self) -> int | None:
        return self.code

    # What follows.

    def _receive(self, command: bytes) -> None:
        if not self.alive or self.leaving:
            return
        if self.frozen and not self.machine.disk_stalled:
            # Read once it goes on.
            self.world.when_awake(self, self._receive, command)
        elif command == protocol.STOP:
            self.stop_requested = True
            self.attempt.stop_requested(self)
        elif command == protocol.EMERGENCY_CHECKPOINT:
            self.attempt.leave_for_lost_peer(self)

    def _terminate(self) -> None:
        if self.frozen:
            self.world.when_awake(self, self._terminate)
        else:
            self.die(-signal.SIGTERM)

    def die(self, code: int) -> None:
        """It has ended with this code; a negative one is a signal."""
        if not self.alive:
            return
        self.world.before_change()
        self.alive, self.code, self.dead_at = False, code, self.world.time.now
        if code == 0 and not self.cooperative and self.keeper.stopped_by is None:
            # A command that ends with 0 has done its work.
            self.completed = True
        self.attempt.member_ended(self)
        self.keeper.program_ended()

    def fail(self, error_type: str, message: str, code: int) -> None:
        if not self.alive:
            return
        if self.cooperative:
            self.failure = {"event": "failure", "error_type": error_type, "message": message}
            self.write(self.failure)
        else:
            self.log = message
        # Also after its last event: an exit code of its own counts more.
        self.completed = False
        self.die(code)

    def kill_by_end_of_keeper(self) -> None:
        """Its control pipe has ended. A user's command has none."""
        if self.alive and self.cooperative:
            if self.frozen:
                self.world.when_awake(self, self.kill_by_end_of_keeper)
            else:
                self.die(TrainerExit.KEEPER_GONE)


class SimulatedKeeper(Keeper):
    """The real keeper's lease, commands, graces and restarts; its process, FIFO and files are simulated."""

    def __init__(self, machine: Machine, attempt: Attempt, rank: int) -> None:
        self.world, self.machine, self.attempt_started = machine.world, machine, attempt
        self.attempt, self.rank = attempt.number, rank
        self.pid = self.world.next_pid()
        self.alive, self.stopped, self.killed = True, 0, False
        self.record: ExitRecord | None = None
        self.identity: Identity | None = None
        self.lines: list[tuple[float, Line]] = []
        """The rank's event file, each line with when it was written."""
        self.program: Program | None = None
        self._fed_until = self.world.time.now
        self._turn = 0
        self.continued_at = -INFINITY
        """When it last went on after a stop."""
        self.contact_at = self.world.time.now
        """When heartbeats and their answers last passed."""
        # The real keeper's own.
        spec = attempt.spec
        self._spec = spec
        self._rank = SimpleNamespace(rank=rank, restarts=attempt.restarts_of(rank))  # type: ignore[assignment]
        self._files = SimpleNamespace(events=lambda _: self, fenced=None)  # type: ignore[assignment]
        self._received = b""
        self._signals = []
        self._lease = Lease(spec.lease_s, machine.lease_clock)
        self._stopped_by = None
        self._asked_to_leave = False
        self._restarts = 0
        self._events_begin = 0
        self._stop_limit = self._term_at = self._kill_at = self._restart_at = INFINITY
        self._last_saving = -INFINITY

    @property
    def program_alive(self) -> bool:
        return self.program is not None and self.program.alive

    @property
    def reads(self) -> bool:
        """Its process runs."""
        return self.alive and not self.stopped and self.machine.awake

    @property
    def end_shows(self) -> bool:
        """Without a record an agent sees that it has ended where it knows its process."""
        return not self.alive and (self.record is not None or self.identity is not None)

    @property
    def stopped_by(self) -> str | None:
        return self._stopped_by

    @property
    def output(self) -> ExitOutput:
        program = self.program
        if program is None:
            return ExitOutput()
        return ExitOutput(program.log, "", program.failure, program.end)

    def start_program(self) -> None:
        self._events_begin = len(self.lines)
        self.program = Program(self, self.attempt_started)
        now = self.machine.wall()
        if not self.machine.disk_full:
            self.identity = Identity(
                self.rank, "run", self.attempt, f"nonce.{self.attempt}", self.machine.boot_id, self.pid,
                str(self.pid), self.pid + 1, self.pid + 1, str(self.pid), now,
            )  # fmt: skip
        self.attempt_started.program_started(self.program)
        self.schedule()

    # Commands and time.

    def _feed(self) -> None:
        """The heartbeats until now, as the FIFO has them: often enough for the lease."""
        now, lease_s = self.world.time.now, self._spec.lease_s
        while self._fed_until < now:
            self._fed_until = min(now, self._fed_until + lease_s / 2)
            self._received += protocol.heartbeat(self.machine.lease_clock() - (now - self._fed_until))
        self.contact_at = now

    def contact_begins(self) -> None:
        self._fed_until = self.contact_at = self.world.time.now
        self.heartbeat()

    def contact_ends(self) -> None:
        """Until now heartbeats came."""
        self._feed()
        self.turn()

    def heartbeat(self) -> None:
        """One that arrives now."""
        self._received += protocol.heartbeat(self.machine.lease_clock())
        self.turn()

    def command(self, command: bytes) -> None:
        if self.alive:
            self._received += command
            self.turn()

    def turn(self) -> None:
        """One turn of its loop, as far as its process runs."""
        if not self.reads:
            return
        if self.machine.in_contact() and self.world.watched(self.machine, self.attempt):
            self._feed()
        program = self.program
        if program is not None and not program.alive and self._restart_at == INFINITY:
            # It writes its record, and reads no more commands.
            return
        self._handle_input(program if program is not None and program.alive else None)  # type: ignore[arg-type]
        self._begin_again()
        self.schedule()

    def schedule(self) -> None:
        """The next turn, at its next deadline; while heartbeats come the lease is none."""
        self._turn += 1
        if not self.reads or self.record is not None:
            return
        deadline = min(self._term_at, self._kill_at, self._restart_at)
        delay = deadline - self.world.time.now
        if not (self.machine.in_contact() and self.world.watched(self.machine, self.attempt)):
            delay = min(delay, self._lease.left_s + 0.01)
        if delay < INFINITY:
            self.world.time.after(max(0.001, delay), self._due, self._turn)

    def _due(self, turn: int) -> None:
        if turn == self._turn:
            self.turn()

    def go_on(self) -> None:
        """After a stop."""
        self.stopped -= 1
        self.continued_at = self.world.time.now
        self.turn()

    # Ends.

    def program_ended(self) -> None:
        if self.alive:
            self.world.time.after(0.05 + 0.2 * self.world.rng.random(), self._after_program)

    def _after_program(self) -> None:
        if not self.alive or self.program is None or self.record is not None:
            return
        if not self.reads or self.machine.disk_stalled:
            self.world.when_keeper_runs(self, self._after_program)
            return
        code = self.program.code or 0
        if self._may_restart(code):
            self._restarts += 1
            self._restart_at = self.world.time.now + min(2.0 ** (self._restarts - 1), 30.0)
            self.schedule()
            return
        self._finish(code, None)

    def _begin_again(self) -> None:
        """The end of _await_restart."""
        if self._restart_at == INFINITY:
            return
        if self._stopped_by is not None or self.attempt in self.machine.attempts_fenced:
            self._restart_at = INFINITY
            self._finish(self.program.code or 0 if self.program is not None else 0, None)
        elif self.world.time.now >= self._restart_at:
            self._restart_at = INFINITY
            self.start_program()

    def _finish(self, code: int, error: str | None) -> None:
        self.record = ExitRecord(
            self.rank, self.attempt, code if code >= 0 else None, -code if code < 0 else None, self.machine.wall(), 0,
            0, self._stopped_by, error, self._asked_to_leave,
        )  # fmt: skip
        if code and self._stopped_by is None and self.program is not None:
            # That is on record, whatever it has reported before.
            self.program.completed = False
        self.alive = False
        self.world.note_record(self)
        self.machine.report(self.attempt, _ended(self))

    def cannot_start(self) -> None:
        self._finish(KeeperExit.CANNOT_START, "FileNotFoundError: no such interpreter")

    def die(self) -> None:
        """Killed: it leaves no record."""
        if not self.alive:
            return
        self.alive, self.killed = False, True
        if self.end_shows:
            self.world.time.after(self.world.rng.uniform(0.1, 1.1), self.machine.report, self.attempt, _ended(self))
        if self.program is not None:
            self.program.kill_by_end_of_keeper()

    def lose_power(self) -> None:
        program, self._turn = self.program, self._turn + 1
        self.alive = False
        if program is not None and program.alive:
            program.alive, program.dead_at = False, self.world.time.now
            program.attempt.member_ended(program)

    def _restart_workers(self) -> None:
        self.attempt_started.restart_workers(self.rank)

    def kill_group(self) -> None:
        if self.program is not None:
            self.program.die(-signal.SIGKILL)


def _ended(keeper: SimulatedKeeper) -> Callable[[Any], None]:
    record, output, kills = keeper.record, keeper.output, keeper.machine.memory_kills
    return lambda connection: connection.take_end(keeper.rank, record, output, kills)


def last_phase(keeper: SimulatedKeeper, begin: int = 0) -> str | None:
    """In place of engine.protocol.events.last_phase for the real keeper."""
    return keeper.program.phase if keeper.program is not None else None


def has_stepped(keeper: SimulatedKeeper) -> bool:
    """In place of engine.protocol.events.has_stepped."""
    return any(isinstance(line, bytes) for _, line in keeper.lines)


def kill_group(pid: Program, number: signal.Signals) -> None:
    """In place of engine.node.processes.kill_group."""
    pid.signal_group(number)


def exit_output(files: Any, rank: int) -> ExitOutput:
    """In place of engine.protocol.events.exit_output."""
    keeper: SimulatedKeeper = files.events(rank)
    return keeper.output


__all__ = ["FINAL_EXITS", "Machine", "Program", "SavedState", "SimulatedKeeper"]
