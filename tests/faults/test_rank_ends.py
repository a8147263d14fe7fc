"""However a rank ends, the run records which one, where and why; mlx.launch exits with 0 in all of these cases."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from engine.models import Reason, RunState
from engine.run.events import LauncherStarted, RankExited
from engine.store.layout import LAUNCHER_SOURCE
from tests.faults.local_runs import Run, kill_and_await, ring, start_run, two_nodes
from tests.unit.launch.host_layouts import ring_ports


def blames_the_right_node(run: Run, reason: Reason) -> str:
    """Awaits the end; the run must have failed for `reason` on rank 1. Its cause."""
    record = run.ended()
    assert (record.state, record.reason) == (RunState.FAILED, reason), (record, run.troubles())
    assert (record.rank, record.host) == (1, "right")
    assert record.cause is not None
    return record.cause


def test_ranks_that_exit_with_0_have_succeeded(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring("print('x' * 1000)"))
    run.await_output("step 10")
    run.finish()
    record = run.ended()
    assert (record.state, record.reason, record.attempts) == (RunState.SUCCEEDED, Reason.COMPLETED, 1)
    assert record.started_at is not None and record.ended_at is not None and record.started_at < record.ended_at
    assert run.dir.log(LAUNCHER_SOURCE).stat().st_size < 1000, "what the ranks print does not come through mlx.launch"
    assert "\nsleep prevented: " in f"\n{run.dir.supervisor_log.read_text()}", "while it watches, too"


@pytest.mark.slow
def test_a_rank_that_raises_is_quoted(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring("if rank == 1 and step == 8: raise ValueError('no such word: raven')"))
    cause = blames_the_right_node(run, Reason.RANK_FAILED)
    assert cause == "exited with code 1: ValueError: no such word: raven"


def test_a_rank_that_exits_3_under_a_long_traceback_and_who_waits_for_output_is_told(
    home: Path, tmp_path: Path
) -> None:
    fault = "if rank == 1 and step == 8: sys.stderr.write('  File x\\n' * 20000 + 'KeyError: 7\\n'); os._exit(3)"
    run = start_run(home, tmp_path, script=ring(fault))
    with pytest.raises(AssertionError, match=r"the run has ended: failed\n(?s:.*)code.*3"):
        run.await_output("what does not come")
    assert blames_the_right_node(run, Reason.RANK_FAILED) == "exited with code 3: KeyError: 7"
    assert run.record.exit_code == 3


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.identity(1).trainer_pid)
    assert blames_the_right_node(run, Reason.RANK_KILLED) == "killed by SIGKILL (signal 9)"
    assert (run.record.signal, run.record.exit_code) == (signal.SIGKILL, None)


def test_a_rank_that_leaves_early_with_0_is_the_first_failure(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring("if rank == 1 and step == 8: os._exit(0)"))
    assert "left early with exit code 0" in blames_the_right_node(run, Reason.RANK_FAILED)


def test_a_missing_interpreter_is_named_with_its_node(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring(), nodes=two_nodes(tmp_path, sys.executable, "/no/such/python"))
    cause = blames_the_right_node(run, Reason.LAUNCH_FAILED)
    assert cause == "the interpreter /no/such/python is missing on right"
    assert run.record.fix is not None and "absolute path" in run.record.fix
    assert run.record.exit_code == 127
    ended = [(event.rank, event.code) for event in run.events_of(RankExited)]
    assert ended.count((1, 127)) == 1


def test_a_busy_ring_port_is_named_with_its_holder(home: Path, tmp_path: Path) -> None:
    first = ring_ports(2)
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", first + 1))
        squatter.listen(1)
        run = start_run(home, tmp_path, script=ring(), starting_port=first)
        cause = blames_the_right_node(run, Reason.LAUNCH_FAILED)
    assert cause.startswith(f"port {first + 1} is in use by pid {os.getpid()} (")
    assert run.record.fix is not None


def test_a_killed_keeper_ends_the_run_and_its_rank(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.identity(1).keeper_pid)
    assert "keeper was killed" in blames_the_right_node(run, Reason.RANK_KILLED)


@pytest.mark.slow
def test_a_killed_launcher_is_noted_and_the_ranks_go_on(home: Path, tmp_path: Path) -> None:
    run = start_run(home, tmp_path, script=ring())
    run.await_output("step")
    kill_and_await(run.launcher)
    run.wait(lambda: any("mlx.launch has ended" in note for note in run.notes))
    run.finish()
    assert run.ended().state is RunState.SUCCEEDED, run.troubles()


@pytest.fixture
def sleeper(tmp_path: Path) -> str:
    """An interpreter with which no keeper ever comes to anything."""
    path = tmp_path / "python"
    keeper = 'case "$*" in *engine.node.keeper*) exec sleep 600 ;; esac'
    path.write_text(f'#!/bin/sh\n{keeper}\nexec {sys.executable} "$@"\n')
    path.chmod(0o700)
    return str(path)


def test_a_launcher_that_is_killed_before_the_ranks_have_started(home: Path, tmp_path: Path, sleeper: str) -> None:
    run = start_run(home, tmp_path, script=ring(), nodes=two_nodes(tmp_path, sleeper, sleeper))
    run.wait(lambda: bool(run.events_of(LauncherStarted)))
    kill_and_await(run.launcher)
    record = run.ended()
    assert (record.state, record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED)
    assert record.cause is not None and "mlx.launch ended before the ranks had started" in record.cause


@pytest.mark.slow
def test_a_rank_that_never_appears_is_named(home: Path, tmp_path: Path, sleeper: str) -> None:
    run = start_run(home, tmp_path, script=ring(), nodes=two_nodes(tmp_path, sys.executable, sleeper))
    # Rank 0 gives up on its peer before the limit; its end is the consequence of rank 1's.
    record = run.ended(within_s=90.0)
    assert (record.state, record.reason) == (RunState.FAILED, Reason.LAUNCH_FAILED)
    assert (record.rank, record.host) == (1, "right")


@pytest.mark.parametrize("fault", ["import signal; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]"])
@pytest.mark.slow
def test_survivors_deaf_to_signals_are_ended_too(home: Path, tmp_path: Path, fault: str) -> None:
    script = fault + "\n" + ring("if step == 8: (os._exit(3) if rank == 1 else time.sleep(600))")
    run = start_run(home, tmp_path, script=script)
    blames_the_right_node(run, Reason.RANK_FAILED)
