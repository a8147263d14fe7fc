"""Verdicts: which rank failed first, why, and the cause as one line."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.failures.explanation import CAUSE_CHARACTERS
from engine.failures.signatures import BY_ID
from engine.job.kinds import JobKind, job_kind
from engine.models import Reason, RunState
from engine.protocol.attempt import ExitRecord
from engine.protocol.events import ExitOutput
from engine.protocol.job import Strategy
from engine.protocol.messages import Decoder, RankEnded, encode
from engine.run.events import Hang, StateChanged, Trigger, Verdict
from engine.run.failure_evidence import FailureEvidence, RankEvidence
from engine.run.journal import Journal, read_journal
from engine.run.verdict import is_consequence, verdict_on, with_cause
from engine.security.redact import Redactor
from engine.store.layout import LAUNCHER_SOURCE
from tests.data import DATA
from tests.unit.run.logs.run_logs import RunLogs

LOST = "Traceback (most recent call last):\n  File x\nRuntimeError: [ring] connection to a peer was lost\n"
COMPLETED = {"event": "end", "completed": True, "stopped": False, "iteration": 60}
NODES = ("left", "right", "third")


def rank(number: int, code: int | None = 0, sig: int | None = None, at: float = 0.0, **more: Any) -> RankEvidence:
    """A rank that has ended with a record; `stopped_by`, `error` and `asked_to_leave` go into the record."""
    fields = {key: more.pop(key) for key in ("stopped_by", "error", "asked_to_leave") if key in more}
    record = ExitRecord(number, 1, code if sig is None else None, sig, ended_at=at, log_bytes=0, **fields)
    done = code == 0 and sig is None and "stopped_by" not in fields
    more.setdefault("end", COMPLETED if done else None)
    return RankEvidence(number, NODES[number], "/py", started=True, record=record, **more)


def kind_of(*, trainer: bool, strategy: Strategy = "data") -> JobKind:
    return job_kind("mlx", strategy, command=not trainer, elastic=False)


def evidence(
    *ranks: RankEvidence, trigger: Trigger = Trigger.RANK, trainer: bool = True, **more: Any
) -> FailureEvidence:
    strategy: Strategy = "local" if any(rank.dispensable for rank in ranks) else "data"
    return FailureEvidence(ranks, trigger, kind_of(trainer=trainer, strategy=strategy), **more)


def test_all_records_0_and_all_completed_is_success() -> None:
    verdict = verdict_on(evidence(rank(0), rank(1), trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason, verdict.cause) == (RunState.SUCCEEDED, Reason.COMPLETED, None)


def test_a_run_that_stopped_early_is_complete_and_says_why() -> None:
    early = {**COMPLETED, "early": "stopped early at iteration 40:\x1b[31m no better"}
    verdict = verdict_on(evidence(rank(0, end=early), rank(1, end=early), trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
    assert verdict.cause == "stopped early at iteration 40: no better"


AWAY = RankEvidence(1, "right", "/py", started=True, unreachable_s=93.0, unreachable_why="no answer")


@pytest.mark.parametrize("trigger", Trigger)
@pytest.mark.parametrize("trainer", [True, False])
def test_a_run_is_completed_when_only_the_records_of_nodes_that_are_away_are_missing(
    trigger: Trigger, trainer: bool
) -> None:
    end = COMPLETED if trainer else None
    verdict = verdict_on(evidence(rank(0, end=end), AWAY, rank(2, end=end), trigger=trigger, trainer=trainer))
    assert (verdict.state, verdict.reason, verdict.rank) == (RunState.COMPLETED, Reason.COMPLETED, None)
    missing = "the exit record of rank 1 on right, silent for 93 s (no answer)"
    assert verdict.cause == f"every rank that answers has completed; not known yet is {missing}"
    assert verdict.fix is not None and "right can be reached" in verdict.fix


def test_a_run_is_not_completed_when_nobody_has_completed_and_rank_0_is_away() -> None:
    """Strategy local: the others, without which it could go on, have left without their end."""
    others = (rank(1, 1, dispensable=True), rank(2, sig=signal.SIGKILL, dispensable=True))
    verdict = verdict_on(evidence(replace(AWAY, rank=0), *others, trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason) == (RunState.FAILED, Reason.NODE_LOST)


def test_the_adapters_are_where_rank_0_is() -> None:
    away = replace(AWAY, rank=0, node="left")
    cause = verdict_on(evidence(away, rank(1), trigger=Trigger.ENDED)).cause or ""
    assert cause.endswith("; the adapters are on its node, too")


@pytest.mark.parametrize(
    "other",
    [
        replace(AWAY, vanished=True),
        replace(AWAY, unreachable_s=None),
        rank(1, 1),
        rank(1, sig=signal.SIGKILL),
        rank(1, stopped_by="lease"),
    ],
)
def test_a_rank_that_is_known_not_to_have_completed_makes_it_a_failure(other: RankEvidence) -> None:
    assert verdict_on(evidence(rank(0), other, trigger=Trigger.ENDED)).state is not RunState.COMPLETED


def test_nothing_is_completed_when_no_rank_is_known_to_have_completed() -> None:
    verdict = verdict_on(evidence(replace(AWAY, rank=0, node="left"), AWAY, trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason) == (RunState.FAILED, Reason.NODE_LOST)


@pytest.mark.parametrize("stopped_by", ["lease", "stop", "end", "signal TERM"])
def test_a_trainer_that_has_completed_has_done_so_whatever_its_keeper_was_told_meanwhile(stopped_by: str) -> None:
    ranks = (rank(0, end=COMPLETED, stopped_by=stopped_by), rank(1, end=COMPLETED, stopped_by=stopped_by))
    assert verdict_on(evidence(*ranks, trigger=Trigger.ENDED)).state is RunState.SUCCEEDED
    commands = verdict_on(evidence(*ranks, trigger=Trigger.ENDED, trainer=False))
    assert commands.state is not RunState.SUCCEEDED


_LOST_BY_NCCL = "NCCL error nccl.cpp:370 'remote process exited or there was a network error'"


@pytest.mark.parametrize(
    ("why", "signature"),
    [
        ("CUDA error nccl.cpp:287 'uncorrectable ECC error encountered'", "cuda.ecc"),
        ("NCCL error nccl.cpp:264 'unhandled system error (run with NCCL_DEBUG=INFO for details)'", "nccl.mlx"),
    ],
)
@pytest.mark.parametrize("survivor", [{"code": 5, "left_for_peers": True}, {"code": 1, "tail": _LOST_BY_NCCL}])
def test_a_rank_that_nccl_has_ended_without_an_exception_failed_before_those_that_lost_it(
    why: str, signature: str, survivor: dict[str, Any], tmp_path: Path
) -> None:
    """MLX calls exit(1) (mlx/distributed/nccl/nccl.cpp). The others wait for it until the head has them save and leave,
    or NCCL notices."""
    found = evidence(rank(0, at=1.0, **survivor), rank(1, 1, at=2.0, tail=why))
    logs = RunLogs(tmp_path)
    logs.write(1, why + "\n")
    verdict = with_cause(verdict_on(found), found, logs.run_dir, {}, Redactor(environment={}))
    assert (verdict.rank, verdict.signature) == (1, signature)


@pytest.mark.parametrize("end", [COMPLETED, None])
def test_a_keeper_that_is_gone_does_not_take_the_trainers_own_word_with_it(end: dict[str, Any] | None) -> None:
    gone = RankEvidence(1, "right", "/py", started=True, vanished=True, end=end)
    verdict = verdict_on(evidence(rank(0), gone, trigger=Trigger.ENDED))
    assert verdict.state is (RunState.SUCCEEDED if end else RunState.FAILED)
    assert verdict_on(evidence(rank(0), gone, trigger=Trigger.ENDED, trainer=False)).state is RunState.FAILED
    killed = rank(1, sig=signal.SIGTERM, stopped_by="end", end=end)
    assert verdict_on(evidence(rank(0), killed, trigger=Trigger.ENDED)).state is verdict.state, "ended while it left"


@pytest.mark.parametrize("end", [None, {"completed": False, "stopped": False, "iteration": 7}])
def test_a_trainer_that_has_not_completed_is_no_success_though_it_exits_0(end: dict[str, Any] | None) -> None:
    verdict = verdict_on(evidence(rank(0), rank(1, end=end), trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason, verdict.rank, verdict.host) == (
        RunState.FAILED,
        Reason.RANK_FAILED,
        1,
        "right",
    )


@pytest.mark.parametrize(
    "lost",
    [
        rank(1, sig=signal.SIGKILL, dispensable=True),
        rank(1, 5, stopped_by="end", dispensable=True),
        RankEvidence(1, "right", "/py", started=True, unreachable_s=20.0, dispensable=True),
    ],
)
def test_a_training_that_completed_without_a_rank_that_it_can_do_without_is_a_success(lost: RankEvidence) -> None:
    early = {**COMPLETED, "early": "stopped early at iteration 40"}
    verdict = verdict_on(evidence(rank(0, end=early), lost, rank(2, dispensable=True), trigger=Trigger.ENDED))
    assert (verdict.state, verdict.reason) == (RunState.SUCCEEDED, Reason.COMPLETED)
    without = "rank 1 on right did not complete: the others went on without it"
    assert verdict.cause == f"stopped early at iteration 40; {without}"


def test_a_failure_that_is_seen_before_the_success_of_rank_0_takes_nothing_from_it() -> None:
    """Strategy local: until its first step was seen, no rank could be lost."""
    own = rank(1, 3, tail="KeyError: 7")
    verdict = verdict_on(replace(evidence(rank(0), own), kind=kind_of(trainer=True, strategy="local")))
    assert (verdict.state, verdict.cause) == (
        RunState.SUCCEEDED,
        "rank 1 on right did not complete: the others went on without it",
    )


def test_many_ranks_that_did_not_complete_are_one_short_phrase() -> None:
    def verdict_of(world: int) -> Verdict:
        lost = (replace(rank(1, 5, dispensable=True), rank=number) for number in range(1, world))
        return verdict_on(evidence(rank(0), *lost, trigger=Trigger.ENDED))

    assert verdict_of(4).cause == "ranks 1, 2, 3 did not complete: the others went on without them"
    assert len(verdict_of(1000).cause or "") == CAUSE_CHARACTERS


def test_a_rank_that_the_others_went_on_without_is_not_blamed_for_their_end() -> None:
    ranks = (rank(0, sig=signal.SIGKILL, at=9.0), rank(1, 1, at=1.0, tail="ValueError: no\n", dispensable=True))
    verdict = verdict_on(evidence(*ranks))
    assert (verdict.state, verdict.reason, verdict.rank) == (RunState.FAILED, Reason.RANK_KILLED, 0)
    aborted = verdict_on(evidence(rank(0, stopped_by="stop"), ranks[1], trigger=Trigger.ABORT))
    assert aborted.state is RunState.ABORTED


def test_a_command_needs_no_end_event() -> None:
    ranks = (rank(0, end=None), rank(1, end=None))
    assert verdict_on(evidence(*ranks, trigger=Trigger.ENDED, trainer=False)).state is RunState.SUCCEEDED


def test_an_abort_that_came_when_every_rank_had_completed_changed_nothing() -> None:
    assert verdict_on(evidence(rank(0), rank(1), trigger=Trigger.ABORT)).state is RunState.SUCCEEDED
    stopped = evidence(rank(0), rank(1, stopped_by="stop"), trigger=Trigger.ABORT)
    assert verdict_on(stopped).state is RunState.ABORTED


def test_an_abort_is_aborted_however_the_ranks_ended() -> None:
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), rank(1, sig=9), trigger=Trigger.ABORT))
    assert (verdict.state, verdict.reason, verdict.rank) == (RunState.ABORTED, Reason.USER_ABORT, None)


def test_the_rank_that_died_is_blamed_and_not_the_one_that_lost_it_first_by_the_clock() -> None:
    verdict = verdict_on(evidence(rank(0, 1, at=1.0, tail=LOST), rank(1, sig=signal.SIGKILL, at=1.7)))
    assert (verdict.reason, verdict.rank, verdict.host, verdict.signal) == (Reason.RANK_KILLED, 1, "right", 9)
    assert verdict.cause == "killed by SIGKILL (signal 9)"


def test_of_two_own_failures_the_first_counts() -> None:
    ranks = (rank(0, 3, at=2.0, tail="KeyError: 7\n"), rank(1, 4, at=1.0, tail="ValueError: no\n"))
    verdict = verdict_on(evidence(*ranks))
    assert (verdict.rank, verdict.exit_code, verdict.cause) == (1, 4, "exited with code 4: ValueError: no")


@pytest.mark.parametrize("stopped_by", ["end", "stop", "signal TERM"])
def test_a_rank_ended_by_us_or_the_launcher_is_a_consequence(stopped_by: str) -> None:
    ended = rank(0, sig=15, at=0.5, stopped_by=stopped_by)
    assert is_consequence(ended)
    verdict = verdict_on(evidence(ended, rank(1, 3, at=1.0)))
    assert (verdict.rank, verdict.cause) == (1, "exited with code 3 without output")


def test_a_failure_that_was_reported_before_the_end_is_still_one() -> None:
    failure = {"error_type": "JobError", "message": "no train.jsonl"}
    ranks = (
        rank(0, 5, failure={"error_type": "PeerLost", "message": "x"}),
        rank(1, 1, stopped_by="end", failure=failure),
    )
    verdict = verdict_on(evidence(*ranks))
    assert (verdict.rank, verdict.cause) == (1, "exited with code 1: JobError: no train.jsonl")


def test_when_all_have_only_lost_their_peers_the_first_is_named() -> None:
    verdict = verdict_on(evidence(rank(0, 1, at=2.0, tail=LOST), rank(1, 1, at=1.0, tail=LOST)))
    assert (verdict.state, verdict.rank, verdict.reason) == (RunState.FAILED, 1, Reason.RANK_FAILED)


def test_an_early_0_is_blamed_when_others_lost_their_peer() -> None:
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), rank(1, 0, end=None), trainer=False))
    assert (verdict.rank, verdict.exit_code, verdict.reason) == (1, 0, Reason.RANK_FAILED)


def test_a_command_that_succeeded_is_not_blamed_for_the_launchers_end() -> None:
    ranks = (rank(0, 0), rank(1, sig=15, stopped_by="end"))
    verdict = verdict_on(evidence(*ranks, trainer=False, trigger=Trigger.LAUNCHER_GONE))
    assert (verdict.reason, verdict.rank) == (Reason.LAUNCH_FAILED, None)


def test_a_missing_interpreter_is_known_by_the_launchers_127() -> None:
    missing = RankEvidence(1, "right", "/no/python", launcher_code=127)
    verdict = verdict_on(evidence(rank(0, sig=15, stopped_by="signal TERM"), missing))
    assert (verdict.reason, verdict.rank, verdict.exit_code) == (Reason.LAUNCH_FAILED, 1, 127)
    assert verdict.cause == "the interpreter /no/python is missing on right"


def test_a_rank_that_the_launcher_ended_before_its_keeper_came_is_no_cause() -> None:
    early = RankEvidence(0, "left", "/py", launcher_code=-15)
    assert verdict_on(evidence(early, rank(1, 127, error="no such file: prog"))).cause == "no such file: prog"


def test_a_busy_port_is_named_with_its_holder() -> None:
    tail = "RuntimeError: [ring] Couldn't bind socket (error: 98)\n"
    bound = rank(1, 1, tail=tail, port="port 21001 is in use by pid 5 (x)")
    waiting = rank(0, 1, at=-1.0, tail="RuntimeError: [ring] Couldn't connect (error: 111)\n")
    verdict = verdict_on(evidence(waiting, bound))
    assert (verdict.reason, verdict.rank, verdict.cause) == (
        Reason.LAUNCH_FAILED,
        1,
        "port 21001 is in use by pid 5 (x)",
    )
    foreign = replace(bound, tail=tail.replace("98", "49"))
    assert "not one of right" in (verdict_on(evidence(waiting, foreign)).cause or "")


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        ("MemoryError\n", Reason.OUT_OF_MEMORY),
        ("RuntimeError: [metal::malloc] Attempting to allocate 9 bytes\n", Reason.OUT_OF_MEMORY),
        ("OSError: [Errno 28] No space left on device\n", Reason.DISK_FULL),
        ("out of memory\n" + "a line\n" * 40 + "ValueError: x\n", Reason.RANK_FAILED),
    ],
)
def test_memory_and_disk_are_found_in_the_last_lines(tail: str, reason: Reason) -> None:
    assert verdict_on(evidence(rank(0), rank(1, 1, tail=tail))).reason is reason


def test_a_kill_is_for_memory_only_with_evidence() -> None:
    killed = rank(1, sig=signal.SIGKILL)
    assert verdict_on(evidence(rank(0), killed)).reason is Reason.RANK_KILLED
    assert verdict_on(evidence(rank(0), replace(killed, memory_killed=True))).reason is Reason.OUT_OF_MEMORY


def test_divergence_is_reported_by_the_trainer() -> None:
    failure = {"error_type": "Diverged", "message": "the loss is NaN at iteration 12"}
    verdict = verdict_on(evidence(rank(0, 4, failure=failure), rank(1, 4, at=1.0, failure=failure)))
    assert (verdict.reason, verdict.rank, verdict.cause) == (
        Reason.DIVERGED,
        0,
        "Diverged: the loss is NaN at iteration 12",
    )


def test_the_one_rank_without_a_record_is_named_where_all_others_have_lost_it() -> None:
    left: dict[str, Any] = {"code": 5, "left_for_peers": True}
    unseen = RankEvidence(1, "right", "/py", started=True)
    verdict = verdict_on(evidence(rank(0, **left), unseen, rank(2, **left)))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_FAILED, 1)
    assert verdict.cause is not None and "has shown no exit record" in verdict.cause
    assert verdict_on(evidence(rank(0, **left), unseen, over=False)).rank == 0, "its record may still come"
    third = replace(unseen, rank=2, node="third")
    several = verdict_on(evidence(rank(0, **left), unseen, third))
    assert (several.reason, several.rank) == (Reason.RANK_FAILED, None)
    assert several.cause == "a rank on one of right, third was lost: each has shown no exit record"
    stopped: dict[str, Any] = {"code": 0, "end": {"event": "end", "completed": False, "stopped": True, "iteration": 7}}
    together = verdict_on(
        evidence(rank(0, **stopped), replace(unseen, vanished=True, outlived=True), rank(2, **stopped))
    )
    assert (together.rank, together.cause) == (
        1,
        "the other ranks stopped with it, and its node has shown no exit record",
    )
    twice = verdict_on(evidence(rank(0, **left), unseen, replace(third, rank=3), third))
    assert twice.cause == several.cause, "each node once"


def test_a_keeper_that_vanished_is_a_killed_rank() -> None:
    gone = RankEvidence(1, "right", "/py", started=True, vanished=True)
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), gone))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_KILLED, 1)


def test_a_restarted_machine_loses_the_run() -> None:
    gone = RankEvidence(1, "right", "/py", started=True, vanished=True)
    verdict = verdict_on(evidence(gone, trigger=Trigger.ENDED, rebooted=True, adopted=True))
    assert (verdict.state, verdict.reason) == (RunState.LOST, Reason.SUPERVISOR_LOST)


def test_ranks_ended_by_their_lease_were_left_by_the_supervisor() -> None:
    ranks = [rank(number, 0, end=None, stopped_by="lease") for number in (0, 1)]
    assert verdict_on(evidence(*ranks, adopted=True)).reason is Reason.SUPERVISOR_LOST


def test_an_adopter_does_not_take_ranks_that_were_told_to_leave_for_the_cause() -> None:
    ranks = [rank(number, 5, at=1.0 + number, left_for_peers=True, asked_to_leave=True) for number in (0, 1)]
    assert verdict_on(evidence(*ranks, trigger=Trigger.ENDED, adopted=True)).reason is Reason.SUPERVISOR_LOST
    by_itself = rank(1, 5, at=0.5, left_for_peers=True)
    verdict = verdict_on(evidence(ranks[0], by_itself, trigger=Trigger.ENDED, adopted=True))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_FAILED, 1), "it left before any was told to"
    gone = RankEvidence(1, "right", "/py", started=True, vanished=True, outlived=True)
    assert verdict_on(evidence(ranks[0], gone, trigger=Trigger.ENDED, adopted=True)).rank == 1


@pytest.mark.parametrize("other", [{"code": 1, "tail": LOST}, {"sig": 15, "stopped_by": "signal TERM"}])
def test_a_lease_that_ended_one_rank_first_is_the_cause_of_the_others_end(other: dict[str, Any]) -> None:
    ranks = (rank(0, sig=15, at=1.1, stopped_by="lease"), rank(1, at=1.0, **other))
    verdict = verdict_on(evidence(*ranks, trigger=Trigger.ENDED, trainer=False, adopted=True))
    assert (verdict.state, verdict.reason) == (RunState.FAILED, Reason.SUPERVISOR_LOST)


def test_a_rank_that_never_came_is_named_with_the_launchers_output() -> None:
    missing = RankEvidence(1, "right", "/py")
    verdict = verdict_on(
        evidence(rank(0, sig=15, stopped_by="end"), missing, trigger=Trigger.NOT_STARTED, launcher_tail="a\nssh: no\n")
    )
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.LAUNCH_FAILED, 1, "right")
    assert verdict.cause == "rank 1 did not start in time; mlx.launch reported: ssh: no"


def test_hostile_exit_output_is_harmless_and_short() -> None:
    tail = "\x1b]0;owned\x07\x1b[31mError: " + "x" * 10_000 + "\u202e\n"
    cause = verdict_on(evidence(rank(0), rank(1, 1, tail=tail))).cause or ""
    assert len(cause) <= 300
    assert not set(cause) & set("\x1b\x07\u202e")


def test_a_keeper_stopped_from_outside_is_named_and_not_those_who_left_with_it() -> None:
    stopped = {"event": "end", "completed": False, "stopped": True, "iteration": 7}
    ranks = (rank(0, 0, at=1.0, end=stopped), rank(1, 0, at=2.0, end=stopped, stopped_by="signal TERM"))
    verdict = verdict_on(evidence(*ranks))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_KILLED, 1)
    assert verdict.cause == "its keeper was stopped from outside (signal TERM)"


RECORDS = st.builds(
    lambda number, code, sig, at, stopped, tail, end: rank(
        number, code, sig, at, stopped_by=stopped, tail=tail, end=end
    ),
    st.just(0),
    st.integers(0, 255),
    st.none() | st.integers(1, 64),
    st.floats(0, 10),
    st.sampled_from([None, "end", "stop", "lease", "signal TERM"]),
    st.sampled_from(["", LOST, "ValueError: x\n"]) | st.text(max_size=60),
    st.sampled_from([None, COMPLETED]),
)
ANY_RANK = RECORDS | st.builds(
    RankEvidence, st.just(0), st.just("left"), st.just("/py"), st.booleans(), vanished=st.booleans()
)


@given(
    st.lists(ANY_RANK, min_size=1, max_size=3), st.sampled_from(Trigger), st.booleans(), st.booleans(), st.booleans()
)
def test_every_end_has_a_verdict_with_a_cause(
    ranks: list[RankEvidence], trigger: Trigger, trainer: bool, adopted: bool, rebooted: bool
) -> None:
    numbered = [replace(each, rank=number, node=NODES[number]) for number, each in enumerate(ranks)]
    verdict = verdict_on(evidence(*numbered, trigger=trigger, trainer=trainer, adopted=adopted, rebooted=rebooted))
    assert verdict.state.ended
    assert (verdict.cause is None) == (verdict.state is RunState.SUCCEEDED)
    assert (verdict.rank is None) == (verdict.host is None)
    if verdict.state is RunState.SUCCEEDED:
        records = [each.record for each in numbered if each.record is not None]
        assert len(records) == len(numbered)
        assert all(record.code == 0 or (trainer and record.stopped_by is not None) for record in records)


REMOTE = RankEvidence(1, "right", "/py", remote=True, lease_s=60.0)


def test_a_node_that_does_not_answer_is_the_cause_and_its_peers_are_not() -> None:
    away = replace(REMOTE, started=True, unreachable_s=93.0, unreachable_why="No route to host")
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), away))
    assert (verdict.state, verdict.reason, verdict.rank, verdict.host) == (
        RunState.FAILED,
        Reason.NODE_LOST,
        1,
        "right",
    )
    assert verdict.cause == ("right has not answered for 93 s (No route to host), longer than its lease of 60 s")


def test_a_fault_of_a_ranks_own_comes_before_a_node_that_is_away() -> None:
    away = replace(REMOTE, started=True, unreachable_s=5.0)
    assert verdict_on(evidence(rank(0, 3, tail="KeyError: 7"), away)).rank == 0


def test_an_abort_without_a_node_is_an_abort() -> None:
    away = replace(REMOTE, started=True, unreachable_s=5.0)
    verdict = verdict_on(evidence(rank(0, sig=15, stopped_by="stop"), away, trigger=Trigger.ABORT))
    assert (verdict.state, verdict.reason) == (RunState.ABORTED, Reason.USER_ABORT)


def test_a_node_that_was_restarted_is_named() -> None:
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), replace(REMOTE, started=True, vanished=True, restarted=True)))
    assert (verdict.reason, verdict.rank) == (Reason.NODE_LOST, 1)
    assert verdict.cause == "right was restarted while its rank was running"


def test_a_lease_that_ended_a_rank_is_the_nodes_when_it_was_cut_off_and_the_supervisors_when_not() -> None:
    ended = replace(rank(1, sig=15, stopped_by="lease"), remote=True, lease_s=8.0)
    assert verdict_on(evidence(rank(0, 1, tail=LOST), replace(ended, cut_off_s=9.0))).reason is Reason.NODE_LOST
    assert verdict_on(evidence(rank(0, 1, tail=LOST), replace(ended, cut_off_s=1.0))).reason is Reason.SUPERVISOR_LOST


def test_leases_that_ended_while_the_head_slept_are_its_sleeps_and_no_ranks() -> None:
    ended = [
        replace(rank(number, stopped_by="lease"), lease_s=60.0, cut_off_s=3.0, head_slept_s=312.0) for number in (0, 1)
    ]
    slept = verdict_on(evidence(*ended))
    assert (slept.state, slept.reason, slept.rank) == (RunState.FAILED, Reason.HEAD_SLEPT, None)
    asleep = "this machine slept, or its supervisor was stopped, for 312 s"
    assert slept.cause == f"{asleep}: no heartbeat renewed the ranks' lease of 60 s"
    cut_off = [replace(each, cut_off_s=70.0) for each in ended]
    assert verdict_on(evidence(*cut_off)).reason is Reason.NODE_LOST
    connected_late = [replace(each, head_slept_s=50.0, cut_off_s=12.0) for each in ended]
    assert verdict_on(evidence(*connected_late)).reason is Reason.HEAD_SLEPT
    napped = [replace(each, head_slept_s=6.0) for each in ended]
    assert verdict_on(evidence(*napped, adopted=True)).reason is Reason.SUPERVISOR_LOST
    silent = RankEvidence(2, "far", "/py", started=True, unreachable_s=7.0, lease_s=60.0, head_slept_s=312.0)
    assert verdict_on(evidence(*ended, silent)).reason is Reason.HEAD_SLEPT, "it is not connected again yet"
    assert verdict_on(evidence(*ended, replace(silent, unreachable_s=70.0))).reason is Reason.NODE_LOST


def test_a_lost_node_that_comes_back_to_ended_peers_is_the_cause() -> None:
    came_back = replace(rank(1, 1, at=40.0, tail=LOST), lost=True, cut_off_s=33.0, lease_s=30.0)
    verdict = verdict_on(evidence(rank(0, sig=15, stopped_by="end"), came_back))
    assert (verdict.reason, verdict.rank, verdict.exit_code) == (Reason.NODE_LOST, 1, 1)
    assert verdict.cause == "right was cut off for 33 s, and its rank lost the others"
    own = rank(0, 3, at=50.0, tail="KeyError: 7")
    assert verdict_on(evidence(own, came_back)).rank == 0, "a fault of its own explains more"
    adopted = verdict_on(evidence(rank(0, sig=15, stopped_by="end"), replace(came_back, cut_off_s=0.2), adopted=True))
    assert adopted.cause == "right was cut off, and its rank lost the others", "for how long nobody knows any more"


def test_a_lost_node_that_comes_back_with_its_work_done_is_the_cause_of_the_others_end() -> None:
    left, done = rank(0, 5, left_for_peers=True), replace(rank(1), lost=True, cut_off_s=66.4, lease_s=60.0)
    verdict = verdict_on(evidence(left, done, trigger=Trigger.RANK))
    assert (verdict.reason, verdict.rank) == (Reason.NODE_LOST, 1)
    assert verdict.cause == "right was cut off for 66 s, and the others left"


@pytest.mark.parametrize("stopped_by", ["end", "stop"])
def test_why_a_lost_supervisor_ended_the_ranks_is_not_that_a_later_one_lost_them(stopped_by: str) -> None:
    ended, came_back = rank(0, sig=15, at=40.0, stopped_by=stopped_by), rank(1, 5, at=63.0, left_for_peers=True)
    adopted = verdict_on(evidence(ended, came_back, trigger=Trigger.ENDED, adopted=True))
    assert (adopted.reason, adopted.rank) == (Reason.SUPERVISOR_LOST, None)
    assert verdict_on(evidence(ended, came_back, trigger=Trigger.ENDED)).rank == 1
    lost_it = replace(came_back, clock_ahead_s=23.2)
    adopted = verdict_on(evidence(ended, lost_it, trigger=Trigger.ENDED, adopted=True))
    assert adopted.reason is Reason.SUPERVISOR_LOST, "its peers lose a rank before its end is recorded"
    assert verdict_on(evidence(ended, lost_it, trigger=Trigger.RANK, adopted=True)).rank == 1
    left_first = replace(came_back, clock_ahead_s=30.0)
    assert verdict_on(evidence(ended, left_first, trigger=Trigger.ENDED, adopted=True)).rank == 1


@pytest.mark.parametrize("trigger", [Trigger.RANK, Trigger.ENDED, Trigger.HUNG])
def test_of_more_lost_ranks_than_can_be_spared_one_is_the_cause(trigger: Trigger) -> None:
    away = [replace(REMOTE, rank=number, started=True, unreachable_s=20.0, dispensable=True) for number in (1, 2)]
    hang = Hang(61.0, 60.0, "training", 41) if trigger is Trigger.HUNG else None
    verdict = verdict_on(evidence(rank(0, 1, tail=LOST), *away, trigger=trigger, trainer=False, hang=hang))
    expected = (Reason.HUNG, None) if hang else (Reason.NODE_LOST, 1)
    assert (verdict.reason, verdict.rank) == expected, "a hang is not explained by a loss that was borne"


def test_the_output_of_ssh_is_the_cause_of_a_start_that_failed() -> None:
    refused = replace(
        REMOTE, launcher_code=255, launcher_output="ssh: connect to host right port 22: No route to host\n"
    )
    verdict = verdict_on(evidence(RankEvidence(0, "left", "/py", remote=True, launcher_code=255), refused))
    assert (verdict.reason, verdict.rank, verdict.exit_code) == (Reason.LAUNCH_FAILED, 1, 255)
    assert verdict.cause == "right could not be reached: ssh: connect to host right port 22: No route to host"


def test_a_start_that_failed_without_output_is_still_named() -> None:
    verdict = verdict_on(evidence(rank(0, sig=15, stopped_by="end"), replace(REMOTE, launcher_code=255)))
    assert (verdict.rank, verdict.cause) == (1, "right could not be reached: ssh reported nothing")


def test_clocks_that_differ_do_not_change_who_was_first() -> None:
    first = replace(rank(0, 3, at=1000.0, tail="KeyError: 7"), clock_ahead_s=990.0)
    later = rank(1, 4, at=11.0, tail="ValueError: no")
    assert verdict_on(evidence(first, later)).rank == 0


def corrupted(certain: bool, ranks: list[int]) -> dict[str, Any]:
    message = "the parameters of rank 1 are corrupted: …; all agreed last at iteration 50"
    return {"error_type": "Corrupted", "message": message, "ranks": ranks, "certain": certain}


def test_a_corrupted_rank_is_the_cause_and_those_that_left_with_it_are_not() -> None:
    left = {"event": "end", "completed": False, "stopped": True, "iteration": 50}
    verdict = verdict_on(
        evidence(rank(0, at=0.0, end=left), rank(1, 7, at=1.0, failure=corrupted(True, [1])), rank(2, end=left))
    )
    assert (verdict.state, verdict.reason, verdict.rank, verdict.host, verdict.exit_code) == (
        RunState.FAILED,
        Reason.CORRUPTED,
        1,
        "right",
        7,
    )
    assert verdict.cause is not None and "rank 1 are corrupted" in verdict.cause
    assert verdict.fix is not None and "memory" in verdict.fix


def test_of_two_that_differ_none_is_named() -> None:
    both = [rank(number, 7, at=float(number), failure=corrupted(False, [0, 1])) for number in (0, 1)]
    verdict = verdict_on(evidence(*both))
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.CORRUPTED, None, None)


HANG = Hang(61.0, 60.0, "training", 41)


def test_a_hang_names_the_rank_that_was_behind() -> None:
    ended = [rank(number, sig=15, stopped_by="end") for number in (0, 1)]
    verdict = verdict_on(evidence(*ended, trigger=Trigger.HUNG, hang=replace(HANG, rank=1)))
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.HUNG, 1, "right")
    assert verdict.cause is not None and "no step for 61 s, over the limit of 60 s" in verdict.cause


@pytest.mark.parametrize(("doing", "wording"), [("stopped", "SIGSTOP"), ("idle", "nothing was printed or computed")])
def test_a_command_that_hangs_is_told_by_what_its_processes_did(doing: str, wording: str) -> None:
    ended = (rank(0, sig=signal.SIGTERM, stopped_by="end"), rank(1, sig=signal.SIGKILL, stopped_by="end"))
    verdict = verdict_on(evidence(*ended, trigger=Trigger.HUNG, trainer=False, hang=Hang(21.0, 20.0, doing, 0, 1)))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, 1)
    assert verdict.cause is not None and wording in verdict.cause and "21 s, over the limit of 20 s" in verdict.cause


def test_ranks_that_trained_apart_have_not_succeeded_whatever_they_exited_with() -> None:
    verdict = verdict_on(evidence(rank(0), rank(1), trigger=Trigger.ENDED, trainer=False, apart=(0, 1)))
    assert (verdict.state, verdict.reason) == (RunState.FAILED, Reason.SEPARATE_GROUPS)
    assert verdict.cause is not None and "ranks 0, 1 each train a copy" in verdict.cause
    assert verdict.fix is not None and "remove the launcher" in verdict.fix
    stopped = (rank(0, sig=signal.SIGTERM, stopped_by="end"), rank(1, sig=signal.SIGTERM, stopped_by="end"))
    same = verdict_on(evidence(*stopped, trigger=Trigger.APART, trainer=False, apart=(0, 1)))
    assert (same.reason, same.cause) == (verdict.reason, verdict.cause)
    own = verdict_on(evidence(rank(0), rank(1, code=1), trigger=Trigger.RANK, trainer=False, apart=(0, 1)))
    assert (own.reason, own.rank) == (Reason.RANK_FAILED, 1), "an exception of its own explains more"


def test_a_hang_names_the_one_that_did_not_leave_when_the_others_did() -> None:
    left = [rank(number, 5, left_for_peers=True) for number in (0, 2)]
    stuck = rank(1, sig=9, stopped_by="end")
    verdict = verdict_on(evidence(left[0], stuck, left[1], trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.HUNG, 1, "right")


def test_a_hang_names_nobody_who_was_ended_while_another_left_after_it_was_told_to_end() -> None:
    left = rank(0, 5, left_for_peers=True, stopped_by="end")
    verdict = verdict_on(evidence(left, rank(1, sig=15, stopped_by="end"), trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, None)


def test_a_hang_names_nobody_whose_keeper_was_killed_while_it_was_ended() -> None:
    left = [rank(number, 5, left_for_peers=True) for number in (0, 2)]
    gone = RankEvidence(1, NODES[1], "/py", started=True, vanished=True, outlived=True)
    verdict = verdict_on(evidence(left[0], gone, left[1], trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, None)


def test_a_hang_names_nobody_who_was_ended_while_another_did_the_rest_of_its_work() -> None:
    done, ended = replace(rank(0), outlived=True), rank(1, sig=15, stopped_by="end")
    verdict = verdict_on(evidence(done, ended, trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, None)


def test_a_keeper_that_an_earlier_supervisor_may_have_killed_began_no_end_that_was_under_way() -> None:
    killed, ended = rank(0, sig=9, at=23.1), rank(1, sig=15, at=23.5, stopped_by="end")
    gone = replace(rank(2), record=None, end=None, vanished=True)
    for ranks, first in (((killed, ended, gone), 0), ((ended, gone), 2), ((rank(0, sig=9, at=23.9), ended, gone), 2)):
        assert verdict_on(evidence(*ranks, trigger=Trigger.ENDED, adopted=True)).rank == first


def test_a_hang_names_nobody_who_was_ended_while_another_left_unasked() -> None:
    """A program of the user's own, like ranks with parts of the state, is not asked to save and leave."""
    left, ended = rank(0, 1, tail=LOST), rank(1, sig=15, stopped_by="end")
    verdict = verdict_on(evidence(left, ended, trigger=Trigger.HUNG, trainer=False, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, None)


def test_a_hang_names_the_one_that_stayed_when_the_others_had_done_their_work() -> None:
    stuck = rank(1, sig=9, stopped_by="end")
    verdict = verdict_on(evidence(rank(0), stuck, rank(2), trigger=Trigger.HUNG, trainer=False, hang=HANG))
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.HUNG, 1, "right")


