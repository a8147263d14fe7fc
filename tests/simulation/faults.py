"""The faults of a scenario: what each does to the world, and how it ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.models import Reason
from engine.protocol.exit_codes import TrainerExit
from engine.run import events
from tests.simulation.nodes import Machine, Program
from tests.simulation.scenario import Fault

if TYPE_CHECKING:
    from tests.simulation.world import World


class HeadFaults:
    """Those of the supervisor's process that are still to come."""

    def __init__(self) -> None:
        self.kill_at: list[tuple[int, float]] = []
        """Number of the effect before which the supervisor is killed, and how long none follows."""
        self.wanted = False
        self.resumes: list[float] = []
        self.more_locks: list[int] = []


def _begin(world: World, fault: Fault, name: str, call: Callable[[], None]) -> None:
    world.say(f"fault: {fault.kind} {name} for {fault.length:g} s" if fault.length else f"fault: {fault.kind} {name}")
    world.before_change()
    call()
    world.after_change()


def _over(world: World, fault: Fault, name: str, call: Callable[[], None]) -> None:
    world.say(f"over: {fault.kind} {name}")
    world.before_change()
    call()
    world.after_change()


def _lasting(
    begin: Callable[[World, Machine], None],
    end: Callable[[World, Machine], None],
    *reasons: Reason,
    always_ends: bool = False,
) -> Callable[[World, Fault], None]:
    """One of a machine, that lasts."""

    def plan(world: World, fault: Fault) -> None:
        machine = world.members[fault.node % len(world.members)]
        length = fault.length or (30.0 if always_ends or machine is world.head_machine else 0.0)

        def start() -> None:
            for reason in reasons:
                world.checks.blame(reason, machine, length=length or float("inf"))
            if machine is world.head_machine:
                world.checks.unsupervised(length)
            begin(world, machine)

        world.time.at(fault.at, _begin, world, fault, machine.name, start)
        if length:
            world.checks.ends_at(fault.at + length)
            world.time.at(fault.at + length, _over, world, fault, machine.name, lambda: end(world, machine))
        else:
            world.checks.ends_at(fault.at)

    return plan


def _counted(attribute: str, *reasons: Reason, always_ends: bool = False) -> Callable[[World, Fault], None]:
    def change(machine: Machine, by: int) -> None:
        if attribute == "asleep":
            machine.sleep(by)
            return
        setattr(machine, attribute, getattr(machine, attribute) + by)
        if attribute == "disk_full" and machine is machine.world.head_machine:
            machine.world.disk.full += by
        if attribute == "disk_stalled" and machine is machine.world.head_machine:
            machine.world.disk.stalled += by

    return _lasting(
        lambda _, machine: change(machine, 1), lambda _, machine: change(machine, -1), *reasons, always_ends=always_ends
    )


def _program(world: World, machine: Machine) -> Program | None:
    """The rank on a machine that lives now."""
    living = [keeper.program for keeper in machine.keepers if keeper.program_alive]
    return living[-1] if living else None


def _of_program(act: Callable[[Program], None], *reasons: Reason) -> Callable[[World, Fault], None]:
    """One that happens to the rank of a machine, if there is one."""

    def plan(world: World, fault: Fault) -> None:
        machine = world.members[fault.node % len(world.members)]

        def happen() -> None:
            program = _program(world, machine)
            if program is not None and not machine.asleep:
                for reason in reasons:
                    world.checks.blame(reason, machine)
                act(program)

        world.time.at(fault.at, _begin, world, fault, machine.name, happen)
        world.checks.ends_at(fault.at)

    return plan


def _exit(program: Program) -> None:
    program.fail("RuntimeError", "the loss function failed", TrainerExit.EXCEPTION)
    if not program.cooperative:
        program.log = "ValueError: the loss function failed"


def _exit_0(program: Program) -> None:
    # The others of a command may wait for it.
    program.world.checks.blame(Reason.HUNG, None)
    program.die(0)


def _diverge(program: Program) -> None:
    if program.cooperative:
        program.fail("Diverged", "loss is not finite at iteration 3", TrainerExit.DIVERGED)
    else:
        _exit(program)


