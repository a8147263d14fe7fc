"""Faults of the network and the nodes under a run over ssh: nothing is lost or restarted, or the cause is recorded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.config.models import RecoveryConfig
from engine.models import Reason, RunState
from engine.run.events import LogsMissing, StopStage, StopStageReached
from engine.run.supervisor_process import adopt_orphans, request_abort
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ring_config, start_on
from tests.faults.local_runs import SHORT_GRACES, kill_and_await, ring

SHORT_LEASE = SHORT_GRACES.model_copy(update={"lease_s": 8.0})


@pytest.mark.parametrize(
    ("seconds", "names"), [(2.0, ("ana", "cyd")), pytest.param(10.0, (), marks=pytest.mark.slow)], ids=["two", "four"]
)
def test_some_seconds_without_a_node_lose_no_line_and_restart_nothing(
    nodes: Cluster, home: Path, seconds: float, names: tuple[str, ...]
) -> None:
    run = start_on(nodes, home, ring_config(nodes, names=names))
    run.everybody_steps()
    nodes["cyd"].cut()
    time.sleep(seconds)
    nodes["cyd"].flush_rules()
    for rank in range(len(run.nodes)):
        run.await_more_output(rank)
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 1), run.troubles()
    assert run.conditions("cyd") == ["connected"], "it was away for less than what counts as unreachable"


@pytest.mark.slow
def test_a_node_that_is_cut_off_for_good(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes, recovery=SHORT_LEASE))
    run.everybody_steps()
    bea = nodes["bea"]
    bea.cut()
    assert run.await_condition("bea", "unreachable") <= 25.0
    run.wait(lambda: run.left_on(bea) == [], within_s=15.0, after_end=True)
    run.wait(lambda: run.record.state.ended)
    record = run.record
    assert (record.state, record.reason, record.rank, record.host) == (
        RunState.FAILED,
        Reason.NODE_LOST,
        1,
        "bea",
    ), run.troubles()
    assert record.unconfirmed == ["bea"]
    assert [run.left_on(node) for node in run.nodes if node is not bea] == [[], [], []]
    bea.flush_rules()
    run.wait(lambda: run.record.unconfirmed == [], after_end=True)
    run.mirrors_are_equal()
    assert b'"stopped_by": "lease"' in run.files_of(1).exit(1).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_connections_that_are_reset_cost_nothing(nodes: Cluster, home: Path, again: bool) -> None:
    run = start_on(nodes, home, ring_config(nodes))
    run.everybody_steps()
    for _ in range(3):
        for node in nodes.nodes:
            node.reset_ssh()
            if again:
                node.restart_sshd()
        for rank in range(4):
            run.await_more_output(rank)
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 1), run.troubles()


@pytest.mark.slow
def test_an_abort_without_one_of_the_nodes_is_proved_on_the_others_at_once(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes, recovery=RecoveryConfig()))
    run.everybody_steps()
    dov = nodes["dov"]
    dov.cut()
    request_abort(run.dir, by="test")
    run.wait(lambda: run.record.state.ended, within_s=15.0)
    assert [run.left_on(node) for node in run.nodes if node is not dov] == [[], [], []]
    assert (run.record.state, run.record.unconfirmed) == (RunState.ABORTED, ["dov"])
    kill_and_await(run.supervisor)
    assert adopt_orphans(home) == [run.dir.id], "there is still something to do"
    dov.flush_rules()
    run.wait(lambda: run.record.unconfirmed == [], within_s=60.0, after_end=True)
    assert run.left() == []
    run.mirrors_are_equal()
    run.wait(lambda: adopt_orphans(home) == [], after_end=True)


@pytest.mark.slow
def test_a_node_without_power_is_lost_and_confirmed_when_it_is_back(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes, recovery=SHORT_LEASE))
    run.everybody_steps()
    nodes["ana"].power_off()
    assert run.await_condition("ana", "unreachable") <= 25.0
    run.wait(lambda: run.record.state.ended)
    record = run.record
    assert (record.reason, record.rank, record.host, record.unconfirmed) == (Reason.NODE_LOST, 0, "ana", ["ana"])
    nodes["ana"].power_on()
    run.wait(lambda: run.record.unconfirmed == [], after_end=True)


@pytest.mark.slow
def test_a_node_that_was_restarted_is_named_at_once(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes))
    run.everybody_steps()
    nodes["ana"].power_off()
    nodes["ana"].power_on()
    record = run.ended()
    assert (record.reason, record.rank, record.host) == (Reason.NODE_LOST, 0, "ana"), run.troubles()
    assert record.cause is not None and "restarted" in record.cause


@pytest.mark.slow
def test_a_supervisor_killed_while_a_node_is_away(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes))
    run.everybody_steps()
    nodes["bea"].cut()
    kill_and_await(run.supervisor)
    adopt_orphans(home)
    time.sleep(5.0)
    nodes["bea"].flush_rules()
    for rank in range(4):
        run.await_more_output(rank)
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, 1), run.troubles()


@pytest.mark.slow
def test_sshd_away_for_a_while_is_no_dead_rank(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes))
    run.everybody_steps()
    nodes["dov"].stop_sshd()
    nodes["dov"].reset_ssh()
    run.await_condition("dov", "unreachable", within_s=25.0)
    nodes["dov"].start_sshd()
    run.await_condition("dov", "connected", within_s=20.0)
    run.finish()
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()


@pytest.mark.slow
def test_a_node_that_goes_away_in_the_middle_of_its_logs_sends_the_rest_later(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes, script=f"{ring('pass')}\nprint('last words ' * 200_000)\n"))
    run.everybody_steps()
    dov = nodes["dov"]
    dov.slow_link("1mbit")
    run.finish()
    run.wait(lambda: any(event.stage is StopStage.STOPPED for event in run.events_of(StopStageReached)))
    dov.cut()
    run.wait(lambda: run.record.state.ended)
    assert (run.record.state, run.record.unconfirmed) == (RunState.SUCCEEDED, []), run.troubles()
    assert run.events_of(LogsMissing)[0].files.keys() == {"rank3.log"}, run.troubles()
    dov.flush_rules()
    dov.full_speed()
    run.wait(lambda: run.events_of(LogsMissing)[-1].files == {}, after_end=True)
    run.mirrors_are_equal()