def test_a_hang_of_nobody_in_particular_names_nobody() -> None:
    ended = [rank(number, sig=15, stopped_by="end") for number in (0, 1)]
    verdict = verdict_on(evidence(*ended, trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, None)
    assert verdict.cause is not None and "is not known" in verdict.cause


def test_a_node_that_is_away_is_the_cause_of_a_hang() -> None:
    away = RankEvidence(1, "right", "/py", started=True, unreachable_s=61.0, lease_s=60.0)
    verdict = verdict_on(evidence(rank(0, 5, left_for_peers=True), away, trigger=Trigger.HUNG, hang=HANG))
    assert (verdict.reason, verdict.rank) == (Reason.NODE_LOST, 1)


def test_a_trainer_that_left_because_of_a_peer_is_a_consequence() -> None:
    assert is_consequence(rank(0, 5, left_for_peers=True))


def test_a_warning_is_not_quoted_as_what_a_rank_died_of() -> None:
    verdict = verdict_on(evidence(rank(0), rank(1, sig=9, tail="warning: examples are longer\n")))
    assert verdict.cause == "killed by SIGKILL (signal 9)"


HANDLED = "the checkpoint was not written: No space left on device\nstep 7\n"
TRACEBACK = "Traceback (most recent call last):\n  File x\n"
VERDICT = Verdict(RunState.FAILED, Reason.RANK_FAILED, "exited with code 1", 0, "left", 1)


def cause(tmp_path: Path, failure: dict[str, Any] | None, log: str = HANDLED) -> str | None:
    logs = RunLogs(tmp_path, (0, LAUNCHER_SOURCE))
    logs.write(0, log)
    rank = RankEvidence(rank=0, node="left", python="python", started=True, tail=log, failure=failure)
    found = FailureEvidence([rank], Trigger.ENDED, kind_of(trainer=True))
    return with_cause(VERDICT, found, logs.run_dir, {}, Redactor(environment={})).cause


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (
            {"error_type": "Refused", "message": "torn", "traceback": f"{TRACEBACK}checkpoint.errors.Refused: torn\n"},
            "checkpoint.errors.Refused: torn",
        ),
        ({"error_type": "JobError", "message": "no such optimizer"}, "JobError: no such optimizer"),
        ({"error_type": "PeerLost", "message": "[ring] connection to a peer was lost"}, "the disk was full"),
        (None, "the disk was full"),
    ],
    ids=["its own failure, with where", "its own failure", "a consequence", "nothing reported"],
)
def test_the_failure_that_a_rank_reported_goes_before_its_log(
    tmp_path: Path, failure: dict[str, Any] | None, expected: str
) -> None:
    assert cause(tmp_path, failure) == expected