def _out_of_memory(program: Program) -> None:
    program.machine.memory_kills += 1
    program.die(-signal.SIGKILL)


def _deaf(program: Program) -> None:
    program.deaf = True


def _all_ranks_killed(world: World, fault: Fault) -> None:
    def happen() -> None:
        for machine in world.members:
            program = _program(world, machine)
            if program is not None and not machine.asleep:
                world.checks.blame(Reason.RANK_KILLED, machine)
                program.die(-signal.SIGKILL)

    world.time.at(fault.at, _begin, world, fault, "", happen)
    world.checks.ends_at(fault.at)


def _outage(world: World, fault: Fault) -> None:
    """All nodes but this machine lose their power at once."""
    for number, machine in enumerate(world.members):
        if machine is not world.head_machine:
            _power(world, Fault("power", fault.at, number, fault.length or 30.0))


def _lingers(program: Program) -> None:
    program.lingers_s = 25.0


def _rank_stopped(world: World, fault: Fault) -> None:
    machine = world.members[fault.node % len(world.members)]
    stopped: list[Program] = []

    def start() -> None:
        program = _program(world, machine)
        if program is not None:
            world.checks.blame(Reason.HUNG, machine, length=fault.length or float("inf"))
            program.stopped += 1
            stopped.append(program)

    def end() -> None:
        for program in stopped:
            program.stopped -= 1

    world.time.at(fault.at, _begin, world, fault, machine.name, start)
    world.checks.ends_at(fault.at + fault.length)
    if fault.length:
        world.time.at(fault.at + fault.length, _over, world, fault, machine.name, end)


def _keeper_stopped(world: World, fault: Fault) -> None:
    machine, length = world.members[fault.node % len(world.members)], fault.length or 30.0

    def start() -> None:
        for keeper in world.keepers(machine):
            keeper.stopped += 1
            world.checks.keeper_stopped(keeper)
            world.time.after(length, _over, world, fault, machine.name, keeper.go_on)

    world.time.at(fault.at, _begin, world, fault, machine.name, start)
    world.checks.ends_at(fault.at + length)


def _keeper_killed(world: World, fault: Fault) -> None:
    machine = world.members[fault.node % len(world.members)]

    def happen() -> None:
        for keeper in world.keepers(machine):
            world.checks.blame(Reason.RANK_KILLED, machine)
            world.checks.blame(Reason.RANK_FAILED, machine)
            keeper.die()

    world.time.at(fault.at, _begin, world, fault, machine.name, happen)
    world.checks.ends_at(fault.at)


def _lose_streams(world: World, machine: Machine) -> None:
    for session in list(machine.sessions):
        session.lose()


def _reset(world: World, fault: Fault) -> None:
    machine = world.members[fault.node % len(world.members)]
    world.time.at(fault.at, _begin, world, fault, machine.name, lambda: _lose_streams(world, machine))
    world.checks.ends_at(fault.at)


def power_off(world: World, machine: Machine) -> None:
    machine.up = False
    for keeper in machine.keepers:
        keeper.lose_power()
    if machine is world.head_machine and world.launcher is not None:
        world.launcher.end()


def power_on(world: World, machine: Machine) -> None:
    machine.up = True
    machine.boot += 1
    _lose_streams(world, machine)


def _power(world: World, fault: Fault) -> None:
    machine = world.members[fault.node % len(world.members)]
    if machine is world.head_machine:
        _head_power(world, fault)
        return
    _lasting(power_off, power_on, *_AWAY, Reason.RANK_KILLED, Reason.RANK_FAILED)(world, fault)


def _slow(world: World, machine: Machine) -> None:
    machine.latency_s = 2.5


def _fast(world: World, machine: Machine) -> None:
    machine.latency_s = 0.02


def _clock(world: World, fault: Fault) -> None:
    machine = world.members[fault.node % len(world.members)]

    def happen() -> None:
        machine.clock_ahead_s += -fault.length if fault.node % 2 else fault.length or 3600.0

    world.time.at(fault.at, _begin, world, fault, machine.name, happen)
    world.checks.ends_at(fault.at)


# The head.


