"""What is written of a state, passed from rank to rank, and chosen to go on from, with ranks as threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from engine.worker import passing
from engine.worker.candidates import Row, wholes
from engine.worker.checkpoint import store
from engine.worker.checkpoint.manifest import NAME
from engine.worker.checkpoint.remote import Remote
from engine.worker.collective import Collective
from engine.worker.events import EventWriter
from engine.worker.job import JobError
from engine.worker.optimizer import Updater
from engine.worker.passing import gather_facts, pass_arrays
from engine.worker.periodic import Cadence, Periodic
from engine.worker.places import Places, check_compression
from engine.worker.replicas import Corrupted
from engine.worker.reporting import Reporter
from engine.worker.rescue import Rescue
from engine.worker.resume import Place, Resume, Start
from engine.worker.snapshot import Origin, Snapshot, state_hash
from engine.worker.stand_in import stand_in
from engine.worker.strategies.strategy import State, Strategy
from tests.training.together import together
from tests.unit.worker.waiting import wait_until

WINDOW = {"loss_sum": 1.5, "losses": 1}


class Kept:
    """The state's side of a strategy: one number for each part."""

    def __init__(self) -> None:
        self.restored: dict[int, float] = {}
        self.unfit: set[float] = set()
        self.others: set[float] = set()
        """Of another rank's part."""

    def fits(self, state: Mapping[str, Mapping[str, mx.array]]) -> bool:
        return float(np.asarray(state["weights"]["w"])[0]) not in self.unfit | self.others

    def restore(self, state: Mapping[str, Mapping[str, mx.array]], part: int, parts: int) -> None:
        value = float(np.asarray(state["weights"]["w"])[0])
        if value in self.unfit:
            raise ValueError("w is of another shape")
        self.restored[part] = value


def state(value: float) -> State:
    arrays = {"weights": {"w": mx.full((50,), value)}, "optimizer": {"step": mx.array(3, mx.uint64)}}
    mx.eval(arrays)
    return arrays


def snapshot(update: int, value: float | None = None) -> Snapshot:
    return Snapshot(2 * update, update, WINDOW, state(update if value is None else value))


def origin(part: int = 0, parts: int = 1, job: str = "job") -> Origin:
    return Origin(job, world_size=max(parts, 2), part=part, parts=parts)


def reporter(path: Path, rank: int = 0) -> Reporter:
    path.parent.mkdir(exist_ok=True)
    return Reporter(rank, EventWriter(path, rank, 2))


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def look(
    home: Path,
    places: list[list[Path]],
    unfit: set[float] | None = None,
    reached: int = 0,
    others: set[float] | None = None,
) -> tuple[list[Start], list[Kept], str]:
    """What as many ranks as `places` find in theirs, what they are restored to, and what they warn of."""
    kept = [Kept() for _ in places]
    for one in kept:
        one.unfit, one.others = unfit or set(), others or set()

    def run(collective: Collective) -> Start:
        rank = collective.rank
        search = Resume(collective, cast("Strategy", kept[rank]), "job", reporter(home / f"e{rank}", rank))
        return search.run([Place("checkpoint", folder) for folder in places[rank]], reached=reached)

    starts = together(len(places), run)
    said = "\n".join(
        event["message"]
        for rank in range(len(places))
        for event in events(home / f"e{rank}")
        if event["event"] == "warning"
    )
    return starts, kept, said


def hurt(checkpoint: store.Checkpoint) -> None:
    file = checkpoint.path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def test_a_state_is_of_the_job_however_its_layers_are_divided() -> None:
    raw = {"iters": 3, "layer_split": "0-1,1-4"}
    assert state_hash(raw) == state_hash({**raw, "layer_split": "0-4"}) == state_hash({"iters": 3})
    assert state_hash(raw) != state_hash({**raw, "iters": 4})


