"""The stages of a stop, on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from engine.config.models import RecoveryConfig
from engine.node.processes import Process
from engine.protocol.attempt import ExitRecord
from engine.run.effects import Effect, RequestProcesses, Send
from engine.run.events import StopStage
from engine.run.observation import HostView, Observation, RankView
from engine.run.shutdown import (
    CHECKPOINT_BYTES_PER_S,
    SILENT_S,
    UNCONFIRMED_S,
    AttemptView,
    StopPlan,
    advance,
    begin_shutdown,
    skip_grace,
)
from tests.machine import NOBODY
from tests.unit.run.run_maker import START

GRACES = RecoveryConfig(stop_grace_s=2.5, save_grace_s=30.0, term_grace_s=0.8)


class Ending:
    """A stop of two ranks, each on a host of its own, whose keepers and agents are the test itself."""

    def __init__(self, plan: StopPlan, left: Sequence[Process] = ()) -> None:
        """`left`: processes on the host of rank 0, which outlive every KILL."""
        self.there = {"0": list(left), "1": []}
        hosts = tuple(HostView(str(rank), (f"n{rank}",), (rank,)) for rank in (0, 1))
        ranks = tuple(RankView(rank, f"n{rank}") for rank in (0, 1))
        self.seen = Observation(100.0, START, ranks=ranks, hosts=hosts)
        self.ended = frozenset[int]()
        self.stages: list[StopStage] = []
        self.effects: list[Effect] = []
        self.stop = begin_shutdown(plan, self.view)

    @property
    def view(self) -> AttemptView:
        return AttemptView(self.seen, self.ended, launched=False, recovery=GRACES)

    def progress(self, **changes: Mapping[int, object]) -> None:
        self.seen = replace(self.seen, progress=replace(self.seen.progress, **changes))  # type: ignore[arg-type]

    def save(self, saving: bool) -> None:
        """Rank 1 begins to save, or goes on."""
        self.progress(phases={1: "saving" if saving else "training"})

    def host(self, number: int, **changes: object) -> None:
        hosts = list(self.seen.hosts)
        hosts[number] = replace(hosts[number], **changes)  # type: ignore[arg-type]
        self.seen = replace(self.seen, hosts=tuple(hosts))

    def fall_silent(self, number: int, seconds: float = 60.0) -> None:
        self.host(number, silent_s=seconds, problem="no route")

    def come_back(self, number: int) -> None:
        self.host(number, silent_s=0.0, problem=None)

    def advance(self, seconds: float) -> list[StopStage]:
        """Let time pass in ticks; the stages so far."""
        for _ in range(round(seconds * 10)):
            self.stop, actions = advance(self.stop, self.view)
            for action in actions:
                if isinstance(action, StopStage):
                    self.stages.append(action)
                else:
                    self.effects.append(action)
                    self._answer(action)
            self.seen = replace(self.seen, now=self.seen.now + 0.1)
        return self.stages

    def _answer(self, effect: Effect) -> None:
        if isinstance(effect, RequestProcesses):
            number = int(effect.host)
            answers = self.seen.hosts[number].problem is None
            self.host(number, processes=tuple(self.there[effect.host]) if answers else None)

    def exit(self, *ranks: int) -> None:
        record = ExitRecord(0, 1, 0, None, 0.0, 0)
        views = tuple(replace(rank, record=record) if rank.number in ranks else rank for rank in self.seen.ranks)
        self.seen = replace(self.seen, ranks=views)
        self.ended |= set(ranks)

    def received(self, rank: int) -> bytes:
        """The commands that its keeper was sent."""
        sent = [effect for effect in self.effects if isinstance(effect, Send) and effect.rank == rank]
        return b"".join(effect.command for effect in sent)

    @property
    def proved(self) -> list[bool]:
        return [proof.found for proof in self.stop.proofs.values()]


COOPERATIVE = StopPlan(cooperative=True)


def test_keepers_get_one_stop_and_proof_follows_the_last_record() -> None:
    ending = Ending(COOPERATIVE)
    assert ending.advance(1.0) == [StopStage.STOP]
    assert (ending.received(0), ending.received(1)) == (b"stop\n", b"stop\n")
    ending.exit(0)
    assert ending.advance(0.5) == [StopStage.STOP]
    ending.exit(1)
    assert ending.advance(0.5) == [StopStage.STOP, StopStage.VERIFYING, StopStage.STOPPED]
    assert ending.stop.done


def test_now_leaves_out_the_cooperative_stop() -> None:
    ending = Ending(StopPlan())
    assert ending.advance(0.1) == [StopStage.TERM]
    assert ending.received(0) == b"end\n"


def test_skipping_the_grace_cuts_a_cooperative_stop_short() -> None:
    ending = Ending(COOPERATIVE)
    ending.advance(0.5)
    ending.stop = skip_grace(ending.stop)
    assert ending.advance(0.1) == [StopStage.STOP, StopStage.TERM]


def test_keepers_that_do_not_answer_are_killed_within_five_seconds() -> None:
    ending = Ending(COOPERATIVE)
    stages = ending.advance(4.5)
    assert stages == [StopStage.STOP, StopStage.KILL, StopStage.STOPPED]


def test_a_rank_that_saves_is_waited_for() -> None:
    ending = Ending(COOPERATIVE)
    ending.save(True)
    assert ending.advance(20.0) == [StopStage.STOP]
    ending.save(False)
    assert ending.advance(5.0)[1] is StopStage.KILL


def test_saving_is_waited_for_within_its_own_grace_only() -> None:
    ending = Ending(COOPERATIVE)
    ending.save(True)
    assert ending.advance(32.0)[1] is StopStage.KILL


def test_what_outlives_every_kill_is_unconfirmed_and_named() -> None:
    ending = Ending(COOPERATIVE, left=[Process(NOBODY, "stuck in the kernel")])
    ending.exit(0, 1)
    assert ending.advance(UNCONFIRMED_S - 1) == [StopStage.VERIFYING]
    assert ending.advance(2) == [StopStage.VERIFYING, StopStage.UNCONFIRMED]
    assert ending.stop.proofs["0"].left == (Process(NOBODY, "stuck in the kernel"),)
    assert ending.proved == [False, True]


def test_nothing_is_stopped_while_something_is_left() -> None:
    ending = Ending(COOPERATIVE, left=[Process(NOBODY, "slow")])
    ending.exit(0, 1)
    ending.advance(2.0)
    ending.there["0"].clear()
    assert ending.advance(0.2) == [StopStage.VERIFYING, StopStage.STOPPED]


def test_a_host_that_does_not_answer_holds_up_none_of_the_others() -> None:
    ending = Ending(COOPERATIVE)
    ending.fall_silent(1)
    assert ending.advance(1.0) == [StopStage.STOP]
    ending.exit(0)
    assert ending.advance(1.0) == [StopStage.STOP, StopStage.VERIFYING]
    assert ending.proved == [True, False]
    assert ending.advance(SILENT_S) == [StopStage.STOP, StopStage.VERIFYING, StopStage.UNCONFIRMED]
    assert ending.proved == [True, False]


def test_a_host_that_answers_again_in_time_is_proved_too() -> None:
    ending = Ending(StopPlan())
    ending.fall_silent(1)
    ending.exit(0, 1)
    ending.advance(SILENT_S - 2.0)
    ending.come_back(1)
    assert ending.advance(1.5) == [StopStage.VERIFYING, StopStage.STOPPED]


def test_a_host_that_falls_silent_in_the_middle_is_not_waited_for() -> None:
    ending = Ending(COOPERATIVE)
    ending.advance(0.5)
    ending.fall_silent(1)
    ending.exit(0)
    assert ending.advance(0.2) == [StopStage.STOP, StopStage.VERIFYING]


def test_a_moment_of_silence_does_not_cut_a_last_checkpoint_short() -> None:
    ending = Ending(COOPERATIVE)
    ending.save(True)
    for number in (0, 1):
        ending.fall_silent(number, 5.0)
    assert ending.advance(1.0) == [StopStage.STOP]
    ending.come_back(0)
    ending.exit(0)
    assert ending.advance(1.0) == [StopStage.STOP], "rank 1 may be writing it"
    ending.come_back(1)
    ending.exit(1)
    assert ending.advance(0.5) == [StopStage.STOP, StopStage.VERIFYING, StopStage.STOPPED]


def saving(first_failure: int | None, phases: Mapping[int, str], sizes: Mapping[int, int] = {}) -> Ending:
    ending = Ending(StopPlan(save_state=True, first_failure=first_failure))
    ending.progress(checkpoint_phases=phases, checkpoint_bytes=sizes)
    return ending


def test_before_a_restart_the_first_failure_is_ended_and_the_others_save_their_state() -> None:
    ending = saving(1, {})
    assert ending.advance(0.2) == [StopStage.EMERGENCY_CHECKPOINT]
    assert (ending.received(0), ending.received(1)) == (b"emergency_checkpoint\n", b"end\n")
    ending.exit(0, 1)
    assert ending.advance(0.5) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.VERIFYING, StopStage.STOPPED]


def test_a_trainer_that_writes_has_the_time_of_a_save_and_one_that_does_not_begin_has_not() -> None:
    ending = saving(1, {})
    assert ending.advance(2.4) == [StopStage.EMERGENCY_CHECKPOINT]
    ending.progress(checkpoint_phases={0: "begin"})
    assert ending.advance(20.0) == [StopStage.EMERGENCY_CHECKPOINT]
    ending.progress(checkpoint_phases={0: "committed"})
    assert ending.advance(0.5) == [StopStage.EMERGENCY_CHECKPOINT], "it is on its way out"
    assert ending.advance(1.0) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_a_large_state_has_its_time_beyond_that_of_a_save() -> None:
    ending = saving(1, {0: "begin"}, {0: int(20 * CHECKPOINT_BYTES_PER_S)})
    assert ending.advance(GRACES.save_grace_s + 19.5) == [StopStage.EMERGENCY_CHECKPOINT]
    assert ending.advance(1.0) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_a_trainer_that_is_deaf_is_not_waited_for() -> None:
    assert saving(None, {}).advance(2.8) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_skipping_the_grace_cuts_an_emergency_checkpoint_short() -> None:
    ending = saving(1, {0: "begin"})
    ending.advance(0.5)
    ending.stop = skip_grace(ending.stop)
    assert ending.advance(0.2) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]
