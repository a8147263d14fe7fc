"""The ranks' figures are checked once a second; what lasts becomes an alarm, once, and never a flood."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.config.models import ConsistencyConfig
from engine.run.consistency_watch import ALARM_LIMIT, ConsistencyWatch
from engine.run.events import AlarmRaised

NODES = {0: "ana", 1: "bea", 2: "cyd"}


def line(iteration: int, loss: float | None = 2.0, norm: float | None = 1.0, **more: Any) -> bytes:
    event = {"event": "step", "iteration": iteration, "at": 1.7e9, "loss": 2.0}
    return json.dumps({**event, "update": iteration, "own_loss": loss, "own_grad_norm": norm, **more}).encode()


class Watched:
    """A watch with a clock of the test's own."""

    def __init__(self, nodes: dict[int, str] | None = None, **config: Any) -> None:
        self.alarms: list[AlarmRaised] = []
        self.now = 0.0
        self.watch = ConsistencyWatch(
            ConsistencyConfig(**config),
            nodes or NODES,
            self.alarms.append,
            clock=lambda: self.now,
        )

    def at(self, iteration: int, *figures: tuple[float | None, float | None]) -> Any:
        """A second later all ranks have reported `iteration`: (loss, norm) each."""
        for rank, (loss, norm) in enumerate(figures):
            self.watch.step(rank, line(iteration, loss, norm))
        self.now += 1.0
        return self.watch.poll()

    @property
    def names(self) -> list[str]:
        return [alarm.alarm for alarm in self.alarms]


GOOD = [(2.0, 1.0), (2.1, 1.1), (1.9, 0.9)]
APART = [(2.0, 1.0), (2.1, 1.1), (1.9, 30.0)]


def test_ranks_that_agree_are_checked_and_raise_no_alarm() -> None:
    watched = Watched()
    metrics = watched.at(1, *GOOD)
    assert metrics.is_consistent and metrics.total_workers == 3
    assert watched.alarms == []


def test_what_lasts_is_an_alarm_once_naming_the_rank_and_again_only_after_it_was_over() -> None:
    watched = Watched(wasserstein=1e9)
    for iteration in range(1, 9):
        watched.at(iteration, *APART)
        assert len(watched.alarms) == (iteration >= 3)
    (alarm,) = watched.alarms
    assert (alarm.alarm, alarm.ranks, alarm.workers, alarm.iteration) == (
        "BYZANTINE_WORKERS_DETECTED",
        (2,),
        ("cyd",),
        3,
    )
    assert alarm.message.startswith("rank 2 on cyd: stands apart") and "Krum needs 5" in alarm.message
    watched.at(9, *GOOD)
    for iteration in range(10, 13):
        watched.at(iteration, *APART)
    assert len(watched.alarms) == 2


def test_one_odd_batch_is_no_alarm() -> None:
    watched = Watched()
    for iteration in range(1, 30):
        watched.at(iteration, *(APART if iteration % 3 else GOOD))
    assert watched.alarms == []


def test_the_limits_are_the_configurations() -> None:
    losses = [(0.0, 0.0), (4.0, 4.0)]
    nodes = {0: "ana", 1: "bea"}
    strict, lax = Watched(nodes), Watched(nodes, loss_spread=1.0, wasserstein=9.0)
    for watched in (strict, lax):
        for iteration in range(1, 5):
            watched.at(iteration, *losses)
    assert strict.names == ["KL_DIVERGENCE_THRESHOLD_EXCEEDED", "WASSERSTEIN_DISTANCE_THRESHOLD_EXCEEDED"]
    assert strict.alarms[0].ranks == (0, 1)
    assert lax.alarms == []


def report(watched: Watched, iterations: range, *ranks: int) -> None:
    """A second apart, `ranks` tell of these iterations."""
    for iteration in iterations:
        for rank in ranks:
            watched.watch.step(rank, line(iteration))
        watched.now += 1.0
        watched.watch.poll()


def test_a_rank_whose_updates_stop_while_others_go_on_is_stale_once() -> None:
    watched = Watched(staleness=5)
    report(watched, range(1, 4), 0, 1, 2)
    report(watched, range(4, 13), 0, 2)
    assert watched.names == [], "silent for nine seconds"
    report(watched, range(13, 40), 0, 2)
    (alarm,) = watched.alarms
    assert (alarm.alarm, alarm.ranks, alarm.workers, alarm.iteration) == (
        "STALENESS_THRESHOLD_EXCEEDED",
        (1,),
        ("bea",),
        13,
    )
    assert alarm.message == "rank 1 on bea: no update after 3, while others are at 13, over 5 apart"
    report(watched, range(40, 42), 0, 1, 2)
    report(watched, range(42, 60), 0, 2)
    assert watched.names == ["STALENESS_THRESHOLD_EXCEEDED"] * 2, "it was over in between"