# Passing.


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([mx.float32, mx.bfloat16, mx.float16, mx.uint8, mx.uint64, mx.int16]),
            st.lists(st.integers(0, 5), max_size=3),
            st.integers(0, 2**32 - 1),
        ),
        max_size=6,
    ),
    st.integers(0, 2),
    st.sampled_from([8, 40, 2**20]),
)
def test_arrays_are_passed_on_to_the_bit(
    shapes: list[tuple[mx.Dtype, list[int], int]], owner: int, bucket: int
) -> None:
    """Any bits: what is no number, -0.0, and arrays without elements."""
    groups: dict[str, dict[str, mx.array]] = {"a": {}, "b": {}}
    for number, (dtype, shape, seed) in enumerate(shapes):
        count = int(np.prod(shape)) * dtype.size
        raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
        groups["ab"[number % 2]][f"x{number}"] = mx.array(raw).view(dtype).reshape(shape)
    mx.eval(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passing, "_BUCKET_BYTES", bucket)
        found = together(3, lambda each: pass_arrays(each, groups if each.rank == owner else None, owner))
    for one in found:
        assert {group: set(arrays) for group, arrays in one.items()} == {g: set(a) for g, a in groups.items()}
        for group, arrays in groups.items():
            for name, value in arrays.items():
                theirs = one[group][name]
                assert (theirs.dtype, theirs.shape) == (value.dtype, value.shape)
                ours, others = (np.asarray(each.reshape(-1).view(mx.uint8)) for each in (value, theirs))
                assert np.array_equal(ours, others)


def test_facts_of_different_lengths_come_to_everybody() -> None:
    facts = [[], {"text": "ä" * 50}, 3]
    assert together(3, lambda each: gather_facts(each, facts[each.rank])) == [facts] * 3


# Choosing.


def row(update: int, part: int = 0, parts: int = 1) -> Row:
    return Row(update, parts, part, "checkpoint", 2 * update, {}, None, 0)


def test_a_state_counts_when_all_its_parts_are_somewhere() -> None:
    rows = [[row(7, 0, 2), row(5, 0, 2), row(3)], [row(5, 1, 2), row(3)], [row(6, 1, 3)]]
    found = wholes(rows)
    assert [(whole.update, len(whole.holders)) for whole in found] == [(5, 2), (3, 1)]
    assert found[0].holders == (((0, 1),), ((1, 0),))
    assert found[1].holders == (((0, 2), (1, 1)),)


def test_the_newest_of_any_rank_goes_to_all(tmp_path: Path) -> None:
    origin().write(tmp_path / "a", snapshot(4))
    origin().write(tmp_path / "b", snapshot(9))
    starts, kept, said = look(tmp_path, [[tmp_path / "a"], [tmp_path / "b"], []])
    assert starts == [Start(18, 9, WINDOW, "checkpoint", 1)] * 3
    assert [one.restored for one in kept] == [{0: 9.0}] * 3
    assert said == ""


def test_of_equal_ones_the_lowest_ranks_is_taken_and_when_it_is_hurt_the_next_ones(tmp_path: Path) -> None:
    copies = [origin().write(tmp_path / name, snapshot(4)) for name in ("a", "b")]
    places = [[tmp_path / "a"], [tmp_path / "b"]]
    assert look(tmp_path / "one", places)[0][0].rank == 0
    hurt(copies[0])
    starts, kept, said = look(tmp_path / "two", places)
    assert [start.rank for start in starts] == [1, 1] and [one.restored for one in kept] == [{0: 4.0}] * 2
    assert "its hash is not the manifest's" in said


def test_what_does_not_fit_the_job_is_told_and_the_one_before_used(tmp_path: Path) -> None:
    for update in (1, 2):
        origin().write(tmp_path / "a", snapshot(update))
    origin(job="another").write(tmp_path / "a", snapshot(3))
    starts, kept, said = look(tmp_path, [[tmp_path / "a"], []], unfit={2.0})
    assert [start.update for start in starts] == [1, 1] and kept[1].restored == {0: 1.0}
    assert "w is of another shape" in said and "it is of another job" in said


