"""The stages of a stop, on a clock of the test's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from engine.runs.plan_file import PlannedRank
from engine.supervision.abort import RESCUE_BYTES_PER_S, SILENT_S, UNCONFIRMED_S, Graces, Rescue, Stage, Stop
from engine.supervision.links.base import LinkState
from engine.supervision.links.links import Links
from engine.supervision.links.local import LocalLink
from engine.supervision.ranks import Ranks
from engine.worker.processes import Process
from engine.worker.wire import ExitRecord, NodeFiles, write_atomic

GRACES = Graces(stop_s=2.5, save_s=30.0, term_s=0.8)
NOBODY = 2**22 + 7
"""A pid above Linux's highest: a signal to it reaches nobody."""


class Host(LocalLink):
    """A host whose processes and whose silence are the test's word."""

    def __init__(self, files: NodeFiles, ranks: Sequence[int], left: Sequence[Process]) -> None:
        super().__init__(files, "nonce", ranks, [f"n{rank}" for rank in ranks])
        self.there = list(left)
        self.come_back()

    def fall_silent(self, seconds: float = 60.0) -> None:
        self.state = LinkState(connected=False, silent_s=seconds, heard=True, problem="no route")

    def come_back(self) -> None:
        self.state = LinkState(connected=True, silent_s=0.0, heard=True)

    def ask_left(self, *, kill: bool) -> None:
        self._left = list(self.there) if self.state.connected else None


class Ending:
    """A stop of two ranks whose keepers are the test itself."""

    def __init__(
        self,
        directory: Path,
        *,
        cooperative: bool = True,
        left: Sequence[Process] = (),
        rescue: Rescue | None = None,
    ) -> None:
        self.files = NodeFiles(directory)
        for rank in (0, 1):
            os.mkfifo(self.files.control(rank))
        self.hosts = [Host(self.files, [rank], left if rank == 0 else ()) for rank in (0, 1)]
        links = Links(self.hosts)
        self.ranks = Ranks(links, [PlannedRank(rank=rank, node=f"n{rank}", host="h") for rank in (0, 1)])
        self.saving = False
        self.stages: list[Stage] = []
        self.now = 100.0
        self.stop = Stop(
            self.ranks,
            links,
            None,
            GRACES,
            cooperative=cooperative,
            on_stage=lambda stage, _proofs: self.stages.append(stage),
            saving=lambda: self.saving,
            rescue=rescue,
        )

    def advance(self, seconds: float) -> list[Stage]:
        """Let time pass in ticks; the stages so far."""
        for _ in range(round(seconds * 10)):
            self.stop.advance(self.now)
            self.now += 0.1
        return self.stages

    def exit(self, *ranks: int) -> None:
        for rank in ranks:
            write_atomic(self.files.exit(rank), json.dumps(asdict(ExitRecord(rank, 1, 0, None, 0.0, 0))))
        self.ranks.look(thorough=False)

    def heard(self, rank: int) -> bytes:
        fifo = os.open(self.files.control(rank), os.O_RDWR | os.O_NONBLOCK)
        try:
            return os.read(fifo, 4096)
        except BlockingIOError:
            return b""
        finally:
            os.close(fifo)


