"""What must hold in every history (docs/reliability.md), checked against the truth of the simulated machines."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from engine.models import Reason, RunState
from engine.run import events
from engine.run.events import Trigger
from engine.run.journal import FOLLOWERS
from engine.run.node_health import lost_after_s
from engine.run.state import Phase, State
from engine.run.supervisor_process import AFTERMATH_S
from tests.simulation.nodes import Machine, Program, SavedState, SimulatedKeeper

if TYPE_CHECKING:
    from tests.simulation.head import Supervisor
    from tests.simulation.training import Attempt
    from tests.simulation.world import World

_AWOKEN_S = 1.5
"""A machine that wakes after its lease ends its rank within this time, and its graces."""
_STARTUP_S = 120.0
_CONSEQUENCE = re.compile("PeerLost|Connection closed by peer")


class Violation(AssertionError):
    def __init__(self, what: str, at: float) -> None:
        super().__init__(f"at {at:.2f} s: {what}")
        self.what = what


@dataclass(frozen=True)
class Blame:
    """A reason for which the run may fail, since a fault was injected."""

    reason: Reason
    host: str | None
    """None: any, or none."""
    since: float
    until: float


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        recovery = world.plan.config.recovery
        self._lost_after_s = lost_after_s(world.plan.config)
        run_s = world.scenario.iterations * world.scenario.period_s + _STARTUP_S
        wait_s = recovery.node_wait_s + 2 * recovery.stall_s + recovery.lease_s + run_s
        self._limit_s = (recovery.max_restarts + 2) * wait_s + 2 * AFTERMATH_S
        self.end_by = self._limit_s
        self.blames: list[Blame] = []
        self._first_step: dict[int, float] = {}
        """Attempt → when its first step began."""
        self._last_step: dict[int, tuple[float, str]] = {}
        self._state = RunState.PLANNED
        self.verdict: events.Verdict | None = None
        self.unconfirmed: set[str] = set()
        self._aborted = self._time_up = False
        self._abort_recorded = False
        self.failures = 0
        self._end_recorded = False

    # What is injected.

    def blame(self, reason: Reason, machine: Machine | None, *, length: float = 0.0) -> None:
        now = self.world.time.now
        self.blames.append(Blame(reason, machine.name if machine is not None else None, now, now + length))

    def ends_at(self, moment: float) -> None:
        """A fault is over then."""
        self.end_by = max(self.end_by, moment + self._limit_s)

    def unsupervised(self, length: float) -> None:
        for reason in (Reason.SUPERVISOR_LOST, Reason.HEAD_SLEPT, Reason.LAUNCH_FAILED):
            self.blame(reason, None, length=length)

    def keeper_stopped(self, keeper: SimulatedKeeper) -> None:
        self.blame(Reason.HUNG, keeper.machine)
        # It may have to be killed.
        self.blame(Reason.RANK_KILLED, keeper.machine)

    def found_unfit(self, names: tuple[str, ...]) -> None:
        """By preflight: without them too few may be left, or not what a restart needs."""
        for _ in names[:1]:
            self.blame(Reason.PREFLIGHT_FAILED, None)
            self.blame(Reason.LAUNCH_FAILED, None)

    def abort_requested(self) -> None:
        self._aborted = True

    def supervised(self) -> None:
        if len(self.world.heads) > 1:
            self.second_supervisor()

    def second_supervisor(self) -> None:
        raise Violation("two supervisors hold the run's lock", self.world.time.now)

    # What the ranks do.

    def step(self, attempt: Attempt, program: Program, at: float, began: float) -> None:
        number = attempt.number
        keeper, machine = program.keeper, program.machine
        if number not in self._first_step:
            self._first_step[number] = began
            for earlier, (last, name) in self._last_step.items():
                if earlier < number and last > began:
                    self._fail(f"attempt {earlier} made a step on {name} after attempt {number} had begun one", last)
        excused = self._excused(attempt, keeper, at)
        if not excused:
            self._last_step[number] = at, machine.name
            for later, first in self._first_step.items():
                if later > number and at > first:
                    self._fail(
                        f"attempt {number} made a step on {machine.name} after attempt {later} had begun one", at
                    )
        if self._lost_after_s is None or excused or not keeper.alive:
            return
        if not (machine.in_contact() and self.world.watched(machine, number)):
            quiet_s = at - keeper.contact_at
            if quiet_s > self._lost_after_s:
                self._fail(f"{machine.name} trains on, unseen for {quiet_s:.0f} s", at)

    def _excused(self, attempt: Attempt, keeper: SimulatedKeeper, at: float) -> bool:
        """Its keeper cannot end it now, or has just gone on and is about to."""
        grace_s = _AWOKEN_S + attempt.spec.term_grace_s
        back_at = max(keeper.machine.woke_at, keeper.continued_at)
        return bool(keeper.stopped) or keeper.killed or 0 <= at - back_at <= grace_s

    def starts(self, attempt: Attempt) -> None:
        """A rank of it starts: nothing of an earlier attempt may go on anywhere."""
        now = self.world.time.now
        for number, earlier in self.world.attempts.items():
            for keeper in earlier.keepers.values() if number < attempt.number else ():
                program = keeper.program
                if program is None or not (program.alive and keeper.machine.up):
                    continue
                excused = self._excused(earlier, keeper, now)
                # One that woke up while these were being started is reached before its keeper can have ended anything.
                just_awake = now - keeper.machine.woke_at <= _AWOKEN_S
                if (keeper.machine.in_contact() and not just_awake) or (program.responds and not excused):
                    self._fail(
                        f"attempt {attempt.number} starts while a rank of attempt {number} lives on "
                        f"{keeper.machine.name}"
                    )

    def resumed(self, attempt: Attempt, iteration: int, *, refused: bool = False) -> None:
        if attempt.number == 1:
            return
        saved = self._newest_saved(attempt)
        if (
            attempt.trainer
            and iteration == 0
            and not refused
            and (elsewhere := [one.name for one in self.world.members if self._saved_on(one, attempt)])
        ):
            self._fail(f"attempt {attempt.number} begins anew, and {elsewhere} have a state")
        if iteration < saved:
            self._fail(
                f"attempt {attempt.number} goes on after iteration {iteration}, and that of iteration {saved} was saved"
            )

    def _saved_on(self, machine: Machine, attempt: Attempt) -> bool:
        """A state that the attempt could have gone on from: on a node that is left out, one of which its supervisor
        was told."""
        manifests = self.world.read_history().manifests
        return any(
            state.reported
            and state.parts == 1
            and (machine in attempt.machines or (state.name, state.manifest) in manifests.get(state.rank, ()))
            for state in machine.states
        )

    def _newest_saved(self, attempt: Attempt) -> int:
        """The newest iteration of which every part was told to be saved, on a disk that the attempt reaches."""
        parts: dict[tuple[int, int], set[int]] = {}
        for state in self.world.states_of(attempt.machines):
            if state.reported:
                parts.setdefault((state.iteration, state.parts), set()).add(state.part)
        return max((iteration for (iteration, count), held in parts.items() if len(held) == count), default=0)

    # What the supervisor says.

    def recorded(self, head: Supervisor | None, event: events.Event) -> None:
        match event:
            case events.StateChanged():
                self._changed(event)
            case events.RunReopened():
                self._state = RunState.PLANNED
                self._aborted = self._abort_recorded = self._time_up = False
                self.unconfirmed = set()
            case events.AttemptFailed():
                self.failures += 1
                self._named(event.verdict)
            case events.RequestReceived():
                self._abort_recorded = True
                self._time_up = self._time_up or event.request == "budget"
                if event.request == "budget" and not self.world.budget_spent_at(event.at):
                    self._fail("the run is stopped for its budget, and that is not spent")
            case events.AttemptPlanned() if self._abort_recorded:
                self._fail("another attempt is planned after an abort was requested")
            case events.HangDetected():
                self._named(events.Verdict(RunState.FAILED, Reason.HUNG, "a hang", host=event.node))
            case events.RestartPlanned():
                self._proved(event.members)
            case events.CleanupConfirmed():
                self.unconfirmed.discard(event.node)
                machine = self._machine(event.node)
                if machine is not None and (left := machine.processes(self._newest())):
                    self._fail(f"{event.node} is told to be clean, and has {left}")
        self.world.say(event)

    def _proved(self, members: tuple[str, ...]) -> None:
        for name in members:
            machine = self.world.machines[name]
            if machine.up and (left := machine.processes(None)):
                self._fail(f"a restart on {name} is decided, and it has {left}")

    def stepped(self, before: Phase, state: State, at: datetime) -> None:
        """A run whose time is up is being stopped from the next step on."""
        going_on = before is state.phase and before in (Phase.RUNNING, Phase.DECIDING, Phase.BACKING_OFF)
        if going_on and state.history.abort is None and self.world.budget_spent_at(at):
            self._fail(f"the budget is spent, and the run goes on: {before.name}")

    def lost_memory(self) -> None:
        """A supervisor was killed, and with it what a full disk had not taken."""
        history = self.world.read_history()
        self._state, self.unconfirmed = history.record.state, set(history.record.unconfirmed)
        self._abort_recorded = history.abort is not None
        self._time_up = history.abort is not None and history.abort.request == "budget"

    def _newest(self) -> int | None:
        return max(self.world.attempts, default=None)

    def _machine(self, name: str) -> Machine | None:
        return self.world.head_machine if name == "this machine" else self.world.machines.get(name)

    def _changed(self, event: events.StateChanged) -> None:
        if event.state is not self._state and event.state not in FOLLOWERS[self._state]:
            self._fail(f"a run that is {self._state} becomes {event.state}")
        self._state = event.state
        if not event.state.ended:
            return
        self.verdict, self.unconfirmed = event.verdict, set(event.unconfirmed)
        self.world.before_change()
        self._nothing_lives()
        if event.verdict is not None:
            self._named(event.verdict)
        completed = self._completed()
        if event.state is RunState.SUCCEEDED and not (completed or self._ends_are_here()):
            self._fail("the run is told to have succeeded, and not all that count have completed")
        unsuccessful = event.state not in (RunState.SUCCEEDED, RunState.COMPLETED)
        if unsuccessful and completed and self._records_are_here():
            self._fail(f"the run is told to be {event.state}, and all that count have completed, as their records show")
        if event.state is RunState.ABORTED:
            reason = event.verdict.reason if event.verdict is not None else None
            if not (self._time_up if reason is Reason.BUDGET_SPENT else self._aborted):
                self._fail(f"the run is told to be aborted ({reason}), and nothing has requested that")

    def _completed(self) -> bool:
        newest = self._newest()
        return newest is not None and self.world.attempts[newest].completed

    def _ends_are_here(self) -> bool:
        """Each rank whose success is the newest attempt's has completed, or reported that it has, before it failed and
        left no record."""
        attempt, recorded = self.world.attempts[max(self.world.attempts)], self._recorded()
        programs = {program.rank: program for program in attempt.programs()}
        return all(
            rank in programs
            and (programs[rank].completed or ((programs[rank].end or {}).get("completed") and not recorded.get(rank)))
            for rank in attempt.kind.success_ranks(len(attempt.machines))
        )

    def _recorded(self) -> dict[int, bool]:
        """Rank of the watched attempt → the head has its exit record."""
        connections = self.world.head.connections if self.world.head is not None else []
        return {rank: seen.record is not None for one in connections if one.current for rank, seen in one.seen.items()}

    def _records_are_here(self) -> bool:
        """The head has the exit record of every rank whose success is the newest attempt's."""
        head, newest = self.world.head, self._newest()
        if head is None or newest is None or head.attempt is not self.world.attempts[newest]:
            return False
        recorded = self._recorded()
        return all(recorded[rank] for rank in head.attempt.kind.success_ranks(len(head.attempt.machines)))

    def _nothing_lives(self) -> None:
        """On no node but those on which that is told not to be proved."""
        for machine in {*self.world.members, self.world.head_machine}:
            name = machine.name
            if name not in self.unconfirmed and machine.up and (left := machine.processes(None)):
                self._fail(f"the run is told to have ended, and {name} has {left}")

    def judged(self, attempt: Attempt, trigger: Trigger, *, stepped: bool) -> None:
        """An attempt that can go on without the ranks that it has lost is not ended for their loss."""
        if trigger is not Trigger.RANK or not attempt.kind.outlives_ranks or self.world.disk.full:
            return
        members = [program for group in attempt.groups if not group.over for program in group.members]
        living = [program for program in members if _lives(program) and not self._unseen_past_lease(program)]
        stepped = stepped or attempt.elastic
        least = attempt.min_nodes if attempt.elastic else 1
        if attempt.elastic and any(program.code is not None and program.code > 0 for program in attempt.programs()):
            # A torchrun that gives up closes the rendezvous.
            return
        if stepped and len(living) >= least and any(program.rank == 0 for program in living):
            self._fail(f"the attempt is ended for a lost rank, and {len(living)} ranks can go on")

    def _unseen_past_lease(self, program: Program) -> bool:
        """It counts as lost, also where its keeper is stopped and cannot end it, or its machine woke up this moment."""
        now, machine = self.world.time.now, program.machine
        silent_s = 0.0 if machine.in_contact() else now - program.keeper.contact_at
        just_awake = now - machine.woke_at <= _AWOKEN_S
        return self._lost_after_s is not None and (silent_s > self._lost_after_s or just_awake)

    def _named(self, verdict: events.Verdict) -> None:
        """The named cause is one that was injected."""
        if verdict.reason in (Reason.COMPLETED, Reason.USER_ABORT, Reason.BUDGET_SPENT):
            return
        hosts = {blame.host for blame in self.blames}
        if "has shown no exit record" in (verdict.cause or "") and (verdict.host in hosts or verdict.host is None):
            return
        attempt = self.world.head.attempt if self.world.head is not None else None
        by_words = attempt is not None and not attempt.trainer and _CONSEQUENCE.search(verdict.cause or "")
        if by_words and not all(self._recorded().values()):
            # A program's words are no proof that it was well: the one that it has lost has left no record.
            return
        now = self.world.time.now
        for blame in self.blames:
            possible = blame.reason is verdict.reason and blame.since <= now
            if possible and (None in (verdict.host, blame.host) or blame.host == verdict.host):
                return
        self._fail(f"the cause is named as {verdict.reason} on {verdict.host} ({verdict.cause}), which nobody injected")

    def at_end(self) -> None:
        if not self._state.ended:
            self._fail(f"the run is over as {self._state}")
        self._nothing_lives()
        for (number, rank), copy in self.world.disk.copies.items():
            attempt = self.world.attempts[number]
            keeper = attempt.keepers.get(rank)
            written = keeper.lines[: len(copy)] if keeper is not None else []
            if copy != written:
                self._fail(f"the copy of the events of rank {rank} in attempt {number} is not what the node has")
        self._as_recorded()

    def _as_recorded(self) -> None:
        """The fold of the journal tells what the events have told one by one."""
        record = self.world.read_history().record
        if (record.state, set(record.unconfirmed)) != (self._state, self.unconfirmed):
            self._fail(
                f"the journal's fold is {record.state}, unconfirmed {record.unconfirmed}, and its events told "
                f"{self._state}, {sorted(self.unconfirmed)}"
            )

    @property
    def end(self) -> RunState:
        return self._state

    def _fail(self, what: str, at: float | None = None) -> None:
        raise Violation(what, self.world.time.now if at is None else at)


def _lives(program: Program) -> bool:
    return program.responds and program.keeper.alive and not program.machine.isolated


__all__ = ["Checks", "SavedState", "Violation"]