def test_a_run_whose_state_is_lost_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    raised: list[str] = []

    def run(collective: Collective) -> None:
        rank = collective.rank
        search = Resume(collective, cast("Strategy", Kept()), "job", reporter(tmp_path / f"e{rank}", rank))
        with pytest.raises(JobError) as error:
            search.run([Place("checkpoint", tmp_path / "none")], adapter=rank == 0, reached=40)
        raised.append(str(error.value))

    together(2, run)
    assert len(raised) == 2 and raised[0] == raised[1]
    assert "no rank has any" in raised[0] and "iteration 40" in raised[0] and "\n" not in raised[0]
    assert "`flightdeck resume`" in raised[0] and "`flightdeck launch`" in raised[0]
    # With a state, and where nothing had been reached, all is as before.
    assert look(tmp_path / "one", [[], []])[0] == [Start()] * 2
    origin().write(tmp_path / "a", snapshot(4))
    assert [start.update for start in look(tmp_path / "two", [[tmp_path / "a"], []], reached=40)[0]] == [4, 4]


def resumed(home: Path, runs: list[Path], *, stops: bool = True) -> tuple[list[Start | Corrupted], list[Kept], str]:
    """What ranks with these folders of the run go on from, or raise."""
    kept = [Kept() for _ in runs]

    def run(collective: Collective) -> Start | Corrupted:
        rank = collective.rank
        told = reporter(home / f"e{rank}", rank)
        search = Resume(collective, cast("Strategy", kept[rank]), "job", told, stops=stops)
        try:
            return search.run(Places.of(runs[rank], runs[rank], "run", None).states())
        except Corrupted as error:
            return error

    found = together(len(runs), run)
    said = [event["message"] for rank in range(len(runs)) for event in events(home / f"e{rank}") if "message" in event]
    return found, kept, "\n".join(said)


def rescued(home: Path, attempt: int, values: list[float]) -> list[Path]:
    """A node for each rank of an attempt, which has rescued its state of update 4."""
    for rank, value in enumerate(values):
        origin().write(home / f"n{rank}" / "rescue" / str(attempt) / f"rank{rank}", snapshot(4, value))
    return [home / f"n{rank}" for rank in range(len(values))]


def test_a_rescue_that_most_ranks_outvote_is_not_gone_on_from(tmp_path: Path) -> None:
    found, kept, said = resumed(tmp_path / "one", rescued(tmp_path, 1, [9.0, 4.0, 4.0]))
    assert found == [Start(8, 4, WINDOW, "rescue", 1)] * 3 and [one.restored for one in kept] == [{0: 4.0}] * 3
    assert "update 4" in said and "attempt 1" in said and "rank 0 has another one than most" in said
    # Two ranks of one node see the same folders: these count once.
    (tmp_path / "n1").rename(tmp_path / "gone")
    (tmp_path / "n1").mkdir()
    nodes = [tmp_path / "n0", tmp_path / "n0", tmp_path / "n2"]
    assert all(isinstance(one, Corrupted) for one in resumed(tmp_path / "two", nodes)[0])


def test_rescues_that_differ_without_a_majority_are_not_gone_on_from(tmp_path: Path) -> None:
    runs = rescued(tmp_path, 1, [9.0, 4.0])
    found, kept, _ = resumed(tmp_path / "stop", runs)
    for error in found:
        assert isinstance(error, Corrupted) and error.facts == {"ranks": [0, 1], "certain": False}
        assert "those of ranks 0, 1" in str(error) and "\n" not in str(error)
    assert [one.restored for one in kept] == [{}, {}]
    found, kept, said = resumed(tmp_path / "warn", runs, stops=False)
    assert [one.restored for one in kept] == [{0: 9.0}] * 2 and "which is right cannot be told" in said