GLOO_LOST = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "train.py", line 9, in <module>\n'
    "[rank{0}]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:35030. This is\n"
)
RAISED = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "train.py", line 7, in <module>\n'
    "[rank{0}]: ValueError: the labels are shifted\n"
)
TORCHRUN_REPORT = (DATA / "torchrun_report.txt").read_text()
"""What torch 2.13.0's torchrun printed after its workers' own output."""
FRAMES = "".join(f"frame #{number}: <unknown function> + 0x27 (0x7f in libtorch_cpu.so)\n" for number in range(40))


@pytest.mark.parametrize(
    ("lost", "raised"),
    [
        (GLOO_LOST.format(0), RAISED.format(1)),
        (GLOO_LOST.format(0) + FRAMES, RAISED.format(1) + FRAMES),
        (GLOO_LOST.format(0) + TORCHRUN_REPORT, RAISED.format(1) + TORCHRUN_REPORT),
        (
            GLOO_LOST.format(0) + GLOO_LOST.format(1) + TORCHRUN_REPORT,
            GLOO_LOST.format(2) + RAISED.format(3) + GLOO_LOST.format(4) + TORCHRUN_REPORT,
        ),
    ],
    ids=["ranks", "with C++ stacks", "one worker each", "several workers each"],
)
def test_a_torch_rank_that_only_lost_its_peer_is_not_blamed_though_it_ended_first(lost: str, raised: str) -> None:
    first, second = rank(0, 1, at=1.0, tail=lost), rank(1, 1, at=2.0, tail=raised)
    verdict = verdict_on(evidence(first, second, trainer=False))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_FAILED, 1)
    assert is_consequence(first) and not is_consequence(second)


