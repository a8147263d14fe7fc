"""The stages of a stop, on a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.cluster.host_connection import ConnectionState
from engine.config.models import RecoveryConfig
from engine.node.processes import Process
from engine.protocol.attempt import ExitRecord, NodeFiles, write_atomic
from engine.run.events import StopStage
from engine.run.progress import AttemptProgress
from engine.run.ranks import HostConnections, Ranks
from engine.run.shutdown import (
    CHECKPOINT_BYTES_PER_S,
    SILENT_S,
    UNCONFIRMED_S,
    Shutdown,
    StopPlan,
)
from tests.machine import NOBODY
from tests.unit.run.file_host import FileHost

GRACES = RecoveryConfig(stop_grace_s=2.5, save_grace_s=30.0, term_grace_s=0.8)


class FakeHost(FileHost):
    """A host whose processes and silence the test sets."""

    def __init__(self, files: NodeFiles, ranks: Sequence[int], left: Sequence[Process]) -> None:
        super().__init__(files, ranks, [f"n{rank}" for rank in ranks])
        self.there = list(left)

    def fall_silent(self, seconds: float = 60.0) -> None:
        self.shown = ConnectionState(silent_s=seconds, answered=True, problem="no route")

    def come_back(self) -> None:
        self.shown = ConnectionState(silent_s=0.0, answered=True)

    def request_processes(self, *, kill: bool) -> None:
        self.left = list(self.there) if self.state.problem is None else None


class Ending:
    """A stop of two ranks whose keepers are the test itself."""

    def __init__(
        self,
        directory: Path,
        *,
        cooperative: bool = True,
        left: Sequence[Process] = (),
        save_state: bool = False,
        first_failure: int | None = None,
    ) -> None:
        self.files = NodeFiles(directory)
        self.hosts = [FakeHost(self.files, [rank], left if rank == 0 else ()) for rank in (0, 1)]
        self.ranks = Ranks(HostConnections(self.hosts), ["n0", "n1"])
        self.progress = AttemptProgress()
        self.stages: list[StopStage] = []
        self.now = 100.0
        self.stop = Shutdown(
            self.ranks,
            None,
            StopPlan(GRACES, self.progress, cooperative, save_state, first_failure),
            self.stages.append,
        )

    def save(self, saving: bool) -> None:
        """Rank 1 begins to save, or goes on."""
        self.progress.phases[1] = "saving" if saving else "training"

    def advance(self, seconds: float) -> list[StopStage]:
        """Let time pass in ticks; the stages so far."""
        for _ in range(round(seconds * 10)):
            self.stop.advance(self.now)
            self.now += 0.1
        return self.stages

    def exit(self, *ranks: int) -> None:
        for rank in ranks:
            write_atomic(self.files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, 0, None, 0.0, 0))))
        self.ranks.poll()

    def received(self, rank: int) -> bytes:
        """The commands that its keeper was sent."""
        return b"".join(command for _, command in self.hosts[rank].commands)


def test_keepers_get_one_stop_and_proof_follows_the_last_record(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    assert ending.advance(1.0) == [StopStage.STOP]
    assert (ending.received(0), ending.received(1)) == (b"stop\n", b"stop\n")
    ending.exit(0)
    assert ending.advance(0.5) == [StopStage.STOP]
    ending.exit(1)
    assert ending.advance(0.5) == [StopStage.STOP, StopStage.VERIFYING, StopStage.STOPPED]
    assert ending.stop.done


def test_now_leaves_out_the_cooperative_stop(tmp_path: Path) -> None:
    ending = Ending(tmp_path, cooperative=False)
    assert ending.advance(0.1) == [StopStage.TERM]
    assert ending.received(0) == b"end\n"


def test_skipping_the_grace_cuts_a_cooperative_stop_short(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.advance(0.5)
    ending.stop.skip_grace()
    assert ending.advance(0.1) == [StopStage.STOP, StopStage.TERM]


def test_keepers_that_do_not_answer_are_killed_within_five_seconds(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    stages = ending.advance(4.5)
    assert stages == [StopStage.STOP, StopStage.KILL, StopStage.STOPPED]


def test_a_rank_that_saves_is_waited_for(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.save(True)
    assert ending.advance(20.0) == [StopStage.STOP]
    ending.save(False)
    assert ending.advance(5.0)[1] is StopStage.KILL


def test_saving_is_waited_for_within_its_own_grace_only(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.save(True)
    assert ending.advance(32.0)[1] is StopStage.KILL


def test_what_outlives_every_kill_is_unconfirmed_and_named(tmp_path: Path) -> None:
    ending = Ending(tmp_path, left=[Process(NOBODY, "stuck in the kernel")])
    ending.exit(0, 1)
    assert ending.advance(UNCONFIRMED_S - 1) == [StopStage.VERIFYING]
    assert ending.advance(2) == [StopStage.VERIFYING, StopStage.UNCONFIRMED]
    assert ending.stop.proofs[0].left == [Process(NOBODY, "stuck in the kernel")]
    assert [proof.found for proof in ending.stop.proofs] == [False, True]


def test_nothing_is_stopped_while_something_is_left(tmp_path: Path) -> None:
    ending = Ending(tmp_path, left=[Process(NOBODY, "slow")])
    ending.exit(0, 1)
    ending.advance(2.0)
    ending.hosts[0].there.clear()
    assert ending.advance(0.2) == [StopStage.VERIFYING, StopStage.STOPPED]


def test_a_host_that_does_not_answer_holds_up_none_of_the_others(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.hosts[1].fall_silent()
    assert ending.advance(1.0) == [StopStage.STOP]
    ending.exit(0)
    assert ending.advance(1.0) == [StopStage.STOP, StopStage.VERIFYING]
    assert [proof.found for proof in ending.stop.proofs] == [True, False]
    assert ending.advance(SILENT_S) == [StopStage.STOP, StopStage.VERIFYING, StopStage.UNCONFIRMED]
    assert [proof.found for proof in ending.stop.proofs] == [True, False]


def test_a_host_that_answers_again_in_time_is_proved_too(tmp_path: Path) -> None:
    ending = Ending(tmp_path, cooperative=False)
    ending.hosts[1].fall_silent()
    ending.exit(0, 1)
    ending.advance(SILENT_S - 2.0)
    ending.hosts[1].come_back()
    assert ending.advance(1.5) == [StopStage.VERIFYING, StopStage.STOPPED]


def test_a_host_that_falls_silent_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.advance(0.5)
    ending.hosts[1].fall_silent()
    ending.exit(0)
    assert ending.advance(0.2) == [StopStage.STOP, StopStage.VERIFYING]


def test_a_moment_of_silence_does_not_cut_a_last_checkpoint_short(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.save(True)
    for host in ending.hosts:
        host.fall_silent(5.0)
    assert ending.advance(1.0) == [StopStage.STOP]
    ending.hosts[0].come_back()
    ending.exit(0)
    assert ending.advance(1.0) == [StopStage.STOP], "rank 1 may be writing it"
    ending.hosts[1].come_back()
    ending.exit(1)
    assert ending.advance(0.5) == [StopStage.STOP, StopStage.VERIFYING, StopStage.STOPPED]


def saving(directory: Path, first_failure: int | None, phases: dict[int, str], sizes: Mapping[int, int] = {}) -> Ending:
    ending = Ending(directory, cooperative=False, save_state=True, first_failure=first_failure)
    ending.progress.checkpoint_phases = phases
    ending.progress.checkpoint_bytes.update(sizes)
    return ending


def test_before_a_restart_the_first_failure_is_ended_and_the_others_save_their_state(tmp_path: Path) -> None:
    ending = saving(tmp_path, 1, {})
    assert ending.advance(0.2) == [StopStage.EMERGENCY_CHECKPOINT]
    assert (ending.received(0), ending.received(1)) == (b"emergency_checkpoint\n", b"end\n")
    ending.exit(0, 1)
    assert ending.advance(0.5) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.VERIFYING, StopStage.STOPPED]


def test_a_trainer_that_writes_has_the_time_of_a_save_and_one_that_does_not_begin_has_not(tmp_path: Path) -> None:
    phases: dict[int, str] = {}
    ending = saving(tmp_path, 1, phases)
    assert ending.advance(2.4) == [StopStage.EMERGENCY_CHECKPOINT]
    phases[0] = "begin"
    assert ending.advance(20.0) == [StopStage.EMERGENCY_CHECKPOINT]
    phases[0] = "committed"
    assert ending.advance(0.5) == [StopStage.EMERGENCY_CHECKPOINT], "it is on its way out"
    assert ending.advance(1.0) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_a_large_state_has_its_time_beyond_that_of_a_save(tmp_path: Path) -> None:
    ending = saving(tmp_path, 1, {0: "begin"}, {0: int(20 * CHECKPOINT_BYTES_PER_S)})
    assert ending.advance(GRACES.save_grace_s + 19.5) == [StopStage.EMERGENCY_CHECKPOINT]
    assert ending.advance(1.0) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_a_trainer_that_is_deaf_is_not_waited_for(tmp_path: Path) -> None:
    assert saving(tmp_path, None, {}).advance(2.8) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]


def test_skipping_the_grace_cuts_an_emergency_checkpoint_short(tmp_path: Path) -> None:
    ending = saving(tmp_path, 1, {0: "begin"})
    ending.advance(0.5)
    ending.stop.skip_grace()
    assert ending.advance(0.2) == [StopStage.EMERGENCY_CHECKPOINT, StopStage.TERM]
