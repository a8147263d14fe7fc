"""The simulated programs of an attempt: how they load, step together, save, lose one another, stop and end. Which state
they go on from is decided by the real engine.trainer.checkpoint.resume and engine.training.checkpoint_files."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from engine.models import Reason
from engine.protocol.exit_codes import TrainerExit
from engine.protocol.job import JobError
from engine.run import events
from engine.run.run_plan import RunPlan
from engine.trainer.checkpoint import resume
from engine.training import checkpoint_files
from engine.training.checkpoint_files import ResumePoint
from tests.simulation.nodes import INFINITY, Machine, Program, SavedState, SimulatedKeeper

if TYPE_CHECKING:
    from tests.simulation.world import World

_KEPT = 3
"""Checkpoints on a node."""
_SAVE_S = 0.4
_CLOSED = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.9]:1"
)


class _QuietReporter:
    def event(self, name: str, **fields: Any) -> None:
        pass

    def warn(self, message: str) -> None:
        pass

    def print(self, message: str) -> None:
        pass


class Attempt:
    """What runs of one attempt, on all its machines."""

    def __init__(self, world: World, plan: RunPlan, planned: events.Attempt, machines: list[Machine]) -> None:
        self.world, self.plan, self.planned, self.machines = world, plan, planned, machines
        self.number = planned.number
        job, recovery = plan.config.job, plan.config.recovery
        self.kind = job.kind
        self.trainer = job.command is None
        self.elastic = job.elastic
        self.local = self.trainer and job.strategy == "local"
        self.min_nodes = recovery.min_nodes or len(machines)
        self.spec: Any = SimpleNamespace(
            lease_s=recovery.lease_s,
            on_lease_expiry=recovery.on_lease_expiry,
            stop_grace_s=recovery.stop_grace_s,
            save_grace_s=recovery.save_grace_s,
            term_grace_s=recovery.term_grace_s,
            torchrun=plan.config.torchrun,
            nonce=planned.nonce,
        )
        self.keepers: dict[int, SimulatedKeeper] = {}
        self.groups: list[Group] = []
        self.formed = False
        self.broken = False
        """A rank was lost before all had met."""
        self.iterations = world.scenario.iterations
        self.saves_parts = self.trainer and self.kind.strategy.partitioned
        self.keeps_emergencies = self.kind.survivors_keep_state and job.framework == "mlx"

    def restarts_of(self, rank: int) -> int:
        return self.kind.rank_restarts(rank, self.plan.config.recovery.max_restarts)

    # Starts.

    def start_rank(self, rank: int) -> int | None:
        """On its machine, whose shell has the command: the keeper's exit code, where it does not keep the rank."""
        machine = self.machines[rank]
        if self.number in machine.attempts_fenced or rank in self.keepers:
            return 127
        self.world.checks.starts(self)
        keeper = self.keepers[rank] = SimulatedKeeper(machine, self, rank)
        machine.keepers.append(keeper)
        if machine.start_fails:
            keeper.cannot_start()
            return 127
        keeper.start_program()
        if keeper.identity is not None:
            identity = keeper.identity
            machine.report(self.number, lambda connection: connection.take_start(rank, identity))
        return None

    def program_started(self, program: Program) -> None:
        if self.trainer:
            program.write({"event": "start"})
            program.phase = "loading"
            program.write({"event": "phase", "phase": "loading"})
        self.world.time.after(self.world.rng.uniform(0.4, 2.0), self._loaded, program)

    def _loaded(self, program: Program) -> None:
        if not program.alive:
            return
        if program.frozen:
            self.world.when_awake(program, self._loaded, program)
            return
        program.loaded = True
        if self.formed:
            self._join(program)
        elif self.broken:
            self._lose_peer(program)
        elif len(self._present()) == len(self.machines):
            self._form()
        elif self.elastic:
            self.world.time.after(2.0, self._form_without)

    def programs(self) -> list[Program]:
        return [keeper.program for keeper in self.keepers.values() if keeper.program is not None]

    def _present(self) -> list[Program]:
        return [program for program in self.programs() if program.loaded and program.alive]

    def _form(self) -> None:
        """All ranks have met: they agree on the state to go on from."""
        present = sorted(self._present(), key=lambda program: program.rank)
        if any(program.frozen or program.machine.isolated for program in present):
            self.world.time.after(1.0, self._form_later)
            return
        self.formed = True
        try:
            point = self._resume_point()
        except JobError as error:
            self.world.checks.resumed(self, 0, refused=True)
            for program in present:
                self.world.checks.blame(Reason.RANK_FAILED, program.machine)
                program.fail("JobError", str(error), TrainerExit.EXCEPTION)
            return
        self.world.checks.resumed(self, point.iteration)
        for program in present:
            if self.trainer and self.number > 1:
                about = {"source": point.source, "iteration": point.iteration, "from_rank": point.rank}
                program.write({"event": "resumed", "update": point.iteration, **about})
            self._train(program)
        groups = [[program] for program in present] if self.local else [present]
        for members in groups:
            group = Group(self, members, point.iteration)
            self.groups.append(group)
            group.schedule()

    def _form_later(self) -> None:
        if self.elastic:
            self._form_without()
        elif not self.formed and len(self._present()) == len(self.machines):
            self._form()

    def _form_without(self) -> None:
        """The torchruns that are left meet, or give up."""
        living = [program for program in self.programs() if program.alive]
        enough = len(living) >= self.min_nodes and any(program.rank == 0 for program in living)
        if self.formed or (enough and len(self._present()) < len(living)):
            return
        if enough:
            self._form()
            return
        self.broken = True
        # It is the cause, whatever kept the others away.
        self.world.checks.blame(Reason.RANK_FAILED, None)
        for program in living:
            # The rendezvous waits for others.
            self.world.time.after(100.0, self._lose_peer, program)

    def _train(self, program: Program) -> None:
        if self.trainer:
            program.phase = "training"
            program.write({"event": "phase", "phase": "training"})

    def _join(self, program: Program) -> None:
        """A rank that was started again while the others went on."""
        first = self.keepers[0].program if 0 in self.keepers else None
        if first is None or first.group is None or not first.alive:
            self._lose_peer(program)
            return
        first.group.sync(self.world.time.now)
        if first.completed:
            self._lose_peer(program)
            return
        self._train(program)
        group = Group(self, [program], first.group.iteration)
        self.groups.append(group)
        group.schedule()

    def _resume_point(self) -> ResumePoint:
        if self.number == 1:
            return ResumePoint()
        states = self.world.states_of(self.machines)
        if not self.trainer:
            newest = max((state.iteration for state in states if state.complete), default=0)
            return ResumePoint(newest, newest)
        copies = [
            resume.StateCopy(
                self.machines.index(state.node) if state.node is not None else 0,
                number,
                _manifest(state),
                resume.Author(state.attempt, state.rank) if state.emergency else None,
            )
            for number, state in enumerate(states)
            if state.complete
        ]
        return checkpoint_files.first_restored(
            _points(resume.complete_states(copies)),
            int,
            self.planned.needs_state,
            _QuietReporter(),  # type: ignore[arg-type]
        )

    # Losses.

    def member_ended(self, program: Program) -> None:
        if program.completed and (program.group is None or program.group.over):
            if self.local and program.rank == 0:
                self._complete_others()
            return
        if not self.formed:
            if self.elastic and program.rank != 0 and not (program.code or 0) > 0:
                self.world.time.after(2.0, self._form_without)
                return
            self.broken = True
        group = program.group
        if group is not None:
            group.changed()
            if group.over:
                return
        if self.local and self.formed and program.rank != 0:
            return
        gave_up = program.code is not None and program.code > 0
        if self.elastic and self.formed and not gave_up:
            self.world.time.after(self.world.rng.uniform(1.0, 3.0), self._reform)
            return
        for other in self.programs():
            if other is not program and other.alive and other.loaded:
                self.world.time.after(self.world.rng.uniform(0.05, 1.2), self._lose_peer, other)

    def _complete_others(self) -> None:
        for other in self.programs():
            if other.alive and other.group is not None and not other.group.over:
                self.world.time.after(self.world.rng.uniform(0.1, 2.0), other.group.complete)

    def _lose_peer(self, program: Program) -> None:
        if not program.alive or program.leaving:
            return
        if program.frozen:
            self.world.when_awake(program, self._lose_peer, program)
        elif self.trainer:
            self.leave_for_lost_peer(program)
        else:
            program.fail("", _CLOSED, 1)

    def leave_for_lost_peer(self, program: Program) -> None:
        """A trainer saves the state of its last finished update, where that is of use, and leaves."""
        if not program.alive or program.leaving:
            return
        self.world.before_change()
        program.leaving = True
        group = program.group
        if group is not None:
            group.changed()
        if group is None or group.iteration == 0 or not self.keeps_emergencies or program.machine.disk_full:
            self._leave(program)
            return
        iteration = group.iteration
        program.phase = "saving"
        program.write({"event": "emergency_checkpoint", "phase": "begin", "bytes": 1000, "iteration": iteration})
        state = SavedState(
            iteration, 0, 1, attempt=self.number, rank=program.rank, emergency=True, node=program.machine
        )
        program.machine.states.append(state)
        self.world.time.after(_SAVE_S, self._commit_emergency, program, state)

    def _commit_emergency(self, program: Program, state: SavedState) -> None:
        if not program.alive:
            return
        if program.frozen:
            self.world.when_awake(program, self._commit_emergency, program, state)
            return
        self.world.commit(program, state)
        program.write({
            "event": "emergency_checkpoint", "phase": "committed", "iteration": state.iteration,
            "state": state.name, "manifest": state.manifest,
        })  # fmt: skip
        self._leave(program)

    def _leave(self, program: Program) -> None:
        program.fail("PeerLost", "a peer is lost", TrainerExit.PEER_LOST)

    def stop_requested(self, program: Program) -> None:
        if program.group is not None:
            program.group.sync(self.world.time.now)
            program.group.schedule()

    def restart_workers(self, rank: int) -> None:
        """A keeper of an elastic job has ended its torchrun's workers: they meet again."""
        if self.formed and self.groups and not self.groups[-1].over:
            self.world.before_change()
            self.groups[-1].meeting = True
            self.groups[-1].changed()
            self.world.time.after(2.0, self._reform)

    def _reform(self) -> None:
        """The workers of the torchruns that are left meet again; too few of them, or without rank 0, give up."""
        group = self.groups[-1] if self.groups else None
        if group is None or group.over:
            return
        self.world.before_change()
        living = [program for program in group.members if program.alive]
        present = [program for program in living if not program.frozen and not program.machine.isolated]
        first = any(program.rank == 0 for program in present)
        if not first or len(present) < self.min_nodes:
            if not any(program.rank == 0 for program in living) or len(living) < self.min_nodes:
                group.over = True
                for program in living:
                    self.world.time.after(self.world.rng.uniform(2.0, 6.0), self._lose_peer, program)
            return
        if present != group.members or group.meeting:
            every = self.world.scenario.every
            group.members, group.meeting = present, False
            group.iteration = group.iteration // every * every if every else 0
            group.changed()

    def sync(self) -> None:
        for group in self.groups:
            group.sync(self.world.time.now)

    def changed(self) -> None:
        """Something may hold up its ranks, or hold them up no longer."""
        for group in self.groups:
            group.changed()

    @property
    def completed(self) -> bool:
        """In truth: every rank whose success is the attempt's has done its work."""
        ranks = self.kind.success_ranks(len(self.machines))
        ended = (self.keepers.get(rank) for rank in ranks)
        return all(keeper is not None and keeper.program is not None and keeper.program.completed for keeper in ended)


