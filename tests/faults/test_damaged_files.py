"""Files of a run that are missing or damaged while its ranks live: which is reported, no rank trains on unseen, and an
abort ends and proves.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.api import Engine
from engine.models import Reason, RunState
from engine.run.events import AttemptPlanned
from engine.run.run_plan import copy_of, read_plan
from engine.run.supervisor_process import adopt_orphans, start_supervisor
from engine.run.watch import RunWatch
from engine.snapshots import RunSnapshot
from engine.store.layout import RunDir
from tests.cluster.cluster import Cluster
from tests.faults.cluster_runs import ring_config, start_on
from tests.faults.local_runs import Run, kill_and_await, ring, start_run
from tests.waiting import wait_until

Damage = Callable[[RunDir], None]


def shown(run: Run) -> RunSnapshot:
    return RunWatch(run.dir).poll()


def await_end(run: Run) -> RunSnapshot:
    wait_until(lambda: shown(run).record.state.ended, 60.0)
    assert run.left() == []
    return shown(run)


def lines_of(path: Path, damaged: Callable[[int, bytes], bool]) -> None:
    """Overwrite these lines of a journal with zeros, as a disk may."""
    lines = enumerate(path.read_bytes().splitlines())
    path.write_bytes(b"".join((b"\0" * 9 if damaged(*each) else each[1]) + b"\n" for each in lines))


def running(home: Path, folder: Path) -> Run:
    run = start_run(home, folder, script=ring())
    run.await_output("step")
    return run


def in_plan(run: RunDir) -> None:
    run.plan.write_text("{")


def without_plan(run: RunDir) -> None:
    run.plan.unlink()


def in_first_line(run: RunDir) -> None:
    lines_of(run.journal, lambda number, _line: number == 0)


def in_attempt(run: RunDir) -> None:
    lines_of(run.journal, lambda _number, line: AttemptPlanned.kind.encode() in line[:20])


def emptied(run: RunDir) -> None:
    os.truncate(run.journal, 0)


def without_journal(run: RunDir) -> None:
    run.journal.unlink()


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        pytest.param(in_plan, "plan.json: the plan is not valid", marks=pytest.mark.slow),
        (without_plan, "plan.json: the plan cannot be read"),
        pytest.param(in_first_line, "journal.jsonl: line 1 is damaged", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_which_everything_is_known_from_another_file_goes_on(
    home: Path, tmp_path: Path, damage: Damage, reported: str
) -> None:
    run = running(home, tmp_path)
    kill_and_await(run.supervisor)
    damage(run.dir)
    engine = Engine(home)
    assert [record.state for record in engine.runs.all()] == [RunState.RUNNING]
    assert reported in "; ".join(engine.notices) and reported in "; ".join(shown(run).damage)
    assert adopt_orphans(home) == [run.dir.id]
    assert read_plan(run.dir.plan) == run.plan and run.dir.plan.read_bytes() == copy_of(run.dir.plan).read_bytes()
    run.finish()
    assert await_end(run).record.state is RunState.SUCCEEDED
    assert reported.encode() in run.dir.journal.read_bytes(), "adoption records what it has found"


@pytest.mark.parametrize(
    ("damage", "abort"),
    [
        (without_journal, True),
        *(
            pytest.param(damage, abort, marks=pytest.mark.slow)
            for damage, abort in itertools.product([in_attempt, emptied, without_journal], [False, True])
            if (damage, abort) != (without_journal, True)
        ),
    ],
)
def test_an_attempt_that_is_not_known_is_ended_and_proved_by_its_nonce(
    home: Path, tmp_path: Path, damage: Damage, abort: bool
) -> None:
    run = running(home, tmp_path)
    kill_and_await(run.supervisor)
    damage(run.dir)
    assert any("attempt 1" in text for text in shown(run).damage)
    if abort:
        asyncio.run(abort_by(Engine(home), run))
    else:
        assert adopt_orphans(home) == [run.dir.id]
    record = await_end(run).record
    ended = (RunState.ABORTED, Reason.USER_ABORT) if abort else (RunState.LOST, Reason.SUPERVISOR_LOST)
    assert ((record.state, record.reason), record.unconfirmed) == (ended, [])
    assert record.cause is not None and "attempt 1 is not in journal.jsonl" in record.cause
    assert run.files.fenced.exists(), "none of its ranks may start late"
    wait_until(lambda: not shown(run).supervised, 60.0)
    run.finish()
    start_supervisor(run.dir, "--resume")
    snapshot = await_end(run)
    assert (snapshot.record.state, snapshot.record.attempts) == (RunState.SUCCEEDED, 2), "a number of its own"


@pytest.mark.slow
def test_an_attempt_that_is_not_known_is_fenced_and_ended_on_its_nodes(nodes: Cluster, home: Path) -> None:
    run = start_on(nodes, home, ring_config(nodes, names=("ana", "bea")))
    run.await_output("step")
    files = [run.files_of(rank) for rank in (0, 1)]
    kill_and_await(run.supervisor)
    without_journal(run.dir)
    assert adopt_orphans(home) == [run.dir.id]
    assert await_end(run).record.state is RunState.LOST
    assert run.record.unconfirmed == [] and all(each.fenced.exists() for each in files)


@pytest.mark.parametrize("known", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_that_succeeded_has_succeeded_as_far_as_its_exit_records_show(
    home: Path, tmp_path: Path, known: bool
) -> None:
    run = start_run(home, tmp_path, script="print('done')")
    run.ended()
    wait_until(lambda: not shown(run).supervised, 60.0)
    without_journal(run.dir)
    if not known:
        run.files.exit(1).unlink()
    assert adopt_orphans(home) == [run.dir.id]
    record = await_end(run).record
    assert record.state is (RunState.SUCCEEDED if known else RunState.LOST)
    assert record.cause is not None and "attempt 1 is not in journal.jsonl" in record.cause
    assert ("every rank shows that it completed" in record.cause) is known
    wait_until(lambda: not shown(run).supervised, 60.0)
    assert adopt_orphans(home) == []


def test_a_supervisor_whose_own_file_is_gone_is_not_taken_for_dead(home: Path, tmp_path: Path) -> None:
    run = running(home, tmp_path)
    run.dir.supervisor.unlink()
    snapshot = shown(run)
    assert snapshot.supervised and any("supervisor.json cannot be read" in text for text in snapshot.damage)
    assert adopt_orphans(home) == []
    asyncio.run(abort_by(Engine(home), run))
    assert await_end(run).record.state is RunState.ABORTED


def test_a_run_without_any_plan_is_shown_as_lost_once_nobody_watches_it(home: Path, tmp_path: Path) -> None:
    run = running(home, tmp_path)
    run.dir.plan.unlink()
    copy_of(run.dir.plan).unlink()
    engine = Engine(home)
    assert [record.state for record in engine.runs.all()] == [RunState.RUNNING], "its supervisor lives"
    kill_and_await(run.supervisor)
    (record,) = engine.runs.all()
    assert record.state is RunState.LOST and record.cause is not None and "plan.json" in record.cause
    assert any("plan.json" in notice for notice in engine.notices)


async def abort_by(engine: Engine, run: Run) -> None:
    async for _ in engine.runs.abort(run.dir.id):
        pass