def test_rescues_of_different_attempts_may_differ(tmp_path: Path) -> None:
    """Another number of ranks sums in another order."""
    origin().write(tmp_path / "n0" / "rescue" / "1" / "rank0", snapshot(4, 9.0))
    origin().write(tmp_path / "n1" / "rescue" / "2" / "rank1", snapshot(4, 4.0))
    found, _, said = resumed(tmp_path, [tmp_path / "n0", tmp_path / "n1"])
    assert found == [Start(8, 4, WINDOW, "rescue", 0)] * 2 and said == ""


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"iteration": "4", "part": 0, "parts": 1, "window": {}},
        {"iteration": -4, "part": 0, "parts": 1, "window": {}},
        {"iteration": 4, "part": 1, "parts": 1, "window": {}},
        {"iteration": 4, "part": 0, "parts": 10**9, "window": {}},
        {"iteration": 4, "part": True, "parts": 1, "window": {}},
        {"iteration": 4, "part": 0, "parts": 1, "window": {"losses": "many"}},
        {"iteration": 4, "part": 0, "parts": 1, "window": []},
    ],
)
def test_a_manifest_that_says_nonsense_of_the_training_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    written = origin().write(tmp_path / "a", snapshot(2))
    manifest = json.loads((written.path / NAME).read_bytes())
    (written.path / NAME).write_text(json.dumps({**manifest, "state": facts}))
    starts, kept, said = look(tmp_path, [[tmp_path / "a"]])
    assert starts[0].source == "none" and kept[0].restored == {}
    assert "its manifest" in said and "1 were refused" in said


def test_each_rank_takes_its_own_part_and_others_ranks_take_all(tmp_path: Path) -> None:
    for part in (0, 1):
        origin(part, 2).write(tmp_path / f"p{part}", snapshot(5, value=10.0 + part))
        origin(part, 2).write(tmp_path / f"p{part}", snapshot(6, value=20.0 + part))
    folders = [[tmp_path / "p0"], [tmp_path / "p1"]]
    starts, kept, _ = look(tmp_path / "same", folders)
    assert starts == [Start(12, 6, WINDOW, "checkpoint", None)] * 2
    assert [one.restored for one in kept] == [{0: 20.0}, {0: 21.0}]
    # One rank's layers are others than they were: all parts go to all.
    starts, kept, said = look(tmp_path / "divided", folders, others={21.0})
    assert starts == [Start(12, 6, WINDOW, "checkpoint", 0)] * 2 and said == ""
    assert [one.restored for one in kept] == [{0: 20.0, 1: 21.0}] * 2
    _, kept, _ = look(tmp_path / "three", [*folders, []])
    assert [one.restored for one in kept] == [{0: 20.0, 1: 21.0}] * 3
    _, kept, _ = look(tmp_path / "one", [folders[0] + folders[1]])
    assert kept[0].restored == {0: 20.0, 1: 21.0}


def test_a_part_that_is_hurt_takes_the_whole_state_with_it(tmp_path: Path) -> None:
    for part in (0, 1):
        origin(part, 2).write(tmp_path / f"p{part}", snapshot(5, value=10.0 + part))
    newer = [origin(part, 2).write(tmp_path / f"p{part}", snapshot(6)) for part in (0, 1)]
    hurt(newer[1])
    starts, kept, said = look(tmp_path, [[tmp_path / "p0"], [tmp_path / "p1"]])
    assert [start.update for start in starts] == [5, 5]
    assert [one.restored for one in kept] == [{0: 10.0}, {0: 11.0}] and "step-000000006" in said


# Writing beside the training.


def periodic(home: Path, every: int = 2, *, part: int = 0, parts: int = 1, **fields: Any) -> Periodic:
    who = Origin("job", world_size=2, part=part, parts=parts)
    told = reporter(home / f"e{part}", part)
    return Periodic(home / f"p{part}", Cadence(every, keep=2), who, told, writes=True, **fields)


def names(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in store.listed(folder)]