def test_of_torchruns_output_the_workers_own_is_the_cause(tmp_path: Path) -> None:
    logs = RunLogs(tmp_path)
    text = GLOO_LOST.format(0) + RAISED.format(1) + TORCHRUN_REPORT
    logs.write(1, "step 3\n" + text)
    found = evidence(rank(0, 1, at=2.0, tail=GLOO_LOST.format(0)), rank(1, 1, at=1.0, tail=text), trainer=False)
    verdict = with_cause(verdict_on(found), found, logs.run_dir, {}, Redactor(environment={}))
    assert (verdict.rank, verdict.cause) == (1, "ValueError: the labels are shifted")


def of_worker(number: int, text: str) -> str:
    """As torchrun passes it on for an elastic job."""
    return "".join(f"[rank {number}] {line}\n" for line in text.splitlines())


def verdict_of_log(tmp_path: Path, log: str) -> Verdict:
    logs = RunLogs(tmp_path)
    logs.write(0, log)
    found = evidence(rank(0, 1, tail=log), trainer=False)
    return with_cause(verdict_on(found), found, logs.run_dir, {}, Redactor(environment={}))


RETRIED = "CUDA out of memory: retrying with batch size 4\n"
STEPS = "".join(f"step {number}\n" for number in range(100))


@pytest.mark.parametrize(
    "log",
    [
        RETRIED + STEPS + RAISED.format(0),
        RETRIED + STEPS + RAISED.format(0) + TORCHRUN_REPORT,
        RETRIED + STEPS + RAISED.format(0) + GLOO_LOST.format(1) + TORCHRUN_REPORT,
        of_worker(0, RETRIED + STEPS + RAISED.format(0)) + TORCHRUN_REPORT,
        of_worker(1, RETRIED + STEPS) + of_worker(0, RAISED.format(0)) + of_worker(1, FRAMES) + TORCHRUN_REPORT,
        of_worker(0, RETRIED + RAISED.format(0)) + of_worker(1, STEPS + GLOO_LOST.format(1)) + TORCHRUN_REPORT,
    ],
    ids=["a rank", "a worker", "two workers", "an elastic worker", "another elastic worker", "just before"],
)
def test_memory_that_ran_out_and_was_found_does_not_explain_a_later_exception(tmp_path: Path, log: str) -> None:
    verdict = verdict_of_log(tmp_path, log)
    assert (verdict.reason, verdict.signature) == (Reason.RANK_FAILED, None)
    assert verdict.cause is not None and verdict.cause.endswith("ValueError: the labels are shifted")