_LOOKED_S = 0.05
"""The supervisor, which looks ten times a second, has looked before it is held up."""


def _head_killed(world: World, fault: Fault) -> None:
    world.checks.ends_at(fault.at + fault.length)
    world.time.at(fault.at, lambda: _kill_head(world, fault))


def _kill_head(world: World, fault: Fault) -> None:
    if world.head is not None:
        world.checks.unsupervised(fault.length)
        world.kill_head(fault.length)


def _head_killed_at_effect(world: World, fault: Fault) -> None:
    world.checks.ends_at(fault.length + 60.0)
    world.faults.kill_at.append((int(fault.at), fault.length))
    world.faults.kill_at.sort()
    world.checks.unsupervised(fault.length)


def _head_stopped(world: World, fault: Fault) -> None:
    stopped: list[object] = []

    def start() -> None:
        if world.head is not None:
            world.checks.unsupervised(fault.length)
            world.head.stopped += 1
            stopped.append(world.head)

    def end() -> None:
        for head in stopped:
            head.stopped -= 1  # type: ignore[attr-defined]

    world.time.at(fault.at - _LOOKED_S, world.observe_now)
    world.time.at(fault.at, _begin, world, fault, "", start)
    world.time.at(fault.at + fault.length, _over, world, fault, "", end)
    world.checks.ends_at(fault.at + fault.length)


def _head_sleeps(world: World, fault: Fault) -> None:
    machine = world.head_machine

    def start() -> None:
        world.checks.unsupervised(fault.length)
        if machine in world.members:
            world.checks.blame(Reason.HUNG, machine, length=fault.length)
        machine.sleep(1)

    def end() -> None:
        machine.sleep(-1)

    world.time.at(fault.at - _LOOKED_S, world.observe_now)
    world.time.at(fault.at, _begin, world, fault, "", start)
    world.time.at(fault.at + fault.length, _over, world, fault, "", end)
    world.checks.ends_at(fault.at + fault.length)


def _head_power(world: World, fault: Fault) -> None:
    length = fault.length or 30.0

    def start() -> None:
        machine = world.head_machine
        if not machine.up:
            return
        world.checks.unsupervised(length)
        world.checks.blame(Reason.SUPERVISOR_LOST, None)
        if machine in world.members:
            for reason in (Reason.NODE_LOST, Reason.RANK_KILLED, Reason.HUNG):
                world.checks.blame(reason, machine)
        world.kill_head(length + 1.0, power=True)
        power_off(world, machine)
        world.time.after(length, _over, world, fault, "", lambda: power_on(world, machine))

    world.time.at(fault.at, _begin, world, fault, "", start)
    world.checks.ends_at(fault.at + length)


def _of_head_disk(attribute: str) -> Callable[[World, Fault], None]:
    def plan(world: World, fault: Fault) -> None:
        def change(by: int) -> None:
            setattr(world.disk, attribute, getattr(world.disk, attribute) + by)
            if world.head_machine in world.members:
                name = f"disk_{attribute}"
                setattr(world.head_machine, name, getattr(world.head_machine, name) + by)
                world.checks.blame(Reason.HUNG, world.head_machine)
            world.checks.blame(Reason.LAUNCH_FAILED, None, length=fault.length)

        world.time.at(fault.at, _begin, world, fault, "", lambda: change(1))
        world.time.at(fault.at + fault.length, _over, world, fault, "", lambda: change(-1))
        world.checks.ends_at(fault.at + fault.length)

    return plan


def _head_clock(world: World, fault: Fault) -> None:
    def happen() -> None:
        world.head_machine.clock_ahead_s += fault.length if fault.node % 2 else -fault.length

    world.time.at(fault.at, _begin, world, fault, "", happen)
    world.checks.ends_at(fault.at)


def _launcher_killed(world: World, fault: Fault) -> None:
    def happen() -> None:
        if world.launcher is not None and world.launcher.alive:
            world.checks.blame(Reason.LAUNCH_FAILED, None)
            world.launcher.end()

    world.time.at(fault.at, _begin, world, fault, "", happen)
    world.checks.ends_at(fault.at)


