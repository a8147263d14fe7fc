"""The state of a run is a pure fold over its events: in parts as at once, and after any prefix."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StateError
from engine.measurements import Division
from engine.models import Reason, RunRecord, RunState
from engine.plan.decisions import LaunchDecisions
from engine.plan.document import ChosenSettings
from engine.plan.network import NetworkPlan
from engine.protocol.attempt import Identity
from engine.run.events import (
    AlarmRaised,
    Attempt,
    AttemptFailed,
    AttemptPlanned,
    AttemptResumed,
    CleanupConfirmed,
    Event,
    Figures,
    Hang,
    HangDetected,
    LaunchDecided,
    LauncherStarted,
    NodeConditionChanged,
    NodesExcluded,
    Note,
    RankExited,
    RankLaunched,
    RequestReceived,
    RestartDelayed,
    RestartPlanned,
    RestartRefused,
    Resumed,
    RunPlanned,
    RunReopened,
    StateChanged,
    StateSaved,
    StopStage,
    StopStageReached,
    SupervisorStarted,
    Verdict,
)
from engine.run.history import MANIFESTS_KEPT, RunHistory, fold
from engine.run.journal import Journal, JournalTail, read_journal

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
RUN = RunRecord(id="r", name="demo", state=RunState.PLANNED, created_at=START, world_size=2, backend="ring")
PLANNED = RunPlanned(at=START, run=RUN, nonce="n")
FAILED = Verdict(RunState.FAILED, Reason.RANK_FAILED, "ValueError: no", 1, "right", exit_code=3)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def decided(*nodes: str, backend: str = "ring", recomputed: int = 0) -> LaunchDecided:
    decisions = LaunchDecisions(
        nodes=nodes,
        division=Division(parts=dict.fromkeys(nodes, 1.0), source="equal", reason="not measured"),
        settings=ChosenSettings(grad_checkpoint=recomputed),
        validators=nodes,
        network=NetworkPlan(backend=backend, hosts=()),
    )
    return LaunchDecided(at=at(1), decisions=decisions)


def attempt(number: int = 1, *nodes: str) -> AttemptPlanned:
    plan = Attempt(
        number=number,
        nonce=f"n.{number}",
        starting_port=20_000,
        log_bases={},
        event_bases={},
        layouts=(),
        nodes=nodes,
    )
    return AttemptPlanned(at=at(2), attempt=plan)


def rank_started(rank: int, after_s: float = 0.0) -> RankLaunched:
    identity = Identity(rank, "r", 1, "n", "boot", 1, "then", 2, 2, "then", START.timestamp() + after_s)
    return RankLaunched(at=at(3), rank=rank, node=f"n{rank}", identity=identity)


def failed(number: int, reached: int = 0) -> AttemptFailed:
    return AttemptFailed(at=at(4), attempt=number, verdict=FAILED, reached=reached, failed_at=at(3))


def saved(rank: int, update: int) -> StateSaved:
    return StateSaved(rank=rank, state=f"{update}.{rank}", manifest=f"{update:064x}")


ranks, nodes, numbers = st.integers(0, 2), st.sampled_from(["ana", "bea"]), st.integers(1, 3)
events = st.one_of(
    st.just(RunReopened(at=at(1))),
    st.builds(attempt, numbers, nodes),
    st.builds(StateChanged, at=st.just(at(5)), state=st.sampled_from(RunState)),
    st.builds(StateChanged, state=st.just(RunState.FAILED), verdict=st.just(FAILED), unconfirmed=st.tuples(nodes)),
    st.builds(StateChanged, state=st.just(RunState.ABORTED), figures=st.builds(Figures, iteration=st.integers(1, 50))),
    st.builds(SupervisorStarted, pid=numbers, start=st.just("then"), boot_id=st.just("boot")),
    st.builds(NodesExcluded, nodes=st.tuples(nodes), why=st.just("stale"), world_size=numbers),
    st.builds(decided, nodes, backend=st.sampled_from(["ring", "jaccl"]), recomputed=numbers),
    st.builds(LauncherStarted, pid=numbers, start=st.just("then")),
    st.builds(rank_started, ranks, st.floats(0.0, 9.0)),
    st.builds(RankExited, rank=ranks, node=nodes, code=st.integers(0, 3)),
    st.builds(NodeConditionChanged, node=nodes, condition=st.sampled_from(["connected", "unreachable", "lost"])),
    st.builds(AlarmRaised, alarm=st.just("KL"), message=st.just("apart")),
    st.builds(HangDetected, hang=st.builds(Hang, st.just(9.0), st.just(5.0), st.just("training"), st.integers(0, 9))),
    st.builds(RequestReceived, request=st.just("abort"), now=st.booleans()),
    st.builds(StopStageReached, stage=st.sampled_from(StopStage), purpose=st.sampled_from(["abort", "fence", "end"])),
    st.builds(failed, numbers, st.integers(0, 50)),
    st.builds(RestartDelayed, after=numbers, why=st.just("waits for bea")),
    st.builds(
        RestartPlanned,
        attempt=numbers,
        after=numbers,
        members=st.tuples(nodes),
        delay_s=st.floats(0.0, 60.0),
        why=st.just("recovers"),
    ),
    st.builds(AttemptResumed, attempt=numbers, resumed=st.just(Resumed("checkpoint", 37))),
    st.builds(saved, ranks, numbers),
    st.builds(RestartRefused, after=numbers, why=st.just("stalled")),
    st.builds(CleanupConfirmed, node=nodes),
    st.just(Note(message="x")),
)
journals = st.lists(events, max_size=30).map(lambda tail: [PLANNED, *tail])


@given(journals, st.integers(1, 30))
def test_folding_in_two_parts_is_folding_at_once(journal: list[Event], cut: int) -> None:
    assert fold(journal[cut:], fold(journal[:cut])) == fold(journal)


@given(journals)
def test_any_prefix_folds(journal: list[Event]) -> None:
    history: RunHistory | None = None
    for event in journal:
        history = fold([event], history)
        assert history.record.attempts == max((each.number for each in history.attempts[-1:]), default=0)


@given(journals, st.integers(1, 60))
def test_a_torn_tail_folds_as_the_prefix_before_it(
    tmp_path_factory: pytest.TempPathFactory, journal: list[Event], torn: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "journal.jsonl"
    writer = Journal(path, clock=lambda: START)
    stamped = [writer.append(event) for event in journal]
    writer.close()
    assert read_journal(path) == tuple(stamped)
    path.write_bytes(path.read_bytes()[: -min(torn, len(path.read_bytes().splitlines()[-1]))])
    tail = JournalTail(path)
    events = list(tail.events())
    assert (events, tail.damaged) == (stamped[:-1], [])
    if len(journal) > 1:
        assert fold(events) == fold(stamped[:-1])


def test_before_anything_happens_the_record_is_the_planned_one() -> None:
    assert fold([PLANNED]).record == RUN


@pytest.mark.parametrize("journal", [[], [StateChanged(state=RunState.RUNNING)]])
def test_a_journal_without_a_plan_is_refused(journal: list[Event]) -> None:
    with pytest.raises(StateError, match="does not begin with a plan"):
        fold(journal)


def test_a_whole_life_folds_to_its_end() -> None:
    figures = Figures(iteration=20, train_loss=1.5)
    history = fold(
        [
            PLANNED,
            StateChanged(at=at(1), state=RunState.LAUNCHING),
            attempt(),
            rank_started(1, 2.75),
            rank_started(0, 2.5),
            StateChanged(at=at(4), state=RunState.RUNNING),
            StateChanged(at=at(9), state=RunState.FAILED, verdict=FAILED, figures=figures),
        ]
    )
    record = history.record
    assert record.state is RunState.FAILED and record.reason is Reason.RANK_FAILED
    assert (record.rank, record.host, record.cause, record.exit_code) == (1, "right", "ValueError: no", 3)
    assert (record.attempts, record.iteration, record.train_loss) == (1, 20, 1.5)
    assert record.started_at == START + timedelta(seconds=2.5)
    assert (record.ended_at, history.state_since) == (at(9), at(9))


def test_the_backend_that_was_chosen_is_the_records() -> None:
    asked = PLANNED.model_copy(update={"run": RUN.model_copy(update={"backend": "auto"})})
    assert fold([asked]).record.backend == "auto"
    journal = [asked, decided("ana", backend="jaccl-ring"), attempt(1, "ana")]
    assert [fold(journal[:count]).record.backend for count in (2, 3)] == [asked.run.backend, "jaccl-ring"]


def test_the_furthest_iteration_is_known_over_all_lives_of_a_run() -> None:
    assert fold([PLANNED]).reached == 0
    stopped = StateChanged(state=RunState.ABORTED, verdict=FAILED, figures=Figures(iteration=30))
    history = fold([PLANNED, attempt(), failed(1, reached=37), stopped, RunReopened()])
    assert (history.reached, history.newest_reached, history.failures) == (37, 37, ())
    assert fold([PLANNED, attempt(), stopped, RunReopened()]).newest_reached == 30, "it was stopped"


def test_a_rank_that_started_at_no_time_leaves_the_run_without_one() -> None:
    event = rank_started(0)
    for seconds in (1e300, -1e300, float("nan")):
        wrong = event.model_copy(update={"identity": replace(event.identity, started_at=seconds)})
        assert fold([PLANNED, wrong]).record.started_at is None
        assert fold([PLANNED, event, wrong]).record.started_at == START


def test_the_iterations_that_the_trainer_reported_are_those_of_a_resumed_run_too() -> None:
    stopped = StateChanged(state=RunState.ABORTED, verdict=FAILED, figures=Figures(iteration=30, iterations=350))
    record = fold([PLANNED, attempt(), stopped, RunReopened()]).record
    assert (record.iteration, record.iterations) == (None, 350)


def test_an_abort_is_of_one_life_and_one_without_grace_wins() -> None:
    gentle, now = RequestReceived(request="abort"), RequestReceived(request="abort", now=True)
    assert fold([PLANNED, gentle, now]).abort == now
    assert fold([PLANNED, now, gentle]).abort == now
    assert fold([PLANNED, now, RunReopened()]).abort is None


def test_the_memory_kills_of_an_attempts_node_are_those_of_its_first_answer() -> None:
    kills = [
        NodeConditionChanged(node=node, condition="connected", memory_kills=count)
        for node, count in (("ana", 3), ("bea", 1), ("ana", None))
    ]
    [found] = fold([PLANNED, attempt(1, "ana", "bea"), *kills]).attempts
    assert [found.memory_kills(node) for node in ("ana", "bea", "cyd")] == [3, 1, None]


def test_nodes_stay_unconfirmed_until_their_cleanup_is() -> None:
    end = StateChanged(state=RunState.FAILED, verdict=FAILED, unconfirmed=("ana", "bea"))
    assert fold([PLANNED, end, CleanupConfirmed(node="ana")]).record.unconfirmed == ["bea"]


def test_journals_are_compact_and_self_describing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl", clock=lambda: START)
    journal.append(RankExited(rank=1, node="ana", signal=9))
    line = (tmp_path / "journal.jsonl").read_text()
    assert line == '{"event": "rank_ended", "at": "2026-01-02T03:04:05Z", "rank": 1, "node": "ana", "signal": 9}\n'


def test_an_attempt_has_the_newest_decisions_for_its_nodes_in_every_life() -> None:
    both, ana, moved = decided("ana", "bea"), decided("ana"), decided("ana", backend="jaccl")
    journal = [PLANNED, both, attempt(1, "ana", "bea"), ana, attempt(2, "ana"), moved, attempt(3, "ana"), failed(3)]
    history = fold([*journal, RunReopened(), attempt(4, "ana", "bea")])
    assert [made.decisions for made in history.attempts] == [event.decisions for event in (both, ana, moved, both)]
    assert history.decisions_for(["bea", "ana"]) is None, "the ranks are others"


def test_an_attempt_whose_decisions_are_lost_has_none_of_other_nodes() -> None:
    history = fold([PLANNED, decided("ana", "bea"), attempt(1, "ana")])
    assert history.attempts[0].decisions is None


def test_the_last_recovery_is_in_the_record_with_its_cluster() -> None:
    resumed = [AttemptResumed(at=at(9), attempt=1, resumed=Resumed("none"), seconds=seconds) for seconds in (None, 7.5)]
    record = fold([PLANNED, attempt(), *resumed]).record
    assert record.recovery_s == 7.5


def test_the_newest_manifests_of_each_rank_are_known_also_after_the_run_was_taken_up() -> None:
    count = MANIFESTS_KEPT + 5
    history = fold([PLANNED, attempt(), *(saved(0, update) for update in range(count)), saved(1, 3), RunReopened()])
    assert history.manifests[0] == tuple((f"{update}.0", f"{update:064x}") for update in range(5, count))
    assert history.manifests[1] == (("3.1", f"{3:064x}"),)
    assert fold([PLANNED, attempt(), RunReopened()]).manifests == {}, "an older release's journal"
