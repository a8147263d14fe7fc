"""What a run of each kind of job may lose, reports and needs, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine.job.kinds import (
    OWN_STATE,
    AveragingCommand,
    ElasticTorchrun,
    JobKind,
    Lockstep,
    OwnCommand,
    PeriodicAveraging,
    RankSeen,
    RanksSeen,
    job_kind,
)
from engine.protocol.attempt import ExitRecord
from engine.protocol.job import STRATEGIES, Framework

LOCKSTEP = job_kind("mlx", "data", command=False, elastic=False)
SHARDED = job_kind("mlx", "sharded", command=False, elastic=False)
PIPELINE = job_kind("mlx", "pipeline", command=False, elastic=False)
LOCAL = job_kind("mlx", "local", command=False, elastic=False)
FSDP = job_kind("torch", "fsdp", command=False, elastic=False)
COMMAND = job_kind("mlx", "data", command=True, elastic=False)
TORCH_COMMAND = job_kind("torch", "auto", command=True, elastic=False)
ELASTIC = job_kind("torch", "auto", command=True, elastic=True)

ANSWERS: dict[str, tuple[JobKind, dict[str, Any]]] = {
    "lockstep": (
        LOCKSTEP,
        {"reports": True, "compared": True, "survivors_keep_state": True, "first_steps": 5},
    ),
    "sharded": (SHARDED, {"reports": True, "compared": True, "survivors_keep_state": False, "outlives_ranks": False}),
    "local": (LOCAL, {"reports": True, "compared": False, "survivors_keep_state": True, "outlives_ranks": True}),
    "command": (COMMAND, {"reports": False, "compared": True, "survivors_keep_state": False, "first_steps": 0}),
    "elastic": (ELASTIC, {"reports": False, "compared": False, "survivors_keep_state": False, "outlives_ranks": True}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_kind_answers_for_itself(name: str) -> None:
    kind, answers = ANSWERS[name]
    assert {question: getattr(kind, question) for question in answers} == answers


@pytest.mark.parametrize(
    ("framework", "command", "elastic", "expected"),
    [
        ("mlx", False, False, Lockstep),
        ("torch", False, False, Lockstep),
        ("mlx", True, False, OwnCommand),
        ("torch", True, False, OwnCommand),
        ("torch", True, True, ElasticTorchrun),
    ],
)
def test_every_strategy_of_a_framework_has_its_kind(
    framework: Framework, expected: type[JobKind], *, command: bool, elastic: bool
) -> None:
    for strategy in STRATEGIES[framework]:
        kind = job_kind(framework, strategy, command=command, elastic=elastic)
        averaging = AveragingCommand if command else PeriodicAveraging
        assert type(kind) is (averaging if strategy == "local" else expected)
        assert (kind.framework.name, kind.strategy.name) == (framework, strategy)


def test_a_command_brings_its_own_model() -> None:
    assert [kind.own_model is None for kind in (LOCKSTEP, LOCAL, COMMAND, ELASTIC)] == [True, True, False, False]


def test_only_an_elastic_job_has_its_workers_restarted_and_any_rank_report() -> None:
    kinds = (LOCKSTEP, SHARDED, LOCAL, COMMAND, TORCH_COMMAND, ELASTIC)
    assert [kind for kind in kinds if kind.loss_restarts_workers] == [ELASTIC]
    assert [kind for kind in kinds if kind.any_rank_reports] == [ELASTIC]


@pytest.mark.parametrize(
    ("kind", "watched", "needed"),
    [
        (LOCKSTEP, (0, 1, 2), [0, 1, 2]),
        (LOCAL, (0,), [0]),
        (COMMAND, (0,), [0, 1, 2]),
        (ELASTIC, (0, 1, 2), [0]),
    ],
    ids=["lockstep", "local", "command", "elastic"],
)
def test_the_ranks_whose_steps_and_success_count(kind: JobKind, watched: tuple[int, ...], needed: list[int]) -> None:
    assert kind.watched_ranks(3) == watched
    assert list(kind.success_ranks(3)) == needed


def test_a_command_may_be_silent_for_longer_and_gets_term_at_once() -> None:
    for kind, hang_s, grace_s in (
        (LOCKSTEP, 60.0, 30.0),
        (LOCAL, 60.0, 30.0),
        (COMMAND, 600.0, 0.0),
        (ELASTIC, 600.0, 0.0),
    ):
        assert (kind.hang_s(60.0, 600.0), kind.grace_s(2.5, 30.0)) == (hang_s, grace_s)
    assert COMMAND.hang_s(900.0, 600.0) == 900.0
    assert LOCKSTEP.grace_s(40.0, 30.0) == 40.0


def test_only_ranks_that_the_others_go_on_without_are_started_again_by_their_node() -> None:
    kinds = (LOCKSTEP, COMMAND, LOCAL, ELASTIC)
    assert [[kind.rank_restarts(rank, 3) for rank in (0, 1)] for kind in kinds] == [[0, 0], [0, 0], [0, 3], [0, 0]]


def test_metrics_are_read_from_the_output_of_rank_0_and_of_any_node_of_an_elastic_job() -> None:
    kinds = (LOCKSTEP, LOCAL, COMMAND, ELASTIC)
    read = [[kind.prints_metrics(rank) for rank in (0, 1)] for kind in kinds]
    assert read == [[False, False], [False, False], [True, False], [True, True]]


@pytest.mark.parametrize(
    ("kind", "restart_commands", "nothing_ran", "why"),
    [
        (LOCKSTEP, False, False, None),
        (LOCAL, False, False, None),
        (COMMAND, False, False, OWN_STATE),
        (COMMAND, False, True, OWN_STATE),  # the port is MLX's own: what else has begun there is not known
        (COMMAND, True, False, None),
        (TORCH_COMMAND, False, False, OWN_STATE),
        (TORCH_COMMAND, False, True, None),
        (ELASTIC, False, False, OWN_STATE),
        (ELASTIC, False, True, None),
    ],
    ids=["lockstep", "local", "mlx", "mlx-unlaunched", "allowed", "torch", "torch-unlaunched", "elastic", "elastic-un"],
)
def test_a_command_is_restarted_only_where_that_is_allowed_or_it_never_ran(
    kind: JobKind, why: str | None, *, restart_commands: bool, nothing_ran: bool
) -> None:
    assert kind.why_never_restarted(restart_commands=restart_commands, nothing_ran=nothing_ran) == why


@pytest.mark.parametrize(
    ("kind", "by_mlx_launch"),
    [(LOCKSTEP, True), (COMMAND, True), (LOCAL, False), (FSDP, False), (TORCH_COMMAND, False)],
)
def test_mlx_launch_starts_what_does_not_outlive_its_ranks(kind: JobKind, *, by_mlx_launch: bool) -> None:
    assert kind.starts_directly("mlx.launch") is not by_mlx_launch
    assert kind.starts_directly("direct")


def test_only_an_elastic_job_starts_a_torchrun_on_each_node() -> None:
    assert ELASTIC.torchrun(4, 2, 3) == {"--nnodes": "2:4", "--max-restarts": 3}
    assert (ELASTIC.torchrun(4, None, 0)["--nnodes"], COMMAND.torchrun(4, 2, 3)) == ("4:4", {})


def test_only_a_partitioned_state_on_the_nodes_alone_needs_all_of_them() -> None:
    kinds = {"sharded": SHARDED, "fsdp": FSDP, "data": LOCKSTEP, "local": LOCAL, "command": COMMAND, "elastic": ELASTIC}
    assert [name for name, kind in kinds.items() if kind.state_needs_all(4, local_checkpoints=True)] == [
        "sharded",
        "fsdp",
    ]
    assert not SHARDED.state_needs_all(4, local_checkpoints=False)
    assert not SHARDED.state_needs_all(1, local_checkpoints=True)


RUNS, ABSENT, DONE = RankSeen(started=True), RankSeen(), RankSeen(started=True, ended=True)
LOST = RankSeen(started=True, ended=True, failed=True)
GAVE_UP = RankSeen(started=True, ended=True, failed=True, gave_up=True)


@pytest.mark.parametrize(
    ("ranks", "ends", "min_nodes", "losable"),
    [
        ((RUNS, RUNS, RUNS, RUNS), (), 2, {1, 2, 3}),
        ((RUNS, RUNS, RUNS, RUNS), (), None, set()),
        ((RUNS, RUNS, ABSENT, RUNS), (), 2, {1, 3}),
        ((RUNS, RUNS, LOST, RUNS), (2,), 2, {1, 2, 3}),
        ((RUNS, LOST, LOST, RUNS), (2, 1), 2, {1, 2}),
        ((RUNS, LOST, LOST, LOST), (3, 2, 1), 2, {2, 3}),
        ((RUNS, LOST, LOST, LOST), (), 2, {1, 2}),  # not recorded yet: by their numbers
        ((RUNS, RUNS, GAVE_UP, RUNS), (2,), 2, {1, 3}),
        ((LOST, RUNS, RUNS, RUNS), (0,), 2, {1, 2, 3}),
        ((RUNS, DONE, LOST, RUNS), (1, 2), 3, {1, 2}),
    ],
)
def test_an_elastic_job_can_lose_nodes_down_to_its_least(
    ranks: Sequence[RankSeen], ends: Sequence[int], min_nodes: int | None, losable: set[int]
) -> None:
    assert ELASTIC.losable(RanksSeen(ranks, ends, min_nodes=min_nodes)) == losable


@pytest.mark.parametrize(
    ("ranks", "stepped", "losable"),
    [
        ((RUNS, RUNS, RUNS), False, set()),
        ((RUNS, RUNS, RUNS), True, {1, 2}),
        ((RUNS, ABSENT, LOST), True, {2}),
        ((LOST, GAVE_UP, RUNS), True, {1, 2}),
    ],
)
def test_local_training_can_lose_all_but_rank_0_after_the_first_update(
    ranks: Sequence[RankSeen], losable: set[int], *, stepped: bool
) -> None:
    assert LOCAL.losable(RanksSeen(ranks, stepped=stepped, min_nodes=1)) == losable


@pytest.mark.parametrize("kind", [LOCKSTEP, SHARDED, COMMAND, TORCH_COMMAND], ids=["data", "sharded", "mlx", "torch"])
def test_no_other_kind_can_lose_a_rank(kind: JobKind) -> None:
    assert kind.losable(RanksSeen((RUNS, LOST, RUNS), (1,), stepped=True, min_nodes=1)) == set()


def record(code: int | None, stopped_by: str | None = None) -> ExitRecord:
    return ExitRecord(0, 1, code, None, 0.0, log_bytes=0, stopped_by=stopped_by)


@pytest.mark.parametrize(
    ("end", "exit_record", "trained", "commanded"),
    [
        ({"completed": True}, record(0), True, True),
        ({"completed": True}, record(None, "lease"), True, False),
        ({"completed": True}, record(0, "stop"), True, False),
        ({"completed": True}, record(1), False, False),
        ({"completed": True}, None, True, False),
        ({"completed": False}, record(0), False, True),
        (None, record(0), False, True),
        (None, record(0, "stop"), False, False),
        (None, None, False, False),
    ],
)
def test_a_trainer_reports_that_it_has_completed_and_a_command_exits_with_0(
    end: dict[str, Any] | None, exit_record: ExitRecord | None, *, trained: bool, commanded: bool
) -> None:
    assert (LOCKSTEP.succeeded(exit_record, end), COMMAND.succeeded(exit_record, end)) == (trained, commanded)


def test_once_rank_0_of_an_elastic_job_has_done_its_work_no_other_node_is_needed() -> None:
    kind = job_kind("torch", "auto", command=True, elastic=True)
    gave_up = RankSeen(started=True, ended=True, failed=True, gave_up=True)
    running = RankSeen(started=True)
    assert kind.losable(RanksSeen([running, gave_up, running], min_nodes=2)) == {2}
    assert kind.losable(RanksSeen([RankSeen(True, ended=True), gave_up, running], min_nodes=2)) == {1, 2}