def test_one_begins_when_it_is_due_and_all_are_idle_and_old_ones_go(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    for update in range(1, 9):
        idle, settled = checkpoints.counters()
        # The other rank writes nothing: it is idle, and has settled all.
        checkpoints.agree(idle + 1, settled + 1)
        if checkpoints.due(update):
            assert update % 2 == 0
            checkpoints.begin(snapshot(update))
            wait_until(lambda: checkpoints.counters()[0] == 1.0)
    assert checkpoints.committed == 6
    assert names(tmp_path / "p0") == [6, 8]
    phases = [(event["phase"], event["update"]) for event in events(tmp_path / "e0")]
    assert phases == [(phase, update) for update in (2, 4, 6, 8) for phase in ("begin", "committed")]
    last = events(tmp_path / "e0")[-1]
    assert last["background"] and last["bytes"] > 0 and 0 <= last["blocking_seconds"] < last["seconds"] + 1


def test_while_one_is_written_none_begins_and_that_is_told(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.agree(1.0, 2.0)
    assert not checkpoints.due(2)
    assert not checkpoints.due(3)
    assert not checkpoints.due(4)
    told = events(tmp_path / "e0")
    assert [(event["phase"], event["update"]) for event in told if event["event"] == "checkpoint"] == [
        ("skipped", 2),
        ("skipped", 4),
    ]
    (warning,) = [event["message"] for event in told if event["event"] == "warning"]
    assert "was due while the one before was still being written" in warning


def test_a_full_disk_is_a_warning_and_the_next_one_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.begin(snapshot(2))
    checkpoints.finish(None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "folder_to_disk", full)
        checkpoints.begin(snapshot(4))
        checkpoints.finish(None)
    assert checkpoints.counters() == [1.0, 0.0]
    checkpoints.begin(snapshot(6))
    checkpoints.finish(None)
    assert checkpoints.counters() == [1.0, 1.0]
    assert names(tmp_path / "p0") == [2, 6]
    warnings = [event["message"] for event in events(tmp_path / "e0") if event["event"] == "warning"]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]


def test_a_part_outlives_newer_ones_that_are_not_known_to_be_whole(tmp_path: Path) -> None:
    """Another rank's disk is full: its parts never come, and the last whole state is not given up for them."""
    checkpoints = periodic(tmp_path, parts=2)
    for update in (2, 4):
        checkpoints.agree(2.0, 2.0)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    for update in (6, 8, 10):
        checkpoints.agree(2.0, 1.0)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    assert {2, 4} <= set(names(tmp_path / "p0"))


def test_the_state_of_a_stop_is_written_once(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path)
    checkpoints.begin(snapshot(4))
    checkpoints.finish(snapshot(4))
    checkpoints.finish(snapshot(5))
    assert names(tmp_path / "p0") == [4, 5]
    assert len(events(tmp_path / "e0")) == 4


# Elsewhere.


def test_behind_an_address_are_whole_copies_and_the_newest_comes_back(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/elsewhere/run")
    checkpoints = periodic(tmp_path, remote=remote)
    for update in (2, 4, 6):
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    there = tmp_path / "elsewhere" / "run"
    assert names(there) == [4, 6]
    assert events(tmp_path / "e0")[-1]["path"] == f"file://{tmp_path}/elsewhere/run/step-000000006"
    refused: list[str] = []
    brought: list[Path] = []

    def fetch(name: str, count: int) -> list[int]:
        def hear(path: Path, size: int) -> None:
            brought.append(path)

        assert remote.fetch(tmp_path / name, count, lambda path, why: refused.append(why), hear)
        return names(tmp_path / name)

    assert fetch("new", 1) == [6] and refused == [] and len(brought) == 2
    assert store.prove(tmp_path / "new" / "step-000000006").manifest.update == 6
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step-000000006"], "nothing else is left there"
    # What is here already and proves itself is not brought again; what does not is.
    assert fetch("new", 2) == [4, 6] and len(brought) == 4
    (tmp_path / "new" / "step-000000006" / "weights.safetensors").write_bytes(b"short")
    assert fetch("new", 2) == [4, 6] and len(brought) == 6 and refused == []
    store.prove(tmp_path / "new" / "step-000000006")


@pytest.mark.parametrize("words", ["its manifest says", "its hash is not the manifest's"])
def test_a_copy_that_is_damaged_does_not_hide_the_one_before(tmp_path: Path, words: str) -> None:
    there = tmp_path / "elsewhere" / "run"
    for update in (2, 4, 6):
        last = origin().write(there, snapshot(update))
    if words == "its manifest says":
        (last.path / "weights.safetensors").write_bytes(b"short")
    else:
        hurt(last)
    places = Places.of(tmp_path / "home", tmp_path, "run", f"file://{tmp_path}/elsewhere")
    places.fetch(0, 1, replicated=True, keep=2, reporter=reporter(tmp_path / "e"))
    assert names(places.base) == [2, 4]
    told = events(tmp_path / "e")
    (warning,) = [event["message"] for event in told if event["event"] == "warning"]
    assert words in warning and "step-000000006" in warning
    assert "step-000000004/weights.safetensors" in [event["path"] for event in told if event["event"] == "fetched"]


def test_a_part_that_is_missing_elsewhere_leaves_the_state_before_it(tmp_path: Path) -> None:
    for part, updates in enumerate([(4, 6), (4,)]):
        for update in updates:
            origin(part, 2).write(tmp_path / "elsewhere" / "run" / f"part{part}", snapshot(update))
    places = Places.of(tmp_path / "home", tmp_path, "run", f"file://{tmp_path}/elsewhere")
    places.fetch(0, 1, replicated=False, keep=2, reporter=reporter(tmp_path / "e"))
    assert [names(places.folder(part, 2)) for part in (0, 1)] == [[4, 6], [4]]


def test_a_copy_that_is_replaced_has_no_manifest_meanwhile(tmp_path: Path) -> None:
    remote = Remote(f"file://{tmp_path}/elsewhere")
    remote.put(origin().write(tmp_path / "a", snapshot(4)))
    other = origin().write(tmp_path / "b", snapshot(4, value=9.0))
    (other.path / "weights.safetensors").unlink()
    with pytest.raises(OSError, match=r"weights\.safetensors"):
        remote.put(other)
    assert not (tmp_path / "elsewhere" / other.path.name / NAME).exists()


def test_copies_of_a_part_outlive_newer_ones_that_are_not_known_to_be_whole(tmp_path: Path) -> None:
    checkpoints = periodic(tmp_path, parts=2, remote=Remote(f"file://{tmp_path}/elsewhere"))
    for update in (2, 4, 6, 8):
        checkpoints.agree(2.0, 1.0)
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
    assert names(tmp_path / "elsewhere") == [2, 4, 6, 8]


def test_what_was_just_committed_stays_before_later_updates_here_and_elsewhere(tmp_path: Path) -> None:
    there = tmp_path / "elsewhere"
    for folder in (tmp_path / "p0", there):
        for update in (20, 30, 40):
            origin(job="another").write(folder, snapshot(update))
    checkpoints = periodic(tmp_path, remote=Remote(f"file://{there}"))
    for update in (2, 4):
        checkpoints.begin(snapshot(update))
        checkpoints.finish(None)
        assert update in names(tmp_path / "p0")
        assert update in names(there)
    assert names(tmp_path / "p0") == names(there) == [2, 4]


@pytest.mark.parametrize("address", ["s3://bucket/folder", "nonsense://x"])
def test_an_address_that_nothing_here_can_reach_is_one_line(tmp_path: Path, address: str) -> None:
    places = Places.of(tmp_path, tmp_path, "run", address)
    with pytest.raises(JobError, match=r"^\[checkpoint\] destination: ") as refused:
        places.remote(0, 1)
    assert "\n" not in str(refused.value)


def test_a_compression_that_is_not_there_is_one_line() -> None:
    check_compression("gzip")
    with pytest.raises(JobError, match=r"compression: 'xz'"):
        check_compression("xz")


# Rescue.


def rescue(home: Path, attempt: int = 2, **fields: Any) -> Rescue:
    return Rescue(home, attempt, 1, origin(**fields), reporter(home / "e", 1))


def test_a_rescue_is_written_once_and_takes_the_place_of_older_ones(tmp_path: Path) -> None:
    for attempt in (1, 3):
        origin().write(tmp_path / "rescue" / str(attempt) / "rank0", snapshot(attempt))
    one = rescue(tmp_path)
    one.hold(snapshot(7))
    assert one.leave() and one.leave()
    assert sorted(path.name for path in (tmp_path / "rescue").iterdir()) == ["2", "3"]
    found = store.newest(tmp_path / "rescue" / "2" / "rank1", lambda path, why: pytest.fail(why))
    assert found is not None and found.manifest.update == 7
    told = [event for event in events(tmp_path / "e") if event["event"] == "rescue"]
    assert [(event["phase"], event["iteration"], event["update"]) for event in told] == [
        ("begin", 14, 7),
        ("committed", 14, 7),
    ]
    assert told[0]["bytes"] == sum(each.nbytes for group in snapshot(7).state.values() for each in group.values()) > 0


def test_while_an_update_changes_the_state_nobody_writes_it(tmp_path: Path) -> None:
    one = rescue(tmp_path)
    one.hold(snapshot(7))
    with one.changing():
        writer = threading.Thread(target=one.leave)
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and events(tmp_path / "e") == []
        one.hold(snapshot(8))
    writer.join(20)
    assert events(tmp_path / "e")[-1]["update"] == 8


def test_a_state_that_became_no_number_is_not_rescued(tmp_path: Path) -> None:
    one = rescue(tmp_path)
    one.hold(snapshot(7))
    with pytest.raises(RuntimeError), one.changing():
        raise RuntimeError("diverged")
    assert not one.leave() and not (tmp_path / "rescue").exists()


@pytest.mark.parametrize(("update", "fields"), [(0, {}), (7, {"part": 1, "parts": 2})])
def test_what_is_nothing_or_only_a_part_is_not_rescued(tmp_path: Path, update: int, fields: dict[str, Any]) -> None:
    one = rescue(tmp_path, **fields)
    one.hold(snapshot(update))
    one.keep()
    assert not one.leave() and not (tmp_path / "rescue").exists()


def test_a_full_disk_at_the_rescue_is_told(tmp_path: Path) -> None:
    (tmp_path / "rescue").write_text("in the way")
    one = rescue(tmp_path)
    one.hold(snapshot(7))
    assert not one.leave()
    assert [event.get("phase") for event in events(tmp_path / "e")] == ["begin", "failed", None]


def test_a_state_held_by_reference_takes_no_memory(tmp_path: Path) -> None:
    value = mx.zeros((2**20,))
    mx.eval(value)
    one = rescue(tmp_path)
    before = mx.get_active_memory()
    one.hold(Snapshot(2, 1, WINDOW, {"weights": {"w": value}}))
    assert mx.get_active_memory() == before
    with one.changing():
        value = value + 1
        mx.eval(value)
        # The old state's memory is given back while the new one is made.
        assert mx.get_active_memory() <= before


def test_what_is_restored_finds_no_first_moments_in_its_way(tmp_path: Path) -> None:
    """Two states would be too much for a model that just fits."""
    job, model = stand_in(1, tmp_path)
    size = sum(value.nbytes for _, value in tree_flatten(model.trainable_parameters()))
    before = mx.get_active_memory()
    updater = Updater(job, model)
    assert mx.get_active_memory() - before < size / 10
    updater.evaluate()
    assert mx.get_active_memory() - before > 1.9 * size