MEMORY = RAISED.replace("ValueError: the labels are shifted", "torch.OutOfMemoryError: CUDA out of memory. Tried to")


@pytest.mark.parametrize("others", ["", GLOO_LOST.format(1) * 3, FRAMES + GLOO_LOST.format(1) + FRAMES])
@pytest.mark.parametrize("elastic", [True, False])
def test_memory_that_ended_a_worker_is_the_reason_whatever_the_others_print_after_it(
    tmp_path: Path, others: str, elastic: bool
) -> None:
    own, lost = STEPS + MEMORY.format(0), others
    log = of_worker(0, own) + of_worker(1, lost) if elastic else own + lost
    verdict = verdict_of_log(tmp_path, log + TORCHRUN_REPORT)
    assert (verdict.reason, verdict.signature) == (Reason.OUT_OF_MEMORY, "cuda.oom")


def test_an_earlier_round_of_torchruns_workers_does_not_explain_the_last(tmp_path: Path) -> None:
    failed = next(line for line in TORCHRUN_REPORT.splitlines() if "failed (exitcode: 1)" in line)
    first = of_worker(0, MEMORY.format(0)) + failed + "\n"
    killed = TORCHRUN_REPORT.replace("(exitcode: 1)", "(exitcode: -9)")
    verdict = verdict_of_log(tmp_path, first + of_worker(0, "step 1\n") + killed)
    assert (verdict.reason, verdict.signature) == (Reason.RANK_FAILED, "elastic.worker_killed")


