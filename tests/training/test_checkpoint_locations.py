"""Copies of checkpoints behind a URL."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.protocol.job import JobError
from engine.trainer.checkpoint import store
from engine.trainer.checkpoint.store import CheckpointFolder
from engine.training.checkpoint_files import MANIFEST_NAME
from tests.training.states import corrupt, events, locations, names, origin, periodic, reporter, snapshot, tamper
from tests.training.together import together


def test_a_url_holds_complete_copies_and_the_newest_is_fetched(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/elsewhere/run"
    checkpoints = periodic(tmp_path, url=url)
    for update in (2, 4, 6):
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    there = tmp_path / "elsewhere" / "run"
    assert names(there) == [4, 6]
    assert events(tmp_path / "e0")[-1]["path"] == f"file://{tmp_path}/elsewhere/run/step-000000006"

    def fetch(name: str, count: int) -> list[int]:
        assert CheckpointFolder(tmp_path / name, url).fetch(count, reporter(tmp_path / "e"))
        return names(tmp_path / name)

    def fetched() -> int:
        reported = events(tmp_path / "e")
        assert {event["event"] for event in reported} == {"fetched"}
        return len(reported)

    assert fetch("new", 1) == [6] and fetched() == 2
    assert store.verify(tmp_path / "new" / "step-000000006").manifest.update == 6
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-000000006"], "nothing else is left there"
    # What is here already and verifies is not fetched again; what does not verify is.
    assert fetch("new", 2) == [4, 6] and fetched() == 4
    (tmp_path / "new" / "step-000000006" / "weights.safetensors").write_bytes(b"short")
    assert fetch("new", 2) == [4, 6] and fetched() == 6
    store.verify(tmp_path / "new" / "step-000000006")


@pytest.mark.parametrize("message", ["its manifest says", "its hash is not the manifest's"])
def test_a_damaged_copy_does_not_hide_the_one_before(tmp_path: Path, message: str) -> None:
    there = tmp_path / "elsewhere" / "run"
    for update in (2, 4, 6):
        last = store.write(there, snapshot(update), origin())
    if message == "its manifest says":
        (last.path / "weights.safetensors").write_bytes(b"short")
    else:
        corrupt(last)
    here = locations(tmp_path / "home", f"file://{tmp_path}/elsewhere", checkpoint_keep=2)
    together(1, lambda rank: here.fetch(rank, reporter(tmp_path / "e"), replicated=True))
    assert names(here.base) == [2, 4]
    reported = events(tmp_path / "e")
    (warning,) = [event["message"] for event in reported if event["event"] == "warning"]
    assert message in warning and "step-000000006" in warning
    assert "step-000000004/weights.safetensors" in [event["path"] for event in reported if event["event"] == "fetched"]


def test_a_copy_that_is_not_what_the_journal_recorded_is_fetched_anew_or_refused(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere" / "run"
    written = [store.write(there, snapshot(update), origin()) for update in (2, 4)]
    recorded = [tuple(each.manifest.journal_entry().values()) for each in written]
    here = locations(tmp_path / "home", f"file://{tmp_path}/elsewhere", checkpoint_keep=1, manifests=recorded)

    def fetch() -> list[int]:
        together(1, lambda rank: here.fetch(rank, reporter(tmp_path / "e"), replicated=True))
        return names(here.base)

    assert fetch() == [4]
    tamper(here.base / "step-000000004")
    assert fetch() == [4]
    store.verify(here.base / "step-000000004").manifest.check_recorded(recorded)
    shutil.rmtree(here.base)
    tamper(written[1].path)
    assert fetch() == [2]
    (warning,) = [event["message"] for event in events(tmp_path / "e") if event["event"] == "warning"]
    assert warning.startswith("the copy of step-000000004 is not used: its manifest is not the one")


def test_a_missing_part_at_the_url_leaves_the_state_before_it(tmp_path: Path) -> None:
    for part, updates in enumerate([(4, 6), (4,)]):
        for update in updates:
            store.write(tmp_path / "elsewhere" / "run" / f"part{part}", snapshot(update), origin(part, 2))
    here = locations(tmp_path / "home", f"file://{tmp_path}/elsewhere", checkpoint_keep=2)
    together(1, lambda rank: here.fetch(rank, reporter(tmp_path / "e"), replicated=False))
    assert [names(here.folder(part, 2).path) for part in (0, 1)] == [[4, 6], [4]]


def test_a_copy_has_no_manifest_while_it_is_replaced(tmp_path: Path) -> None:
    remote = CheckpointFolder(tmp_path / "here", f"file://{tmp_path}/elsewhere")
    remote.put(store.write(tmp_path / "a", snapshot(4), origin()))
    other = store.write(tmp_path / "b", snapshot(4, value=9.0), origin())
    (other.path / "weights.safetensors").unlink()
    with pytest.raises(OSError, match=r"weights\.safetensors"):
        remote.put(other)
    assert not (tmp_path / "elsewhere" / other.path.name / MANIFEST_NAME).exists()


def test_copies_of_a_complete_state_are_kept_until_a_newer_one_is_complete(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path, parts=2, url=f"file://{tmp_path}/elsewhere")
    for update in (2, 4, 6, 8):
        checkpoints.sync(2.0, 1.0, 2)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    assert names(tmp_path / "elsewhere") == [2, 4, 6, 8]


def test_a_new_checkpoint_is_kept_and_later_updates_are_removed_here_and_at_the_url(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    for folder in (tmp_path / "p0", there):
        for update in (20, 30, 40):
            store.write(folder, snapshot(update), origin(job="another"))
    checkpoints = periodic(tmp_path, url=f"file://{there}")
    for update in (2, 4):
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
        assert update in names(tmp_path / "p0")
        assert update in names(there)
    assert names(tmp_path / "p0") == names(there) == [2, 4]


@pytest.mark.parametrize("url", ["s3://bucket/folder", "nonsense://x"])
def test_an_unreachable_url_is_an_error_of_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(JobError, match=r"^\[checkpoint\] destination: ") as refused:
        locations(tmp_path, url).folder(0, 1)
    assert "\n" not in str(refused.value)
