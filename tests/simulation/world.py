"""One simulated history: machines, the attempts on them, the head's supervisors one after the other, and the faults."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.models import RunState
from engine.run import events
from engine.run.history import RunHistory, fold, run_history
from engine.run.run_plan import RunPlan
from engine.run.state import Phase, State
from engine.run.step import begin, step
from engine.run.supervisor_process import take_lock
from tests.simulation.faults import FAULTS, HeadFaults
from tests.simulation.head import HeadDisk, HeadKilled, Launcher, Supervisor
from tests.simulation.invariants import Checks, Violation
from tests.simulation.nodes import INFINITY, Machine, Program, SavedState, SimulatedKeeper
from tests.simulation.scenario import START, Scenario
from tests.simulation.timeline import Timeline
from tests.simulation.training import Attempt

_LONGEST_TICK_S = {Phase.DECIDING: 30.0, Phase.AFTERMATH: 120.0}
"""While nothing happens; in all other phases 12 s, but while ranks run so little that all of it counts for a hang."""
_READ_CLOCK_S = 4.0
"""Soon enough for AwakeClock."""


@cache
def _lock_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="simulation-")
    # Unlike atexit's, they are called at the end of a worker of a pool, too.
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=0)
    return Path(folder)


def lock_file() -> Path:
    """In a folder that may have been removed meanwhile by whoever tidies up temporary files."""
    _lock_folder().mkdir(exist_ok=True)
    return _lock_folder() / "supervisor.lock"


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.plan = scenario, scenario.plan
        self.time = Timeline()
        self.rng = random.Random(scenario.seed)
        self.news = False
        """Something has come that the supervisor does not wait a whole tick for."""
        self.members = [
            Machine(self, number, node.name, local=node.local) for number, node in enumerate(self.plan.config.nodes)
        ]
        self.machines = {machine.name: machine for machine in self.members}
        self.head_machine = self.members[0] if scenario.local else Machine(self, -1, "this machine", local=True)
        self.shared_states: list[SavedState] = []
        self.attempts: dict[int, Attempt] = {}
        self.launcher: Launcher | None = None
        self.disk = HeadDisk()
        self.head: Supervisor | None = None
        self.heads: list[Supervisor] = []
        """The living ones: two only where the lock has failed."""
        self.checks = Checks(self)
        self.log: list[tuple[float, str | events.Event]] = []
        self.effects_done = 0
        self.faults = HeadFaults()
        self.clock_steps_s = 0.0
        self._longest_look_s = 0.25 * self.plan.config.recovery.hang_s
        self._read: tuple[list[events.Event], RunHistory | None] = [], None
        """The journal as it was last read, and its fold."""
        self._pid = 1000
        self._lock: int | None = None
        self._awaited: list[tuple[Program, Callable[..., None], tuple[Any, ...]]] = []
        self._awaiting_keepers: list[tuple[SimulatedKeeper, Callable[[], None]]] = []
        self.steps = 0

    # What the parts ask for.

    def next_pid(self) -> int:
        self._pid += 10
        return self._pid

    def wall(self, moment: float) -> float:
        return START.timestamp() + moment

    def head_wall(self) -> datetime:
        return START + timedelta(0, self.time.now + self.head_machine.clock_ahead_s)

    def lease_clock(self, machine: Machine) -> float:
        return self.time.now

    def head_runs(self) -> bool:
        """The supervisor's process runs now."""
        head, machine = self.head, self.head_machine
        return head is not None and head.alive and not head.stopped and machine.up and not machine.asleep

    def watched(self, machine: Machine, attempt: int) -> bool:
        return any(session.number == attempt and session.open for session in machine.sessions)

    def launcher_processes(self, machine: Machine, attempt: int | None) -> list[tuple[int, str]]:
        launcher = self.launcher
        if machine is not self.head_machine or launcher is None or not launcher.alive:
            return []
        return [(launcher.pid, "mlx.launch")] if attempt in (None, launcher.attempt.number) else []

    def kill_launcher(self, machine: Machine, attempt: int | None) -> None:
        if self.launcher_processes(machine, attempt) and self.launcher is not None:
            self.launcher.end()

    def attempt_of(self, plan: RunPlan, planned: events.Attempt) -> Attempt:
        before = self.attempts.get(planned.number)
        # What never started, and was not recorded on a full disk, leaves its number to the next.
        if before is None or (before.planned.nodes != planned.nodes and not before.keepers):
            machines = [self.machines[name] for name in planned.nodes]
            self.attempts[planned.number] = Attempt(self, plan, planned, machines)
        return self.attempts[planned.number]

    def states_of(self, machines: list[Machine]) -> list[SavedState]:
        states = [state for machine in machines for state in machine.states]
        return states + self.shared_states

    def commit(self, program: Program, state: SavedState) -> None:
        """Its manifest is written, and older ones are removed."""
        state.complete = state.reported = True
        held = self.shared_states if state.node is None else state.node.states
        if state.node is not None:
            # Something newer is on this disk.
            held[:] = [one for one in held if not (one.emergency and one.attempt < state.attempt)]
        if not state.emergency:
            mine = [one for one in held if not one.emergency and one.part == state.part and one.complete]
            kept = sorted({one.iteration for one in mine if one.iteration <= state.iteration})[-3:]
            held[:] = [one for one in held if one not in mine or one.iteration in kept]

    def note_record(self, keeper: SimulatedKeeper) -> None:
        launcher = self.launcher
        if launcher is not None and launcher.alive and launcher.attempt.number == keeper.attempt:
            keepers = launcher.attempt.keepers
            if len(keepers) == len(launcher.attempt.machines) and not any(one.alive for one in keepers.values()):
                launcher.ranks_ended()

    def when_awake(self, program: Program, call: Callable[..., None], *arguments: Any) -> None:
        self._awaited.append((program, call, arguments))

    def when_keeper_runs(self, keeper: SimulatedKeeper, call: Callable[[], None]) -> None:
        self._awaiting_keepers.append((keeper, call))

    def before_change(self) -> None:
        """What happens to a process changes what it does from here on, not what it has done."""
        for attempt in self.attempts.values():
            attempt.sync()

    def after_change(self) -> None:
        """Something has been held up, or goes on."""
        for attempt in self.attempts.values():
            attempt.changed()
        for head in self.heads:
            for connection in head.connections:
                connection.update_contact()
        awaited, self._awaited = self._awaited, []
        for program, call, arguments in awaited:
            if not program.alive:
                continue
            if program.frozen:
                self._awaited.append((program, call, arguments))
            else:
                self.time.after(0.01, call, *arguments)
        keepers, self._awaiting_keepers = self._awaiting_keepers, []
        for keeper, call in keepers:
            if keeper.alive and (not keeper.reads or keeper.machine.disk_stalled):
                self._awaiting_keepers.append((keeper, call))
            elif keeper.alive:
                self.time.after(0.05, call)

    def keepers(self, machine: Machine) -> list[SimulatedKeeper]:
        return [keeper for keeper in machine.keepers if keeper.alive]

    # The supervisor's process.

    def before_effect(self, head: Supervisor) -> None:
        """It may be killed or held up between any two effects. Raises HeadKilled."""
        self.effects_done += 1
        if self.faults.kill_at and self.effects_done >= self.faults.kill_at[0][0]:
            _, gap_s = self.faults.kill_at.pop(0)
            self.kill_head(gap_s)
        if not head.alive:
            raise HeadKilled
        if not self.head_runs():
            self.pass_time(head, 0.0)

    def await_head_disk(self, head: Supervisor) -> None:
        """Raises HeadKilled."""
        while self.disk.stalled:
            self.pass_time(head, 0.5)

    def pass_time(self, head: Supervisor, seconds: float) -> None:
        """It waits, or is held up for longer. Raises HeadKilled."""
        limit = self.time.now + seconds
        while True:
            self._advance(head, limit)
            if not head.alive:
                raise HeadKilled
            if self.time.now >= limit and self.head_runs():
                return
            if not self.head_runs():
                limit = max(self.time.next_due, self.time.now)
                if limit == INFINITY:
                    raise Violation("the head never goes on", self.time.now)

    def _advance(self, head: Supervisor, limit: float) -> None:
        """Until then, with the clock read often enough while its process runs."""
        time = self.time
        while time.now < limit and head.alive:
            running = self.head_runs()
            due = min(limit, time.now + _READ_CLOCK_S) if running else limit
            time.run_until(due, self._interrupted)
            if running and self.head_runs():
                head.clock()
            if self.news or not self.head_runs():
                return
        if time.next_due <= limit:
            time.run_until(limit, self._interrupted)

    def _interrupted(self) -> bool:
        return self.news or not self.head_runs()

    def await_news(self, head: Supervisor, phase: Phase) -> None:
        """Raises HeadKilled."""
        self.news = False
        limit = self.time.now + head.tick_s
        longest_s = self._longest_look_s if phase is Phase.RUNNING else _LONGEST_TICK_S.get(phase, 12.0)
        head.tick_s = min(1.6 * head.tick_s, longest_s)
        while True:
            self._advance(head, limit)
            if not head.alive:
                raise HeadKilled
            if self.head_runs():
                if self.news or self.time.now >= limit:
                    if self.news:
                        head.tick_s = 0.1
                    return
                continue
            if self.time.next_due == INFINITY:
                raise Violation("the head never goes on", self.time.now)
            self.time.run_next()

    def observe_now(self) -> None:
        """The supervisor takes a step now."""
        self.news = True

    def kill_head(self, gap_s: float, *, power: bool = False) -> None:
        """The supervisor's process is gone; another one is started later, by whatever command comes next."""
        head = self.head
        if head is None or not head.alive:
            return
        self.before_change()
        self.say("the supervisor is killed" if not power else "this machine loses power")
        self._let_go(head)
        self.disk.waiting = []
        if power:
            self.disk.lose_power(self.rng.random())
        self.faults.wanted = False
        self.checks.lost_memory()
        self.after_change()
        self.time.after(gap_s, self.request_head)

    def request_head(self) -> None:
        self.faults.wanted = True

    def _let_go(self, head: Supervisor) -> None:
        """Its process has ended, and with it its hold on the lock."""
        head.close()
        self.heads.remove(head)
        self.head = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def take_lock(self) -> bool:
        descriptor = take_lock(SimpleNamespace(lock=lock_file()))  # type: ignore[arg-type]
        if descriptor is None:
            return False
        if self._lock is None:
            self._lock = descriptor
        else:
            self.faults.more_locks.append(descriptor)
        return True

    # The history.

    def run(self) -> None:
        """Raises Violation."""
        for fault in self.scenario.faults:
            FAULTS[fault.kind](self, fault)
        try:
            self._live()
            self._settle()
            self.checks.at_end()
        finally:
            self.close()

    def close(self) -> None:
        for descriptor in [*self.faults.more_locks, *([self._lock] if self._lock is not None else [])]:
            os.close(descriptor)
        self._lock = None
        self.faults.more_locks = []

    def _live(self) -> None:
        self.disk.append(events.RunPlanned.model_construct(run=self.plan.record(), nonce=self.plan.nonce, at=START))
        adopting = False
        while True:
            try:
                self._supervise(adopting=adopting)
            except HeadKilled:
                self._await_head()
                adopting = True
                continue
            if not self._resumed():
                return
            adopting = False

    def _await_head(self) -> None:
        while not (self.faults.wanted and self.head_machine.awake):
            if self.time.next_due == INFINITY:
                raise Violation("no supervisor comes back", self.time.now)
            self.time.run_next()

    def new_supervisor(self) -> Supervisor | None:
        """None where another one lives."""
        if not self.take_lock():
            return None
        head = Supervisor(self)
        self.heads.append(head)
        self.head = head
        self.checks.supervised()
        return head

    def _supervise(self, *, adopting: bool) -> None:
        head = self.new_supervisor()
        if head is None:
            raise Violation("no supervisor can start: the lock is held", self.time.now)
        self.after_change()
        state = self.begin(head, adopting=adopting)
        while state.phase is not Phase.OVER:
            state = self.turn(head, state)
            self.await_news(head, state.phase)
        self._let_go(head)
        self.after_change()

    def begin(self, head: Supervisor, *, adopting: bool) -> State:
        history = self.read_history()
        pid = self.next_pid()
        boot_id = self.head_machine.boot_id
        started = events.SupervisorStarted(
            pid=pid, start=str(pid), boot_id=boot_id, adopted=adopting, at=self.head_wall()
        )
        if not adopting and history.record.state.ended:
            self._append(events.RunReopened(at=self.head_wall(), without_budget=bool(self.scenario.seed % 2)))
        self._append(started)
        history = self.read_history()
        head.history = history
        return begin(self.plan, history, self.disk.newest_attempt, adopting=adopting)

    def _append(self, event: events.Event) -> None:
        self.disk.append(event)
        self.checks.recorded(None, event)

    def read_history(self) -> RunHistory:
        """As the next supervisor reads it from the journal."""
        journal = self.disk.journal() + self.disk.waiting
        read, history = self._read
        if len(read) > len(journal) or any(one is not other for one, other in zip(read, journal, strict=False)):
            history = None
        history = run_history(journal, self.plan) if history is None else fold(journal[len(read) :], history)
        self._read = journal, history
        return history

    def turn(self, head: Supervisor, state: State) -> State:
        """One turn of the driver's loop. Raises HeadKilled."""
        self.steps += 1
        if self.time.now > self.checks.end_by:
            raise Violation(f"the run does not end: {state.phase.name}", self.time.now)
        if not self.head_runs():
            self.pass_time(head, 0.0)
        phase = state.phase
        seen = head.observe()
        state, wanted = step(state, seen)
        self.checks.stepped(phase, state, seen.at)
        head.history = state.history
        if state.phase is not phase:
            self.say(f"phase {state.phase.name}")
        head.perform(wanted)
        return state

    def budget_spent_at(self, at: datetime) -> bool:
        """By the events of the journal one by one, not by their fold."""
        began, recorded = None, self.disk.journal() + self.disk.waiting
        for event in recorded if self.scenario.budget_s else ():
            if isinstance(event, events.RunReopened):
                began = None
                if event.without_budget:
                    return False
            elif isinstance(event, events.AttemptPlanned) and began is None:
                began = event.at
        return began is not None and (at - began).total_seconds() >= self.scenario.budget_s

    def _resumed(self) -> bool:
        """The run is taken up again, where somebody wants that and it can be."""
        record = self.read_history().record
        while self.faults.resumes:
            at = self.faults.resumes.pop(0)
            if record.state in (RunState.SUCCEEDED, RunState.COMPLETED):
                continue
            self.time.run_until(max(at, self.time.now))
            self.say("the run is resumed")
            self.disk.requests = []
            return True
        return False

    def _settle(self) -> None:
        """What still goes on without a supervisor."""
        self.time.run_until(self.time.now + 2.0)
        self.before_change()

    def say(self, what: str | events.Event) -> None:
        self.log.append((self.time.now, what))


__all__ = ["World"]