def test_an_agent_that_ended_in_a_later_round_is_not_explained_by_the_first(tmp_path: Path) -> None:
    failed = next(line for line in TORCHRUN_REPORT.splitlines() if "failed (exitcode: 1)" in line)
    first = of_worker(0, MEMORY.format(0)) + failed + "\n"
    ended = TRACEBACK + "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n"
    verdict = verdict_of_log(tmp_path, first + of_worker(0, STEPS) + ended)
    assert (verdict.reason, verdict.signature) == (Reason.RANK_FAILED, "elastic.signal")


NCCL_LOST = (
    "[rank{0}]: Traceback (most recent call last):\n"
    '[rank{0}]:   File "train.py", line 9, in <module>\n'
    "[rank{0}]: torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:"
    "268, remote process exited or there was a network error, NCCL version 2.21.5\n"
    "[rank{0}]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
    "prematurely.\n"
    "[rank{0}]: Last error:\n"
    "[rank{0}]: socketProgressOpt: Call to recv from 10.0.0.2<33759> failed : Connection reset by peer\n"
)


@pytest.mark.parametrize("report", ["", TORCHRUN_REPORT], ids=["ranks", "under torchrun"])
def test_a_rank_whose_nccl_lost_its_peer_is_not_blamed_though_it_ended_first(report: str) -> None:
    first = rank(0, 1, at=1.0, tail=NCCL_LOST.format(0) + report)
    second = rank(1, 1, at=2.0, tail=RAISED.format(1) + report)
    verdict = verdict_on(evidence(first, second, trainer=False))
    assert verdict.rank == 1
    assert is_consequence(first) and not is_consequence(second)


