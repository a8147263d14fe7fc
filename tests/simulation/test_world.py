"""The simulated machines themselves: leases, streams, disks and programs behave as the real ones do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.node.attempt_watch import MAX_UNANSWERED_HEARTBEATS
from engine.protocol.attempt import END
from engine.run import events
from engine.run.effects import Connect
from tests.simulation.connection import KEEPALIVE_S, Connection
from tests.simulation.faults import power_off, power_on
from tests.simulation.nodes import Machine, SimulatedKeeper
from tests.simulation.scenario import Scenario, draw, launch_decisions
from tests.simulation.simulate import simulate, use, virtual_engine
from tests.simulation.training import Attempt
from tests.simulation.world import World

LEASE_S = 20.0


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with virtual_engine():
        yield


class Running:
    """Two remote nodes whose ranks train, and a supervisor that is connected to them and does nothing else."""

    def __init__(self, **scenario: object) -> None:
        self.world = World(Scenario(local=False, recovery=1, iterations=10_000, **scenario))  # type: ignore[arg-type]
        use(self.world)
        world, plan = self.world, self.world.plan
        head = world.new_supervisor()
        assert head is not None
        self.head = head
        head.history = world.read_history()
        decisions = launch_decisions(world.scenario.kind, plan.config.nodes)
        world.disk.append(events.LaunchDecided.model_construct(decisions=decisions))
        planned = events.Attempt.model_construct(
            number=1, nonce="nonce.1", nodes=plan.nodes, layouts=(), needs_state="", memory_kills=0, manifests=[]
        )
        head._connect(Connect(planned))
        assert head.attempt is not None
        self.attempt: Attempt = head.attempt
        for rank in range(len(plan.nodes)):
            self.attempt.start_rank(rank)
        self.run(10.0)

    @property
    def node(self) -> Machine:
        return self.world.members[1]

    @property
    def keeper(self) -> SimulatedKeeper:
        return self.attempt.keepers[1]

    @property
    def connection(self) -> Connection:
        return next(one for one in self.head.connections if one.machine is self.node)

    def run(self, seconds: float) -> None:
        limit = self.world.time.now + seconds
        while self.world.time.now < limit:
            self.world.time.run_until(min(limit, self.world.time.now + 1.0))
            self.head.clock()

    def change(self, **fields: int) -> None:
        self.world.before_change()
        for name, value in fields.items():
            setattr(self.node, name, value)
        self.world.after_change()

    def iteration(self) -> int:
        self.world.before_change()
        return self.attempt.groups[0].iteration


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running()
    yield made
    made.world.close()


def test_a_rank_goes_on_while_heartbeats_come(running: Running) -> None:
    before = running.iteration()
    running.run(10 * LEASE_S)
    assert running.keeper.alive
    assert running.iteration() >= before + 10 * LEASE_S / 0.5 - 1


def test_a_lease_that_runs_out_ends_its_rank(running: Running) -> None:
    running.change(cut_to=1, cut_from=1)
    running.run(LEASE_S - 1.0)
    assert running.keeper.program_alive
    running.run(10.0)
    assert running.keeper.record is not None
    assert running.keeper.record.stopped_by == "lease"


def test_a_short_cut_loses_no_message_and_a_longer_one_makes_a_new_stream(running: Running) -> None:
    generation = running.connection._generation
    running.change(cut_to=1, cut_from=1)
    assert running.keeper.program is not None
    running.keeper.program.die(-9)
    running.run(5.0)
    assert running.connection.seen[1].record is None
    running.change(cut_to=0, cut_from=0)
    running.run(1.0)
    assert running.connection.seen[1].record is not None
    assert running.connection._generation == generation
    running.change(cut_to=1, cut_from=1)
    running.run(KEEPALIVE_S + 1.0)
    running.change(cut_to=0, cut_from=0)
    running.run(10.0)
    assert running.connection.open
    assert running.connection._generation > generation


def test_a_new_stream_reports_starts_and_ends_again(running: Running) -> None:
    seen = running.connection.seen[1]
    seen.identity = None
    running.connection.lose()
    running.run(10.0)
    assert seen.identity == running.keeper.identity


def test_heartbeats_whose_answers_are_lost_renew_the_lease_a_few_times_only(running: Running) -> None:
    running.change(cut_from=1)
    running.run(MAX_UNANSWERED_HEARTBEATS + LEASE_S - 1.0)
    assert running.keeper.stopped_by is None
    running.run(3.0)
    assert running.keeper.stopped_by == "lease"


def test_heartbeats_that_lay_unread_while_the_keeper_was_stopped_do_not_renew_its_lease(running: Running) -> None:
    running.keeper.stopped += 1
    running.run(5.0)
    running.change(cut_to=1, cut_from=1)
    running.run(2 * LEASE_S)
    assert running.keeper.stopped_by is None
    running.world.before_change()
    running.keeper.go_on()
    assert running.keeper.stopped_by == "lease"


def test_a_lease_runs_on_while_its_machine_sleeps(running: Running) -> None:
    running.world.before_change()
    running.node.sleep(1)
    running.world.after_change()
    running.run(2 * LEASE_S)
    assert running.keeper.stopped_by is None
    running.world.before_change()
    running.node.sleep(-1)
    running.world.after_change()
    running.run(1.5)
    assert running.keeper.stopped_by == "lease"


def test_a_stopped_trainer_holds_up_the_others_and_its_node_answers(running: Running) -> None:
    assert running.keeper.program is not None
    running.world.before_change()
    running.keeper.program.stopped += 1
    running.world.after_change()
    before = running.iteration()
    running.run(30.0)
    assert running.iteration() == before
    assert running.connection.contact
    assert running.keeper.stopped_by is None


def test_a_command_that_comes_while_a_node_is_away_waits_for_its_return(running: Running) -> None:
    running.change(cut_to=1, cut_from=1)
    running.connection.send_command(1, END)
    running.run(KEEPALIVE_S + 1.0)
    assert running.keeper.stopped_by is None
    running.change(cut_to=0, cut_from=0)
    running.run(5.0)
    assert running.keeper.stopped_by == "end"


def test_a_node_without_power_leaves_no_record_and_comes_back_as_another(running: Running) -> None:
    boot_id = running.node.boot_id
    running.world.before_change()
    power_off(running.world, running.node)
    running.world.after_change()
    running.run(20.0)
    running.world.before_change()
    power_on(running.world, running.node)
    running.world.after_change()
    running.run(10.0)
    seen = running.connection.seen[1]
    assert (seen.record, seen.vanished, seen.restarted) == (None, True, True)
    assert running.node.boot_id != boot_id


def test_a_state_is_there_with_its_manifest_only(running: Running) -> None:
    writer = running.world.members[0]
    while not any(not state.complete for state in writer.states):
        running.run(0.1)
        running.world.before_change()
    (torn,) = (state for state in writer.states if not state.complete)
    power_off(running.world, writer)
    running.run(5.0)
    assert not torn.complete
    assert running.attempt._resume_point().iteration < torn.iteration or running.attempt.number == 1


def test_a_fenced_attempt_starts_no_rank(running: Running) -> None:
    running.connection.request_processes()
    running.run(1.0)
    assert running.connection.processes
    running.connection.request_processes()
    running.run(1.0)
    assert running.connection.processes == ()
    del running.attempt.keepers[1]
    assert running.attempt.start_rank(1) == 127


def test_what_a_full_disk_has_not_taken_is_lost_with_the_supervisor(running: Running) -> None:
    disk = running.world.disk
    disk.full = 1
    before = len(disk.journal())
    disk.append(events.Note(message="not on the disk"))
    assert len(disk.journal()) == before
    running.world.kill_head(1.0)
    disk.full = 0
    disk.append(events.Note(message="on the disk"))
    assert len(disk.journal()) == before + 1


@pytest.mark.parametrize("number", range(20))
def test_a_history_is_the_same_every_time(number: int) -> None:
    scenario = draw(7, number)
    assert Scenario.from_json(scenario.to_json()) == scenario
    first, second = simulate(scenario), simulate(scenario)
    assert (first.state, first.steps, first.virtual_s) == (second.state, second.steps, second.virtual_s)