def _second_head(world: World, fault: Fault) -> None:
    """A command finds the run, takes it for one without a supervisor, and starts one."""

    def happen() -> None:
        if world.head is not None and world.take_lock():
            world.checks.second_supervisor()

    world.time.at(fault.at, _begin, world, fault, "", happen)
    world.checks.ends_at(fault.at)


def _abort(*, now: bool) -> Callable[[World, Fault], None]:
    def plan(world: World, fault: Fault) -> None:
        def happen() -> None:
            if world.read_history().record.state.ended:
                # The command refuses.
                return
            world.checks.abort_requested()
            world.disk.requests.append(events.RequestReceived(request="abort", now=now, by="user"))
            world.news = True

        world.time.at(fault.at, _begin, world, fault, "", happen)
        world.checks.ends_at(fault.at)

    return plan


def _resume(world: World, fault: Fault) -> None:
    world.faults.resumes.append(fault.at)
    world.checks.ends_at(fault.at)


def _cut(machine: Machine, to: int, back: int) -> None:
    if not machine.local:
        machine.cut_to += to
        machine.cut_from += back


def _isolate(machine: Machine, by: int) -> None:
    machine.isolated += by
    _cut(machine, by, by)


_AWAY = (Reason.NODE_LOST, Reason.HUNG, Reason.LAUNCH_FAILED)

FAULTS: Final[dict[str, Callable[[World, Fault], None]]] = {
    "rank_killed": _of_program(lambda program: program.die(-signal.SIGKILL), Reason.RANK_KILLED),
    "all_ranks_killed": _all_ranks_killed,
    "outage": _outage,
    "rank_exits": _of_program(_exit, Reason.RANK_FAILED),
    "rank_exits_0": _of_program(_exit_0, Reason.RANK_FAILED),
    "rank_stopped": _rank_stopped,
    "rank_deaf": _of_program(_deaf),
    "rank_lingers": _of_program(_lingers),
    "keeper_killed": _keeper_killed,
    "keeper_stopped": _keeper_stopped,
    "agent_killed": _reset,
    "agent_stopped": _counted("agent_stopped", *_AWAY, always_ends=True),
    "node_sleeps": _counted("asleep", *_AWAY),
    "power": _power,
    "cut": _lasting(lambda _, machine: _cut(machine, 1, 1), lambda _, machine: _cut(machine, -1, -1), *_AWAY),
    "cut_to": _lasting(lambda _, machine: _cut(machine, 1, 0), lambda _, machine: _cut(machine, -1, 0), *_AWAY),
    "cut_from": _lasting(lambda _, machine: _cut(machine, 0, 1), lambda _, machine: _cut(machine, 0, -1), *_AWAY),
    "isolated": _lasting(
        lambda _, machine: _isolate(machine, 1), lambda _, machine: _isolate(machine, -1), *_AWAY, Reason.RANK_FAILED
    ),
    "reset": _reset,
    "slow": _lasting(_slow, _fast, always_ends=True),
    "disk_full": _counted("disk_full", Reason.LAUNCH_FAILED, Reason.HUNG),
    "disk_stalled": _counted("disk_stalled", Reason.HUNG, Reason.LAUNCH_FAILED, always_ends=True),
    "clock": _clock,
    "diverged": _of_program(_diverge, Reason.DIVERGED, Reason.RANK_FAILED),
    "out_of_memory": _of_program(_out_of_memory, Reason.OUT_OF_MEMORY, Reason.RANK_KILLED),
    "start_fails": _counted("start_fails", Reason.LAUNCH_FAILED),
    "unfit": _counted("unfit"),
    "head_killed": _head_killed,
    "head_killed_at_effect": _head_killed_at_effect,
    "head_stopped": _head_stopped,
    "head_sleeps": _head_sleeps,
    "head_power": _head_power,
    "head_disk_full": _of_head_disk("full"),
    "head_disk_stalled": _of_head_disk("stalled"),
    "head_clock": _head_clock,
    "launcher_killed": _launcher_killed,
    "second_head": _second_head,
    "abort": _abort(now=False),
    "abort_now": _abort(now=True),
    "resume": _resume,
}