PORT_IN_USE = f"{TRACEBACK}{BY_ID['c10d.port_in_use'].example}\n"


def test_a_master_port_that_is_taken_is_a_failure_to_start_and_its_holder_is_named(tmp_path: Path) -> None:
    verdict = verdict_of_log(tmp_path, PORT_IN_USE)
    assert (verdict.reason, verdict.signature) == (Reason.LAUNCH_FAILED, "c10d.port_in_use")
    assert verdict.cause is not None and "MASTER_PORT 29500" in verdict.cause
    held = rank(0, 1, tail=PORT_IN_USE, port="port 29500 is in use by pid 5 (x)")
    assert verdict_on(evidence(held, trainer=False)).cause == "port 29500 is in use by pid 5 (x)"


def test_a_port_that_was_taken_before_another_was_used_does_not_explain_a_later_exception(tmp_path: Path) -> None:
    verdict = verdict_of_log(tmp_path, PORT_IN_USE + "step 1\n" + RAISED.format(0))
    assert (verdict.reason, verdict.signature) == (Reason.RANK_FAILED, None)
    assert verdict.cause is not None and verdict.cause.endswith("ValueError: the labels are shifted")


def test_a_rank_that_aborts_after_its_exception_has_failed_by_that() -> None:
    """gloo's threads, in the interpreter's own end."""
    failure = {"error_type": "ValueError", "message": "bad row", "traceback": "ValueError: bad row", "certain": True}
    aborted = rank(1, sig=signal.SIGABRT, failure=failure, tail="Fatal Python error: Aborted\n")
    verdict = verdict_on(evidence(rank(0, sig=signal.SIGTERM, stopped_by="end"), aborted, trainer=False))
    assert (verdict.reason, verdict.rank) == (Reason.RANK_FAILED, 1)
    assert "ValueError: bad row" in (verdict.cause or "")


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("\ud800") | st.just("x" * 100_000),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)
EVENT = st.none() | st.dictionaries(
    st.sampled_from(["error_type", "message", "traceback", "certain", "completed", "stopped", "early", "iteration"]),
    HOSTILE | st.sampled_from(["Corrupted", "Diverged", "PeerLost"]),
)
RECORD = st.builds(
    ExitRecord,
    *(st.just(0), st.just(1), st.none() | st.integers(-(2**62), 2**62), st.none() | st.integers(-(2**62), 2**62)),
    ended_at=st.floats(-2e11, 2e11),
    log_bytes=st.integers(-(2**62), 2**62),
    stopped_by=st.none() | st.text(max_size=8),
    error=st.none() | st.text(max_size=8),
)


