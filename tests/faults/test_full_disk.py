"""The head's disk is full: training is not stopped, the gap is closed when there is room, the end is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.models import RunState
from engine.run.events import LogsMissing
from engine.run.supervisor_process import adopt_orphans
from engine.run.watch import RunWatch
from engine.store.layout import LAUNCHER_SOURCE
from tests.faults.local_runs import kill_and_await, ring, start_run
from tests.needs import mounted_disk

pytestmark = pytest.mark.needs("tmpfs")

SIZE = 512 * 1024


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    """The runs' directory on a disk of half a MiB; the node's own files are elsewhere."""
    with mounted_disk(home / "runs", str(SIZE)):
        yield home


def fill(directory: Path) -> Path:
    """Leave no byte of room there."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (65_536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_the_run_goes_on_and_its_end_is_in_the_journal(small_disk: Path, tmp_path: Path) -> None:
    run = start_run(small_disk, tmp_path, script=ring())
    run.await_output("step")
    fill(run.dir.path.parent)
    before = run.files.log(0).stat().st_size
    run.wait(lambda: run.files.log(0).stat().st_size > before + 200)
    run.finish()
    run.wait(lambda: run.record.state.ended)
    assert run.record.state is RunState.SUCCEEDED, run.troubles()


def test_nothing_is_missing_once_there_is_room_again(small_disk: Path, tmp_path: Path) -> None:
    run = start_run(small_disk, tmp_path, script=ring("print('x' * 1000)"))
    run.await_output("step")
    filler = fill(run.dir.path.parent)
    before = run.files.log(0).stat().st_size
    run.wait(lambda: run.files.log(0).stat().st_size > before + 60_000)
    filler.unlink()
    run.finish()
    assert run.ended().state is RunState.SUCCEEDED
    notes = run.notes
    assert any("rank0.log" in note for note in notes), notes
    assert run.dir.log(LAUNCHER_SOURCE).exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["by its supervisor", "by the next supervisor"])
def test_what_is_missing_at_the_end_is_said_and_copied_when_there_is_room(
    small_disk: Path, tmp_path: Path, killed: bool
) -> None:
    run = start_run(small_disk, tmp_path, script=ring("print('x' * 1000)"))
    run.await_output("step")
    filler = fill(run.dir.path.parent)
    before = run.files.log(0).stat().st_size
    run.wait(lambda: run.files.log(0).stat().st_size > before + 60_000)
    run.finish()
    run.wait(lambda: run.record.state.ended)
    damage = "; ".join(RunWatch(run.dir).poll().damage)
    assert "rank0.log lacks " in damage and f"{run.files.log(0)} has all" in damage
    if killed:
        kill_and_await(run.supervisor)
    filler.unlink()
    assert adopt_orphans(small_disk) == ([run.dir.id] if killed else [])
    run.wait(lambda: run.events_of(LogsMissing)[-1].files == {}, after_end=True)
    run.mirrors_are_equal()
    assert not RunWatch(run.dir).poll().damage
