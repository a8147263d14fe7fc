"""What is acknowledged is there afterwards, whatever happens to the file or to a writer."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import StateError
from engine.models import RunRecord, RunState
from engine.store.storage import Unreadable, decode, encode, write_lock
from engine.store.store import Store
from tests.needs import mounted_disk
from tests.unit.store.records import record


def ids(store: Store) -> list[str]:
    return sorted(run.id for run in store.runs())


def test_an_empty_home_has_no_runs_and_reading_makes_nothing(home: Path) -> None:
    store = Store(home)
    assert store.runs() == []
    assert store.notices == []
    assert not home.exists()


def test_a_record_comes_back_as_it_was_and_a_second_put_replaces_it(home: Path) -> None:
    whole = record(1, cause="rank 1 was killed", host="node1", train_loss=1.25, unconfirmed=["node1"], exit_code=3)
    Store(home).put_run(record(1, state=RunState.RUNNING, train_loss=4.5, iteration=3))
    Store(home).put_run(whole)
    assert Store(home).runs() == [whole]


def test_runs_are_newest_first(home: Path) -> None:
    store = Store(home)
    for number in (2, 3, 1):
        store.put_run(record(number))
    assert [run.id for run in store.runs()] == ["run-00003", "run-00002", "run-00001"]


def test_tags_and_a_note_stay_when_the_record_is_written_again_and_go_with_the_run(home: Path) -> None:
    store = Store(home)
    store.rebuild([record(1), record(2)])
    store.annotate("run-00001", add=["night", "base"], note="slow")
    Store(home).put_run(record(1, state=RunState.FAILED))
    run = next(run for run in store.runs() if run.id == "run-00001")
    assert (run.state, run.tags, run.note) == (RunState.FAILED, ["base", "night"], "slow")
    store.delete_run("run-00001")
    store.put_run(record(1))
    assert [(run.id, run.tags, run.note) for run in store.runs()] == [("run-00002", [], None), ("run-00001", [], None)]


def test_of_thousands_only_a_record_that_has_changed_is_checked_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(home).rebuild([record(number) for number in range(100)])
    before = {run.id: run for run in Store(home).runs()}
    Store(home).put_run(record(7, train_loss=1.5))
    checked: list[object] = []
    validate = RunRecord.model_validate

    def check(row: dict[str, object]) -> RunRecord:
        checked.append(row["id"])
        return validate(row)

    monkeypatch.setattr(RunRecord, "model_validate", check)
    after = {run.id: run for run in Store(home).runs()}
    assert checked == ["run-00007"]
    assert after["run-00007"].train_loss == 1.5
    assert all(after[run] is before[run] for run in before if run != "run-00007")


def test_the_file_is_private_and_one_json_document(home: Path) -> None:
    Store(home).put_run(record(1))
    assert home.stat().st_mode & 0o777 == 0o700
    assert (home / "state.json").stat().st_mode & 0o777 == 0o600
    assert "run-00001" in json.loads((home / "state.json").read_text())["body"]["runs"]


def test_a_loss_that_is_not_finite_is_no_loss(home: Path) -> None:
    Store(home).put_run(record(1, train_loss=math.nan))
    (found,) = Store(home).runs()
    assert found.train_loss is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content.replace(b"succeeded", b"sacceeded", 1),
        lambda content: b"\0" * len(content),
        lambda content: content + b"x",
        lambda content: b"\xff\xfe",
        lambda content: b'{"runs": {}}',
    ],
    ids=["empty", "truncated", "torn by one byte", "altered", "zeroed", "extended", "not text", "of no known form"],
)
class TestDamaged:
    def test_the_copy_before_is_loaded_with_a_notice_and_the_damaged_file_kept(
        self, home: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        for number in (1, 2, 3):
            Store(home).put_run(record(number))
        path = home / "state.json"
        damaged = damage(path.read_bytes())
        path.write_bytes(damaged)

        reader = Store(home)
        assert ids(reader) == ["run-00001", "run-00002"]
        assert "unreadable" in str(reader.notices[0])
        assert "the copy before the last change was loaded" in str(reader.notices[1])

        writer = Store(home)
        writer.put_run(record(4))
        assert ids(Store(home)) == ["run-00001", "run-00002", "run-00004"]
        (kept,) = home.glob("state.json.corrupt-*")
        assert kept.read_bytes() == damaged
        assert kept.name in str(writer.notices[-1])
        later = Store(home)
        later.runs()
        assert later.notices == []

    def test_with_both_lost_there_is_a_notice_and_the_runs_can_be_put_back(
        self, home: Path, damage: Callable[[bytes], bytes]
    ) -> None:
        for number in (1, 2, 3):
            Store(home).put_run(record(number))
        for name in ("state.json", "state.json.previous"):
            (home / name).write_bytes(damage((home / name).read_bytes()))
        store = Store(home)
        assert store.runs() == []
        assert "lost" in str(store.notices[-1])
        store.rebuild([record(1), record(2)])
        store.rebuild([record(2, state=RunState.FAILED), record(3)])
        assert ids(Store(home)) == ["run-00001", "run-00002", "run-00003"]
        assert record(2, state=RunState.FAILED) in Store(home).runs()
        assert len(list(home.glob("*.corrupt-*"))) == 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_single_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    content = encode({"runs": {"a": {"loss": 1.25}}})
    at = data.draw(st.integers(0, len(content) - 1))
    altered = bytearray(content)
    altered[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises((Unreadable, StateError)):
        decode(bytes(altered))


def test_a_newer_schema_is_refused_and_left_alone(home: Path) -> None:
    Store(home).put_run(record(1))
    path = home / "state.json"
    newer = path.read_bytes().replace(b'"schema": 1', b'"schema": 2', 1)
    path.write_bytes(newer)
    with pytest.raises(StateError, match="newer flightdeck"):
        Store(home).runs()
    with pytest.raises(StateError, match=r"state\.json"):
        Store(home).put_run(record(2))
    assert path.read_bytes() == newer


def test_a_record_that_makes_no_sense_is_left_out_and_named(home: Path) -> None:
    Store(home).put_run(record(1))
    content = decode((home / "state.json").read_bytes())
    content["runs"]["odd"] = {"id": "odd", "state": "flying"}
    (home / "state.json").write_bytes(encode(content))
    store = Store(home)
    assert ids(store) == ["run-00001"]
    assert "odd" in str(store.notices[0])


def test_a_second_writer_waits_for_the_first(home: Path) -> None:
    home.mkdir()
    waiting = threading.Event()

    def sleep(_: float) -> None:
        waiting.set()

    with write_lock(home / "state.lock"):
        second = threading.Thread(target=lambda: Store(home, wait_s=60, sleep=sleep).put_run(record(2)))
        second.start()
        assert waiting.wait(30)
    second.join(30)
    assert ids(Store(home)) == ["run-00002"]


def test_a_writer_that_may_not_wait_learns_who_holds_the_state_and_readers_are_not_held_up(home: Path) -> None:
    Store(home).put_run(record(1))
    with write_lock(home / "state.lock"):
        with pytest.raises(StateError, match=f"pid {os.getpid()} "):
            Store(home, wait_s=0).put_run(record(2))
        assert ids(Store(home)) == ["run-00001"]


def test_four_writing_processes_lose_nothing(home: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from engine.store.store import Store\n"
        "from tests.unit.store.records import record\n"
        "for first in (0, 100, 200, 300):\n"
        "    if os.fork() == 0:\n"
        "        for number in range(first, first + 15): Store(Path(sys.argv[1]), wait_s=60).put_run(record(number))\n"
        "        os._exit(0)\n"
        "print([os.wait()[1] for _ in range(4)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(home)], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"[0, 0, 0, 0]\n"
    assert ids(Store(home)) == [f"run-{100 * who + number:05d}" for who in range(4) for number in range(15)]


@pytest.mark.needs("tmpfs")
class TestFullDisk:
    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        with mounted_disk(tmp_path / "disk", "256k") as disk:
            yield disk

    def test_it_loses_nothing_reports_it_and_continues_when_there_is_room(self, small_disk: Path) -> None:
        store = Store(small_disk)
        store.put_run(record(1))
        store.put_run(record(2))
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 512)
        with pytest.raises(StateError, match="make room"):
            store.put_run(record(3))
        assert ids(Store(small_disk)) == ["run-00001", "run-00002"]
        assert store.notices == []
        assert list(small_disk.glob(".state*")) == []
        filler.unlink()
        store.put_run(record(3))
        assert ids(Store(small_disk)) == ["run-00001", "run-00002", "run-00003"]


KILLED = (
    "import os, sys\n"
    "from pathlib import Path\n"
    "from engine.store.store import Store\n"
    "from tests.unit.store.records import record\n"
    "for line in sys.stdin:\n"
    "    if os.fork() == 0:\n"
    "        print(os.getpid(), flush=True)\n"
    "        store = Store(Path(sys.argv[1]))\n"
    "        number = int(line)\n"
    "        while True:\n"
    "            store.put_run(record(number))\n"
    "            os.write(1, b'%d\\n' % number)\n"
    "            number += 1\n"
    "    os.wait()\n"
    "    print('killed', flush=True)\n"
)
"""Forks a writer for each number that it reads, and says when that one is gone: the imports are done once. A line is
written whole or not at all."""


def kill_writers(home: Path, times: int) -> None:
    """Kill -9 a writer at random moments; what it has said to be written must be there each time."""
    dice = random.Random(20260121)
    acknowledged = 0
    argv = [sys.executable, "-c", KILLED, str(home)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writers:
        assert writers.stdin is not None and writers.stdout is not None
        for _ in range(times):
            writers.stdin.write(f"{acknowledged + 1}\n")
            writers.stdin.flush()
            writer = int(writers.stdout.readline())
            # Blocked until it writes for the first time, so that the kill falls among its writes.
            output = [writers.stdout.readline()]
            threading.Event().wait(dice.uniform(0, 0.04))
            os.kill(writer, signal.SIGKILL)
            output += iter(writers.stdout.readline, "killed\n")
            acknowledged = int(output[-1])
            reader = Store(home)
            found = ids(reader)
            assert reader.notices == []
            assert found[:acknowledged] == [f"run-{number:05d}" for number in range(1, acknowledged + 1)]
            # One more may have been written without being said.
            assert len(found) <= acknowledged + 1
            acknowledged = len(found)
    Store(home).put_run(record(acknowledged + 1))
    assert sorted(path.name for path in home.iterdir()) == ["state.json", "state.json.previous", "state.lock"]


def test_a_killed_writer_loses_nothing(home: Path) -> None:
    kill_writers(home, 4)


@pytest.mark.slow
def test_a_writer_killed_a_hundred_times_loses_nothing(home: Path) -> None:
    kill_writers(home, 100)


@pytest.mark.parametrize("call", ["fsync", "link", "replace", "write"])
def test_a_kill_between_any_two_steps_of_a_write_leaves_the_old_state_or_the_new(home: Path, call: str) -> None:
    """Each system call of the write is in turn the last that the writer lives to make."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from engine.store.store import Store\n"
        "from tests.unit.store.records import record\n"
        "def dying(real, left):\n"
        "    def call(*args, **kwargs):\n"
        "        nonlocal left\n"
        "        done = real(*args, **kwargs)\n"
        "        left -= 1\n"
        "        if left == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return done\n"
        "    return call\n"
        "name = sys.argv[1]\n"
        "for nth, home in enumerate(sys.argv[2:], 1):\n"
        "    if os.fork() == 0:\n"
        "        setattr(os, name, dying(getattr(os, name), nth))\n"
        "        Store(Path(home)).put_run(record(3))\n"
        "        os._exit(0)\n"
        "    print(os.WTERMSIG(os.wait()[1]))\n"
    )
    homes = [home.with_name(f"{home.name}{nth}") for nth in (1, 2, 3)]
    for each in homes:
        Store(each).put_run(record(1))
        Store(each).put_run(record(2))
    argv = [sys.executable, "-c", program, call, *map(str, homes)]
    ends = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert len(ends) == 3 and set(ends) <= {"0", "9"} and "9" in ends
    for each in homes:
        reader = Store(each)
        assert ids(reader) in (["run-00001", "run-00002"], ["run-00001", "run-00002", "run-00003"])
        assert reader.notices == []
        Store(each).put_run(record(3))
        assert ids(Store(each)) == ["run-00001", "run-00002", "run-00003"]