OUTPUT = st.builds(ExitOutput, st.text(max_size=30) | st.just("\ud800"), st.text(max_size=9), EVENT, EVENT)
ENDED = st.builds(RankEnded, st.just(0), st.none() | RECORD, st.none() | st.integers(0, 9), OUTPUT)


@given(ENDED, st.sampled_from(Trigger), st.booleans())
def test_whatever_a_node_reports_the_verdict_can_be_written(
    message: RankEnded, trigger: Trigger, trainer: bool
) -> None:
    """As its agent's messages leave it: typed, but for the fields of the trainer's events."""
    (received,) = Decoder().feed(encode(message))
    assert isinstance(received, RankEnded)
    output = received.output
    hostile = RankEvidence(
        *(0, "left", "/py", True, received.record), tail=output.log, failure=output.failure, end=output.end
    )
    verdict = verdict_on(evidence(hostile, rank(1, 1), trigger=trigger, trainer=trainer))
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        journal.append(StateChanged(state=verdict.state, verdict=verdict))
        journal.close()
        assert len(read_journal(Path(folder) / "journal.jsonl")) == 1
        assert (Path(folder) / "journal.jsonl").stat().st_size < 20_000


PEER_LOST = {"error_type": "PeerLost", "message": "rank 1 is gone"}


def test_a_rank_that_was_killed_while_the_attempt_was_ended_is_not_the_cause() -> None:
    killed = RankEvidence(0, "left", "/py", started=True, vanished=True, outlived=True)
    assert verdict_on(evidence(killed, rank(1, 1, at=5.0, tail="ValueError: no"))).rank == 1
    assert verdict_on(evidence(replace(killed, outlived=False), rank(1, 1, at=5.0, tail="ValueError: no"))).rank == 0


def test_a_node_that_answered_while_the_attempt_was_ended_is_named_after_one_that_its_lease_has_ended() -> None:
    away = RankEvidence(0, "left", "/py", started=True, unreachable_s=3.0, lease_s=15.0)
    by_lease = rank(1, sig=15, stopped_by="lease", cut_off_s=20.0, lease_s=15.0)
    assert verdict_on(evidence(away, by_lease)).rank == 0
    verdict = verdict_on(evidence(replace(away, answered_since=True), by_lease))
    assert (verdict.reason, verdict.rank) == (Reason.NODE_LOST, 1)


def test_a_lost_rank_that_was_killed_when_its_node_came_back_was_lost_with_it() -> None:
    killed = RankEvidence(0, "left", "/py", started=True, vanished=True, lost=True, cut_off_s=138.0, lease_s=15.0)
    verdict = verdict_on(evidence(killed, rank(1, 0)))
    assert (verdict.reason, verdict.rank) == (Reason.NODE_LOST, 0)
    assert verdict.cause == "left was cut off for 138 s, and its rank lost the others"


def test_the_one_rank_whose_end_is_not_known_is_named_before_those_that_lost_it() -> None:
    lost = [rank(number, 5, failure=PEER_LOST, left_for_peers=True) for number in (0, 2)]
    unseen = RankEvidence(1, "right", "/py", started=True)
    verdict = verdict_on(evidence(lost[0], unseen, lost[1]))
    assert (verdict.reason, verdict.rank, verdict.host) == (Reason.RANK_FAILED, 1, "right")
    assert verdict_on(evidence(lost[0], unseen, lost[1], over=False)).rank == 0, "it may be sound, and save its state"


def test_a_rank_that_was_killed_when_the_attempt_was_ended_makes_no_other_end_too_early() -> None:
    fenced = RankEvidence(0, "left", "/py", started=True, vanished=True, outlived=True)
    done = [rank(number, 0, end=None) for number in (1, 2)]
    hang = Hang(400.0, 60.0, "stopped", 7, 0)
    verdict = verdict_on(evidence(fenced, *done, trigger=Trigger.HUNG, trainer=False, hang=hang))
    assert (verdict.reason, verdict.rank) == (Reason.HUNG, 0)