def _points(states: list[Any]) -> Iterator[ResumePoint | None]:
    for copies in states:
        copy = copies[0][0]
        source = "checkpoint" if copy.author is None else "emergency"
        yield ResumePoint(copy.manifest.iteration, copy.manifest.update, source=source, rank=copy.rank)


def _manifest(state: SavedState) -> Any:
    return SimpleNamespace(
        update=state.iteration, iteration=state.iteration, part=state.part, parts=state.parts, files=()
    )


class Group:
    """Ranks that make their steps together, or one that makes them by itself. Steps are made up only when somebody
    looks: `sync` before anything changes for a member, `changed` after it."""

    def __init__(self, attempt: Attempt, members: list[Program], iteration: int) -> None:
        self.attempt, self.world, self.members = attempt, attempt.world, members
        self.iteration = iteration
        self.over = self.meeting = False
        now = self.world.time.now
        self._last_at = now + 0.2
        """The end of the last step."""
        self._blocked_at: float | None = None
        self._saving: tuple[float, list[tuple[Program, SavedState]], int] | None = None
        self._turn = 0
        self._period_s = self.world.scenario.period_s
        for program in members:
            program.group = self
        self.changed()

    @property
    def blocked(self) -> bool:
        return self._blocked_at is not None

    def _held_up(self) -> bool:
        if self.meeting:
            return True
        alone = len(self.members) == 1
        for program in self.members:
            if not program.alive or program.leaving or program.frozen:
                return True
            if program.machine.isolated and (not alone or (self.attempt.local and program.rank != 0)):
                return True
        return False

    def changed(self) -> None:
        if self.over:
            return
        now, held_up = self.world.time.now, self._held_up()
        if held_up and self._blocked_at is None:
            self._blocked_at = now
        elif not held_up and self._blocked_at is not None:
            self._last_at += now - self._blocked_at
            self._blocked_at = None
        self.schedule()

    def schedule(self) -> None:
        self._turn += 1
        if self.over or self._blocked_at is not None:
            return
        left = 1 if any(program.stop_requested for program in self.members) else self._left()
        self.world.time.at(self._last_at + left * self._period_s, self._due, self._turn)

    def _left(self) -> int:
        return max(1, self.attempt.iterations - self.iteration)

    def _due(self, turn: int) -> None:
        if turn == self._turn:
            self.sync(self.world.time.now)
            self.schedule()

    def sync(self, now: float) -> None:
        """Make up the steps until now."""
        if self.over:
            return
        period_s, iterations = self._period_s, self.attempt.iterations
        limit = now if self._blocked_at is None else self._blocked_at
        while not self.over:
            next_at = self._last_at + period_s
            if self._saving is not None and self._saving[0] <= min(next_at, now):
                self._commit()
            if next_at > limit + 1e-9:
                break
            self._step(next_at)
            if self.iteration >= iterations:
                self.complete()
            elif any(program.stop_requested for program in self.members):
                self._stop()
            elif self.world.scenario.every and self.iteration % self.world.scenario.every == 0:
                self._begin_save()
        if self._saving is not None and self._saving[0] <= now:
            self._commit()

    def _step(self, at: float) -> None:
        self.iteration += 1
        self._last_at = at
        line = b'{"event": "step", "iteration": %d, "t": %.3f, "at": %.3f}' % (self.iteration, at, self.world.wall(at))
        reporting = self.members if self.attempt.trainer else self.members[:1]
        for program in self.members:
            self.world.checks.step(self.attempt, program, at, at - self._period_s)
        for program in reporting:
            if not program.machine.disk_full:
                program.keeper.lines.append((at, line))

    def _writers(self) -> list[tuple[Program, int, int]]:
        """Who saves which part of how many."""
        if self.attempt.saves_parts:
            return [(program, part, len(self.members)) for part, program in enumerate(self.members)]
        if self.attempt.plan.config.job.framework == "torch" and self.attempt.trainer:
            return [(program, 0, 1) for program in self.members]
        return [(self.members[0], 0, 1)] if self.members[0].rank == 0 else []

    def _states(self) -> list[tuple[Program, SavedState]]:
        shared = self.attempt.plan.config.checkpoint.destination is not None
        states = []
        for program, part, parts in self._writers():
            node = None if shared else program.machine
            state = SavedState(
                self.iteration, part, parts, attempt=self.attempt.number, rank=program.rank, emergency=False, node=node
            )
            (self.world.shared_states if shared else program.machine.states).append(state)
            states.append((program, state))
        return states

    def _begin_save(self) -> None:
        """In the background of the steps that follow."""
        if self._saving is None and not any(program.machine.disk_full for program in self.members):
            self._saving = (self._last_at + _SAVE_S, self._states(), self.iteration)

    def _commit(self) -> None:
        assert self._saving is not None
        at, states, iteration = self._saving
        self._saving = None
        for program, state in states:
            if program.dead_at <= at or program.machine.disk_full:
                continue
            self.world.commit(program, state)
            if self.attempt.trainer:
                line = {
                    "event": "checkpoint", "phase": "committed", "background": True, "iteration": iteration,
                    "state": state.name, "manifest": state.manifest,
                }  # fmt: skip
                program.write(line, at)

    def _stop(self) -> None:
        """All ranks have agreed to stop after this step; they save its state."""
        self.over = True
        if self._saving is not None:
            self._commit()
        states = self._states()
        for program in self.members:
            program.phase = "saving"
            program.write({"event": "phase", "phase": "saving"})
        self.world.time.after(_SAVE_S, self._stopped, states)

    def _stopped(self, states: list[tuple[Program, SavedState]]) -> None:
        writers = {id(program): state for program, state in states}
        for program in self.members:
            if not program.alive:
                continue
            if program.frozen:
                self.world.when_awake(program, self._leave_stopped, program, writers.get(id(program)))
            else:
                self._leave_stopped(program, writers.get(id(program)))

    def _leave_stopped(self, program: Program, state: SavedState | None) -> None:
        if not program.alive:
            return
        if state is not None and not program.machine.disk_full:
            self.world.commit(program, state)
            program.write({
                "event": "checkpoint", "phase": "committed", "iteration": state.iteration, "state": state.name,
                "manifest": state.manifest,
            })  # fmt: skip
        program.end = {"event": "end", "completed": False, "stopped": True, "iteration": self.iteration}
        program.write(program.end)
        program.die(TrainerExit.OK)

    def complete(self) -> None:
        """The training has made its last iteration."""
        if self.over:
            return
        self.over = True
        if self._saving is not None:
            self._commit()
        for program in self.members:
            if program.alive:
                self.world.time.after(self.world.rng.uniform(0.1, 0.5), self._end, program)

    def _end(self, program: Program) -> None:
        if not program.alive:
            return
        if program.frozen:
            self.world.when_awake(program, self._end, program)
            return
        if self.attempt.trainer:
            program.end = {"event": "end", "completed": True, "stopped": False, "iteration": self.iteration}
            program.phase = None
            program.write(program.end)
            program.completed = True
        if program.lingers_s:
            self.world.time.after(program.lingers_s, program.die, TrainerExit.OK)
        else:
            program.die(TrainerExit.OK)


__all__ = ["INFINITY", "Attempt", "Group"]