def test_a_rank_that_has_never_reported_an_update_is_stale_too() -> None:
    watched = Watched()
    report(watched, range(1, 13), 0, 1)
    assert [alarm.ranks for alarm in watched.alarms] == [(2,)]
    assert "rank 2 on cyd: no update yet, while others are at 11" in watched.alarms[0].message


def test_ranks_that_all_wait_for_one_are_not_stale_nor_is_one_whose_events_come_late() -> None:
    waiting, late = Watched(), Watched()
    report(waiting, range(1, 4), 0, 1, 2)
    report(waiting, range(4, 5), 0, 2)
    waiting.now += 100.0
    waiting.watch.poll()
    for seconds in range(1, 60):
        for rank in NODES:
            # Fifty updates a second, of which rank 1's come in bulk, every three seconds.
            late.watch.step(rank, line(50 * (seconds - seconds % 3 if rank == 1 else seconds) + 1))
        late.now += 1.0
        late.watch.poll()
    assert "STALENESS_THRESHOLD_EXCEEDED" not in waiting.names + late.names


def test_ranks_are_checked_at_the_newest_update_that_all_have_reported() -> None:
    watched = Watched()
    for iteration in range(1, 40):
        for rank in NODES:
            # Of rank 1 only the first thirty have come yet; its loss is its own at each of them.
            if rank != 1 or iteration <= 30:
                watched.watch.step(rank, line(iteration, loss=float(iteration)))
    watched.now = 5.0
    metrics = watched.watch.poll()
    assert metrics is not None and metrics.kl_divergence == 0.0 and metrics.max_staleness == 0
    watched.now = 9.0
    assert watched.watch.poll() is None


def test_a_rank_without_reports_is_waited_for_and_one_without_targets_is_left_out() -> None:
    watched = Watched()
    watched.watch.step(0, line(1))
    watched.watch.step(1, line(1))
    watched.now = 2.0
    assert watched.watch.poll() is None
    assert watched.at(2, (2.0, 1.0), (2.0, 1.0), (None, None)).total_workers == 2


def test_it_checks_once_a_second_at_most_and_not_at_all_when_switched_off() -> None:
    watched, off = Watched(), Watched(enabled=False)
    assert watched.at(1, *GOOD) is not None
    for rank in NODES:
        watched.watch.step(rank, line(2))
    watched.now += 0.9
    assert watched.watch.poll() is None
    watched.now += 0.2
    assert watched.watch.poll() is not None
    assert off.at(1, *APART) is None


@pytest.mark.parametrize("hostile", [b'"update": ', b'{"update": 1}', b'{"iteration": [], "update": {}}', b"[" * 9000])
def test_a_line_that_is_none_is_nobodys_figure(hostile: bytes) -> None:
    watched = Watched()
    for rank in NODES:
        watched.watch.step(rank, hostile + b'"update": ')
        watched.watch.step(rank, hostile)
    watched.watch.step(99, line(1))
    watched.now = 2.0
    assert watched.watch.poll() is None and watched.alarms == []


def replica_check(**fields: Any) -> dict[str, Any]:
    return {"event": "replica_check", "iteration": 100, "agreed": False, "ranks": [1], "message": "rank 1 …", **fields}


def test_replicas_that_differ_are_one_alarm_whichever_ranks_tell_of_it() -> None:
    watched = Watched()
    watched.watch.replica_check(replica_check(iteration=50, agreed=True, ranks=[]))
    for iteration in (100, 100, 100, 150):
        watched.watch.replica_check(replica_check(iteration=iteration))
    (alarm,) = watched.alarms
    assert (alarm.alarm, alarm.ranks, alarm.workers) == ("REPLICAS_DIFFER", (1,), ("bea",))
    again = ConsistencyWatch(ConsistencyConfig(), NODES, watched.alarms.append, tuple(watched.alarms))
    again.replica_check(replica_check())
    assert len(watched.alarms) == 1


@pytest.mark.parametrize(
    "hostile", [{"ranks": "1"}, {"ranks": [9, -1, "x"]}, {"message": "\x1b[2J" + "x" * 9999}, {"iteration": "1"}]
)
def test_what_a_node_reports_is_bounded_and_plain(hostile: dict[str, Any]) -> None:
    watched = Watched()
    watched.watch.replica_check(replica_check(**hostile))
    for alarm in watched.alarms:
        assert "\x1b" not in alarm.message and len(alarm.message) <= 300
        assert set(alarm.ranks) <= set(NODES)


def test_the_alarms_of_an_attempt_are_bounded() -> None:
    watched = Watched(wasserstein=1e9)
    for iteration in range(1, 4 * (ALARM_LIMIT + 20)):
        watched.at(iteration, *(GOOD if iteration % 4 == 0 else APART))
    assert len(watched.alarms) == ALARM_LIMIT
    assert "no more alarms" in watched.alarms[-1].message
