"""Sleep of the head and of nodes, as SIGSTOP shows it: shorter and longer than the lease, and never two attempts at
once. What only a Mac can show is that its CLOCK_MONOTONIC goes on in sleep: clock_gettime(3) says so.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.models import Reason, RunState
from engine.protocol.attempt import read_exit
from engine.run.events import AttemptFailed, AttemptPlanned, RankExited, RankLaunched
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ring_config, start_on
from tests.faults.local_runs import SHORT_GRACES, Run, ring, start_run

SHORT = SHORT_GRACES.model_copy(update={"lease_s": 4.0, "restart_commands": True, "backoff_s": 0.1})
SHORTER_S, LONGER_S = 2.5, 9.0


@contextmanager
def asleep(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def started(home: Path, tmp_path: Path) -> Run:
    run = start_run(home, tmp_path, script=ring(), recovery=SHORT)
    run.await_output("step")
    return run


def succeeded(run: Run, attempts: int) -> None:
    run.finish()
    record = run.ended()
    assert (record.state, record.attempts) == (RunState.SUCCEEDED, attempts), run.troubles()
    never_two_attempts(run)


def never_two_attempts(run: Run) -> None:
    """Every rank of an attempt has ended before one of the next has started."""
    running: dict[int, int] = {}
    for event in run.events:
        if isinstance(event, AttemptPlanned):
            assert not any(running.values()), run.troubles()
        elif isinstance(event, RankLaunched):
            running[event.rank] = 1
        elif isinstance(event, RankExited):
            running[event.rank] = 0


@pytest.mark.parametrize("seconds", [pytest.param(SHORTER_S, marks=pytest.mark.slow), LONGER_S])
def test_a_head_that_slept_goes_on_with_the_run(home: Path, tmp_path: Path, seconds: float) -> None:
    run = started(home, tmp_path)
    with asleep(run.supervisor):
        time.sleep(seconds)
    if seconds < SHORT.lease_s:
        succeeded(run, attempts=1)
        return
    run.wait(lambda: len(run.events_of(RankLaunched)) == 4)
    succeeded(run, attempts=2)
    (failed,) = run.events_of(AttemptFailed)
    assert (failed.verdict.reason, failed.verdict.rank) == (Reason.HEAD_SLEPT, None), failed
    assert "slept" in (failed.verdict.cause or "")
    assert any("this machine slept" in note for note in run.notes)


@pytest.mark.busy
@pytest.mark.slow
def test_a_keeper_that_slept_for_longer_than_the_lease_finds_its_heartbeats(home: Path, tmp_path: Path) -> None:
    run = started(home, tmp_path)
    with asleep(run.identity(1).keeper_pid):
        time.sleep(LONGER_S)
    succeeded(run, attempts=1)


# The keeper's part is in tests/agent/test_keeper.py, the head's is that of a node without network for as long.
@pytest.mark.busy
@pytest.mark.slow
def test_a_node_that_slept_for_less_than_the_lease_goes_on(nodes: Cluster, home: Path) -> None:
    patient = SHORT.model_copy(update={"lease_s": 10.0})
    run = start_on(nodes, home, ring_config(nodes, recovery=patient, names=("ana", "bea")))
    run.everybody_steps()
    nodes["bea"].sleep()
    time.sleep(SHORTER_S)
    nodes["bea"].wake()
    succeeded(run, attempts=1)


ALONE = """
import os, time
while not os.path.exists("enough"):
    print("attempt", os.environ["FLIGHTDECK_SPEC"].split("/")[-2], time.time(), flush=True)
    time.sleep(0.02)
"""
"""A rank that no peer ends."""


@pytest.mark.slow
def test_a_node_that_wakes_after_the_others_went_on_ends_its_rank(nodes: Cluster, home: Path) -> None:
    recovery = SHORT.model_copy(update={"min_nodes": 3})
    run = start_on(nodes, home, ring_config(nodes, script=ALONE, recovery=recovery))
    for rank in range(4):
        run.await_output("attempt 1", rank)
    bea = nodes["bea"]
    rank = run.nodes.index(bea)
    bea.sleep()
    run.wait(lambda: len(run.events_of(RankLaunched)) == 7, 90.0)
    woke_at = time.time()
    bea.wake()
    run.wait(lambda: run.files_of(rank).exit(rank).exists())
    record = read_exit(run.files_of(rank).exit(rank))
    assert record is not None and record.stopped_by in ("lease", "end")
    assert record.ended_at - woke_at < SHORT.lease_s, "not by the lease as it was before the sleep"
    for node in run.nodes:
        node.write(f"{run.workdir}/enough", "")
    run.wait(lambda: run.record.state.ended, after_end=True)
    assert (run.record.state, run.record.attempts) == (RunState.SUCCEEDED, 2), run.troubles()
    (failed,) = run.events_of(AttemptFailed)
    assert (failed.verdict.reason, failed.verdict.host) == (Reason.NODE_LOST, "bea")