def test_keepers_are_asked_once_and_proof_follows_the_last_record(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    assert ending.advance(1.0) == [Stage.STOP]
    assert (ending.heard(0), ending.heard(1)) == (b"stop\n", b"stop\n")
    ending.exit(0)
    assert ending.advance(0.5) == [Stage.STOP]
    ending.exit(1)
    assert ending.advance(0.5) == [Stage.STOP, Stage.VERIFYING, Stage.STOPPED]
    assert ending.stop.done


def test_now_leaves_out_the_cooperative_stop(tmp_path: Path) -> None:
    ending = Ending(tmp_path, cooperative=False)
    assert ending.advance(0.1) == [Stage.TERM]
    assert ending.heard(0) == b"end\n"


def test_hurry_cuts_a_cooperative_stop_short(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.advance(0.5)
    ending.stop.hurry()
    assert ending.advance(0.1) == [Stage.STOP, Stage.TERM]


def test_keepers_that_do_not_answer_are_killed_within_five_seconds(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    stages = ending.advance(4.5)
    assert stages == [Stage.STOP, Stage.KILL, Stage.STOPPED]


def test_a_rank_that_saves_is_waited_for(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.saving = True
    assert ending.advance(20.0) == [Stage.STOP]
    ending.saving = False
    assert ending.advance(5.0)[1] is Stage.KILL


def test_saving_is_waited_for_within_its_own_grace_only(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.saving = True
    assert ending.advance(32.0)[1] is Stage.KILL


def test_what_outlives_every_kill_is_unconfirmed_and_named(tmp_path: Path) -> None:
    ending = Ending(tmp_path, left=[Process(NOBODY, "stuck in the kernel")])
    ending.exit(0, 1)
    assert ending.advance(UNCONFIRMED_S - 1) == [Stage.VERIFYING]
    assert ending.advance(2) == [Stage.VERIFYING, Stage.UNCONFIRMED]
    assert ending.stop.proofs[0].left == [Process(NOBODY, "stuck in the kernel")]
    assert [proof.found for proof in ending.stop.proofs] == [False, True]


def test_nothing_is_stopped_while_something_is_left(tmp_path: Path) -> None:
    ending = Ending(tmp_path, left=[Process(NOBODY, "slow")])
    ending.exit(0, 1)
    ending.advance(2.0)
    ending.hosts[0].there.clear()
    assert ending.advance(0.2) == [Stage.VERIFYING, Stage.STOPPED]


def test_a_host_that_does_not_answer_holds_up_none_of_the_others(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.hosts[1].fall_silent()
    assert ending.advance(1.0) == [Stage.STOP]
    ending.exit(0)
    assert ending.advance(1.0) == [Stage.STOP, Stage.VERIFYING]
    assert [proof.found for proof in ending.stop.proofs] == [True, False]
    assert ending.advance(SILENT_S) == [Stage.STOP, Stage.VERIFYING, Stage.UNCONFIRMED]
    assert [proof.found for proof in ending.stop.proofs] == [True, False]


def test_a_host_that_answers_again_in_time_is_proved_too(tmp_path: Path) -> None:
    ending = Ending(tmp_path, cooperative=False)
    ending.hosts[1].fall_silent()
    ending.exit(0, 1)
    ending.advance(SILENT_S - 2.0)
    ending.hosts[1].come_back()
    assert ending.advance(1.5) == [Stage.VERIFYING, Stage.STOPPED]


def test_a_host_that_falls_silent_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.advance(0.5)
    ending.hosts[1].fall_silent()
    ending.exit(0)
    assert ending.advance(0.2) == [Stage.STOP, Stage.VERIFYING]


def test_a_moment_of_silence_does_not_cut_a_last_checkpoint_short(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    ending.saving = True
    for host in ending.hosts:
        host.fall_silent(5.0)
    assert ending.advance(1.0) == [Stage.STOP]
    ending.hosts[0].come_back()
    ending.exit(0)
    assert ending.advance(1.0) == [Stage.STOP], "rank 1 may be writing it"
    ending.hosts[1].come_back()
    ending.exit(1)
    assert ending.advance(0.5) == [Stage.STOP, Stage.VERIFYING, Stage.STOPPED]


def words(ending: Ending, rank: int) -> bytes:
    """What has been said to a keeper."""
    fifo = os.open(ending.files.control(rank), os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(fifo, 4096)
    finally:
        os.close(fifo)


def rescuing(directory: Path, culprit: int | None, told: dict[int, str], sizes: Mapping[int, int] = {}) -> Ending:
    return Ending(directory, cooperative=False, rescue=Rescue(culprit, told, 2.5, sizes))


def test_before_a_restart_the_culprit_is_ended_and_the_others_are_asked_for_their_state(tmp_path: Path) -> None:
    ending = rescuing(tmp_path, 1, {})
    assert ending.advance(0.2) == [Stage.RESCUE]
    assert (words(ending, 0), words(ending, 1)) == (b"rescue\n", b"end\n")
    ending.exit(0, 1)
    assert ending.advance(0.5) == [Stage.RESCUE, Stage.VERIFYING, Stage.STOPPED]


def test_a_trainer_that_writes_has_the_time_of_a_save_and_one_that_does_not_begin_has_not(tmp_path: Path) -> None:
    told: dict[int, str] = {}
    ending = rescuing(tmp_path, 1, told)
    assert ending.advance(2.4) == [Stage.RESCUE]
    told[0] = "begin"
    assert ending.advance(20.0) == [Stage.RESCUE]
    told[0] = "committed"
    assert ending.advance(0.5) == [Stage.RESCUE], "it is on its way out"
    assert ending.advance(1.0) == [Stage.RESCUE, Stage.TERM]


def test_a_large_state_has_its_time_beyond_that_of_a_save(tmp_path: Path) -> None:
    ending = rescuing(tmp_path, 1, {0: "begin"}, {0: int(20 * RESCUE_BYTES_PER_S)})
    assert ending.advance(GRACES.save_s + 19.5) == [Stage.RESCUE]
    assert ending.advance(1.0) == [Stage.RESCUE, Stage.TERM]


def test_a_trainer_that_is_deaf_is_not_waited_for(tmp_path: Path) -> None:
    assert rescuing(tmp_path, None, {}).advance(2.8) == [Stage.RESCUE, Stage.TERM]


def test_hurry_cuts_a_rescue_short(tmp_path: Path) -> None:
    ending = rescuing(tmp_path, 1, {0: "begin"})
    ending.advance(0.5)
    ending.stop.hurry()
    assert ending.advance(0.2) == [Stage.RESCUE, Stage.TERM]
